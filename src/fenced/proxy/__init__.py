"""A proxy in front of an HTTP service that knows nothing of fencing: requests reach it in the order of their tokens."""
