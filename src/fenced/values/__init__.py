"""Values and pure functions: names, stamps, leases, the decision, modes, contracts. No I/O and no clock."""
