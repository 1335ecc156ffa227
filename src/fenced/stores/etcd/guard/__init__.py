"""The guard over etcd: marks and values are keys, and one transaction decides and writes."""
