"""The long figures: too slow for every test run, written to docs/evidence with date, versions and seed."""
