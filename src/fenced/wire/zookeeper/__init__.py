"""How a ZooKeeper ensemble is spoken to: its address, and connections that many callers share."""
