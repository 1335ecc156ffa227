"""Redis and Valkey: leases by scripts on the server, and commands behind a fence."""
