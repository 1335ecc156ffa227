"""Figures that the project promises, measured. `make bench` runs them all; README.md says how to read them."""
