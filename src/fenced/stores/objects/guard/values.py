"""Values under names in S3, Google Cloud Storage or Azure Blob Storage, by their addresses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from obstore import store
from obstore.exceptions import BaseError

from fenced.errors import Misconfigured, Misuse, Unsupported, redacted, shown
from fenced.guards.configoperator import CellOperator
from fenced.guards.options import options_in
from fenced.stores.objects.guard.buckets import ObstoreBucket, short
from fenced.stores.objects.guard.cells import ObjectCells, ObjectMarks
from fenced.stores.objects.guard.policy import bucket_policy
from fenced.values.contracts import Operator, Runtime

T = TypeVar("T")

_SETTINGS = {
    "s3": {"endpoint", "region", "anonymous"},
    "gs": set[str](),
    "az": {"account", "endpoint"},
}


class ObjectValues(ObjectMarks):
    """Values under names, one object each."""

    @classmethod
    def at(cls, url: str, runtime: Runtime) -> ObjectValues:
        made, prefix, rest = store_at(url)
        bucket = ObstoreBucket(made, prefix, runtime)
        return cls(ObjectCells(bucket), runtime, url, **options_in(rest))

    async def operate(self, work: Callable[[Operator], Awaitable[T]]) -> T:
        return await work(ObjectOperator(self))


class ObjectOperator(CellOperator):
    """What operators do with a guard over objects."""

    def __init__(self, guard: ObjectValues) -> None:
        super().__init__(guard)
        self._address = urlsplit(guard.url)

    async def policy(self, partition: str) -> dict[str, Any]:
        if self._address.scheme != "s3":
            raise Unsupported(
                f"{self._address.scheme}: only a bucket policy of S3 can deny a PUT without a condition"
            )
        return bucket_policy(self._address.netloc, unquote(self._address.path), partition=partition)


def store_at(url: str) -> tuple[Any, str, str]:
    """The store behind s3://bucket/prefix, gs:// or az://, the prefix, and the address with the guard's options alone.

    Credentials come from the environment, as each cloud's own tools have them.
    """
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    settings = {key: given.pop(key) for key in _SETTINGS[parts.scheme] & given.keys()}
    prefix = unquote(parts.path).strip("/")
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise Misuse(f"an object store's address is s3://bucket/prefix, not {shown(redacted(url))}")
    try:
        made = _store(parts.scheme, parts.netloc, settings)
    except (BaseError, ValueError) as error:
        raise Misconfigured(f"{parts.scheme}://{parts.netloc}: {short(error)}") from error
    return made, f"{prefix}/" if prefix else "", f"{parts.scheme}:?{urlencode(given)}"


def _store(scheme: str, bucket: str, settings: dict[str, str]) -> Any:
    options: dict[str, Any] = {"retry_config": {"max_retries": 0}}  # a retry could not tell its own success
    options.update((key, settings[key]) for key in ("endpoint", "region") if key in settings)
    if settings.get("endpoint", "").startswith("http://"):
        options["client_options"] = {"allow_http": True}
    if settings.get("anonymous") == "true":
        options["skip_signature"] = True
    if "account" in settings:
        options["account_name"] = settings["account"]
    kinds: dict[str, Any] = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
    return kinds[scheme](bucket, **options)
