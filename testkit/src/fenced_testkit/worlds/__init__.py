"""Seeded worlds: the client code that ships, under every fault at once, in virtual time, watched by a judge."""
