"""SQLite files: leases, values under names, and triggers on the program's own tables."""
