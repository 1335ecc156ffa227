"""How leases work, for every authority: the algorithm of row stores, rules, batches and local wake-ups."""
