"""What everything that talks to a server shares: pools, transports, and codecs that do no I/O."""
