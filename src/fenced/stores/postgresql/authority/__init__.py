"""The postgresql authority: see authority.py."""
