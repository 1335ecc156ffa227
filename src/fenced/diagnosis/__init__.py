"""Diagnosis: whether a set-up is safe, which ttl it should have, and what happened to a name."""
