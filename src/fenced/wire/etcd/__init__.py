"""How an etcd cluster is spoken to: its address, its messages, connections and calls."""
