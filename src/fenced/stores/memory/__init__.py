"""Leases and values in the memory of this process: the reference models of authority and guard."""
