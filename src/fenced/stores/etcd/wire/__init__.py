"""The client side of etcd: addresses, messages, connections and calls."""
