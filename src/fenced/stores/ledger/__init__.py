"""The ledger: leases in memory, with a journal in files of its own. `fenced serve` keeps leases in it by default."""
