"""The leaves that wait, connect and read clocks, in two colours: blocking and asyncio."""
