"""The three ways to run the same coroutines: blocking, asyncio, simulated."""
