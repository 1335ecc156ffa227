"""The MariaDB guard: triggers on the program's own tables, and values under names."""
