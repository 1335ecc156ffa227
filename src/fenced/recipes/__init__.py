"""What is built with leases and tokens: election, permits, replicas. It needs no new verb of an authority."""
