"""MariaDB and MySQL: leases in tables of their own, and triggers on the program's own tables."""
