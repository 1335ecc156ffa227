"""What all guards share."""
