"""What several authorities share."""
