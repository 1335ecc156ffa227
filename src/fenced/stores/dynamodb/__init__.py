"""DynamoDB: items written by conditional transactions."""
