"""The guard over ZooKeeper: marks and values are nodes, and one multi decides and writes."""
