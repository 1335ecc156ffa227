"""The wire of the service: its addresses, and one HTTP/1.1 connection to an instance."""
