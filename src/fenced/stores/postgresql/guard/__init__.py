"""The guard of PostgreSQL tables: the database itself decides, in triggers (`schema`, `triggers`)."""
