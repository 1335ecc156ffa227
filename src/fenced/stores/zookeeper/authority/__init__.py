"""The zookeeper authority: see authority.py."""
