"""Objects of S3, Google Cloud Storage, Azure and stores like them, replaced by conditional writes."""
