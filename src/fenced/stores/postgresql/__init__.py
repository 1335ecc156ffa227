"""PostgreSQL: leases in a schema of their own, and triggers on the program's own tables."""
