"""The guard of PostgreSQL tables: the database itself decides, in triggers (`schema_1.sql`, `install`)."""
