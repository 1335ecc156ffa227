"""The redis authority: see authority.py."""
