"""The client side of ZooKeeper: addresses, and connections that many callers share."""
