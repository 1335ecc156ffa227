"""ObjectGuard: objects of S3 and stores like it, replaced under a lease through the program's own client."""

from fenced.stores.objects.guard.own import AsyncObjectGuard, ObjectChange, ObjectGuard, bucket_policy

__all__ = ["AsyncObjectGuard", "ObjectChange", "ObjectGuard", "bucket_policy"]


def __dir__() -> list[str]:
    return __all__
