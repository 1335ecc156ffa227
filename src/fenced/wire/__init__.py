"""What everything that talks to a server shares: streams, pools, and codecs that do no I/O."""
