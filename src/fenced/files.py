"""FileGuard: replace and append to files, and replace folders, under a lease."""

from fenced.stores.files.guard.own import FileGuard, FilePath

__all__ = ["FileGuard", "FilePath"]


def __dir__() -> list[str]:
    return __all__
