"""HTTP/1.1, once: a strict grammar of heads and bodies that does no I/O, and a server on asyncio."""
