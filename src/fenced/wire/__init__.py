"""Shared by all code that talks to a server: addresses, pools, connections, and codecs that do no I/O."""
