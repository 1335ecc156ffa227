"""Objects of S3 and stores like it, guarded."""
