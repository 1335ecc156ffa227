"""The authority behind `fenced serve`: one client of a service."""
