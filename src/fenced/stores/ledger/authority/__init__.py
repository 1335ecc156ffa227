"""The ledger: see authority.py."""
