"""The simulated runtime: virtual time, a seeded scheduler and a network that loses, delays and doubles."""
