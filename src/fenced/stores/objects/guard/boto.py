"""Buckets of S3 and stores like it, through the program's own boto3 or aiobotocore client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, BinaryIO, NoReturn

from fenced.errors import FencedError, Indeterminate, Misconfigured, Unavailable
from fenced.guards.boto import BotoClient, answer_in
from fenced.stores.objects.guard.buckets import PART_BYTES, part_bytes
from fenced.values.contracts import Runtime

_MISSING = ("NoSuchKey", "404")
_WRONG = {
    "NoSuchBucket": "there is no such bucket; create it first",
    "AccessDenied": "the object store denies access: the guard needs GetObject, PutObject, DeleteObject and "
    "ListBucket, without which S3 does not say that an object is missing",
    "NoCredentialsError": "the client has no credentials",
    "NotImplemented": "the object store lacks conditional writes",
}


class BotoBucket:
    """A bucket, through a client of boto3, or of aiobotocore or aioboto3 in an asyncio program."""

    tells_retries = True

    def __init__(self, client: Any, bucket: str, prefix: str, runtime: Runtime) -> None:
        self._boto = BotoClient(client, runtime, "AsyncObjectGuard")
        self._failures = self._boto.failures
        self._bucket = bucket
        self._prefix = prefix
        self._runtime = runtime

    async def get(self, key: str) -> tuple[Any, bytes] | None:
        try:
            reply = await self._send("get_object", Key=self._prefix + key)
            return reply["ETag"], await self._read(reply["Body"])
        except self._failures as error:
            if answer_in(error).code in _MISSING:
                return None
            _fail(error, Unavailable)

    async def put(self, key: str, body: bytes, version: Any) -> Any:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            reply = await self._send("put_object", Key=self._prefix + key, Body=body, **condition)
        except self._failures as error:
            status, code, sent_once = answer_in(error)
            if status and not sent_once:
                # This is the answer to a retry by boto3: the first try may have happened.
                raise Indeterminate(f"the first reply was lost, and a retry was answered: {error}") from error
            if status in (409, 412) or code in _MISSING:
                return None
            _fail(error, Indeterminate)
        return reply["ETag"]

    async def upload(self, key: str, file: BinaryIO) -> None:
        here: dict[str, Any] = {"Key": self._prefix + key}
        try:
            here["UploadId"] = (await self._send("create_multipart_upload", **here))["UploadId"]
        except self._failures as error:
            _fail(error, Unavailable)
        try:
            await self._send_parts(here, file)
        except BaseException as error:
            with contextlib.suppress(*self._failures):  # if it cannot be reached, sweep() aborts it later
                await self._send("abort_multipart_upload", **here)
            if isinstance(error, self._failures):
                _fail(error, Unavailable)
            raise

    async def _send_parts(self, here: dict[str, Any], file: BinaryIO) -> None:
        size = part_bytes(file)
        parts: list[dict[str, Any]] = []
        while (body := await self._runtime.call(file.read, size)) or not parts:
            number = len(parts) + 1
            reply = await self._send("upload_part", **here, PartNumber=number, Body=body)
            parts.append({"PartNumber": number, "ETag": reply["ETag"]})
        await self._send("complete_multipart_upload", **here, MultipartUpload={"Parts": parts})

    async def download(self, key: str) -> AsyncIterator[bytes]:
        try:
            stream = (await self._send("get_object", Key=self._prefix + key))["Body"]
            while part := await self._read(stream, PART_BYTES):
                yield part
        except self._failures as error:
            if answer_in(error).code in _MISSING:
                raise KeyError(key) from error
            _fail(error, Unavailable)

    async def delete(self, key: str) -> None:
        try:
            await self._send("delete_object", Key=self._prefix + key)
        except self._failures as error:
            _fail(error, Unavailable)

    async def keys(self, prefix: str) -> list[str]:
        found: list[str] = []
        more: dict[str, Any] = {}
        while True:
            try:
                page = await self._send("list_objects_v2", Prefix=self._prefix + prefix, **more)
            except self._failures as error:
                _fail(error, Unavailable)
            found += [one["Key"].removeprefix(self._prefix) for one in page.get("Contents", ())]
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def unfinished(self, prefix: str) -> list[tuple[str, str]]:
        """The keys and ids of uploads that were neither completed nor aborted."""
        try:
            page = await self._send("list_multipart_uploads", Prefix=self._prefix + prefix)
        except self._failures as error:
            _fail(error, Unavailable)
        return [(one["Key"].removeprefix(self._prefix), one["UploadId"]) for one in page.get("Uploads", ())]

    async def abort(self, key: str, upload: str) -> None:
        try:
            await self._send("abort_multipart_upload", Key=self._prefix + key, UploadId=upload)
        except self._failures as error:
            _fail(error, Unavailable)

    async def _send(self, method: str, **arguments: Any) -> Any:
        return await self._boto.send(method, Bucket=self._bucket, **arguments)

    async def _read(self, stream: Any, *size: int) -> bytes:
        data: bytes = (
            await stream.read(*size) if self._boto.suspends else await self._runtime.call(stream.read, *size)
        )
        return data


def _fail(error: Exception, kind: type[FencedError]) -> NoReturn:
    status, code, _ = answer_in(error)
    if code in _WRONG:
        raise Misconfigured(f"{_WRONG[code]} ({error})") from error
    if 400 <= status < 500 and status not in (408, 429):
        raise Misconfigured(f"the object store refuses the request: {error}") from error
    raise kind(f"the object store did not answer: {error}") from error
