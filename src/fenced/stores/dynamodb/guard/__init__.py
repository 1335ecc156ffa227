"""Values and items of DynamoDB and tables like it, guarded."""
