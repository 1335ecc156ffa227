"""The mariadb authority: see authority.py."""
