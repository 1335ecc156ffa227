"""The SQLite guards: values.py for values under names, tables.py for the program's own tables."""
