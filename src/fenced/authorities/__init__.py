"""Authorities grant leases and mint tokens; `memory` is the reference model of them all."""
