"""How a Redis server is spoken to: its address, connections, and what its refusals mean."""
