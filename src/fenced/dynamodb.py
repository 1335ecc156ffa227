"""DynamoGuard: transactions of your own boto3 or aiobotocore client on DynamoDB, behind a fence."""

from fenced.stores.dynamodb.guard.own import (
    AsyncDynamoGuard,
    AsyncDynamoTransaction,
    DynamoGuard,
    DynamoTransaction,
)

__all__ = ["AsyncDynamoGuard", "AsyncDynamoTransaction", "DynamoGuard", "DynamoTransaction"]


def __dir__() -> list[str]:
    return __all__
