"""What all clients of servers share: addresses, pools, heartbeats, TLS, file systems."""
