"""Values under names in S3, Google Cloud Storage or Azure Blob Storage, by their addresses."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from obstore import store

from fenced.contracts import Runtime
from fenced.errors import Misuse, redacted, shown
from fenced.guards.objects.buckets import ObstoreBucket
from fenced.guards.objects.cells import ObjectCells, ObjectMarks
from fenced.guards.shared.cellguard import options_in

_SETTINGS = {
    "s3": {"endpoint", "region", "anonymous"},
    "gs": set[str](),
    "az": {"account", "endpoint"},
}


class ObjectValues(ObjectMarks):
    """Values under names, one object each."""

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> ObjectValues:
        store, prefix, rest = store_at(url)
        bucket = ObstoreBucket(store, prefix, runtime)
        return cls(ObjectCells(bucket), runtime, url, **options_in(rest))


def store_at(url: str) -> tuple[Any, str, str]:
    """The store behind s3://bucket/prefix, gs:// or az://, the prefix, and the address with the guard's options alone.

    Credentials come from the environment, as each cloud's own tools have them.
    """
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    settings: dict[str, Any] = {
        key: given.pop(key) for key in _SETTINGS.get(parts.scheme, set()) & given.keys()
    }
    prefix = unquote(parts.path).strip("/")
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise Misuse(f"an object store's address is s3://bucket/prefix, not {shown(redacted(url))}")
    common: dict[str, Any] = {"retry_config": {"max_retries": 0}}  # a retry could not tell its own success
    if settings.get("endpoint", "").startswith("http://"):
        common["client_options"] = {"allow_http": True}
    made: Any
    if parts.scheme == "s3":
        if settings.pop("anonymous", "false") == "true":
            common["skip_signature"] = True
        made = store.S3Store(parts.netloc, **settings, **common)
    elif parts.scheme == "gs":
        made = store.GCSStore(parts.netloc, **common)
    else:
        if "account" in settings:
            common["account_name"] = settings.pop("account")
        made = store.AzureStore(parts.netloc, **settings, **common)
    return made, f"{prefix}/" if prefix else "", f"{parts.scheme}:?{urlencode(given)}"
