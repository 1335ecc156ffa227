"""The etcd authority: see authority.py."""
