"""Leases over HTTP from `fenced serve`: the client's side."""
