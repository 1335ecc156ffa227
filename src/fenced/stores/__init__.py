"""One room for each store: its address, wire, authority and guard, with their SQL and Lua."""
