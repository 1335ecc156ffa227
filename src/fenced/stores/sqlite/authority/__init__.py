"""The sqlite authority: see authority.py."""
