"""ZooKeeper: leases as ephemeral sequential nodes, and multis behind a fence."""
