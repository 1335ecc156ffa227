"""How MariaDB and MySQL are spoken to: PyMySQL under the blocking runtime, asyncmy under asyncio."""
