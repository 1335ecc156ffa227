"""etcd: leases as keys under etcd's own leases, and transactions behind a fence."""
