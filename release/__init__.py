"""What is done to make a release: docs/releasing.md."""
