"""What happens to each source of metrics, and what its numbers must be afterwards.

Each step of a story notes what it did in a `History`; what Prometheus has read must be that, and nothing else.
"""
