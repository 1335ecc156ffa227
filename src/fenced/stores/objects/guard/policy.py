"""A bucket policy for S3 that denies blind overwrites."""

from __future__ import annotations

from typing import Any

from fenced.errors import Misuse, shown


def bucket_policy(bucket: str, prefix: str = "", *, partition: str = "aws") -> dict[str, Any]:
    """A policy that denies a PUT without a condition, a copy and a deletion below a prefix, for everybody.

    It stops programs that overwrite an object without having read it. It does not make the guard mandatory: whoever
    sends the current ETag in `If-Match` passes, with any body. Uploads of large objects are not touched by it, because
    the guard writes them under new keys below `payloads/`. The text follows the documentation of AWS and was not
    run there; other stores may not know the condition `s3:if-match`.
    """
    if not bucket or "/" in bucket or "*" in bucket:
        raise Misuse(f"a bucket's name, without a path: not {shown(bucket)}")
    below = prefix.strip("/") + "/" if prefix.strip("/") else ""
    cells = [f"arn:{partition}:s3:::{bucket}/{below}{part}" for part in ("n/*", "config=cell")]
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "FencedNoBlindOverwrite",
                "Effect": "Deny",
                "Principal": "*",
                "Action": "s3:PutObject",
                "Resource": cells,
                "Condition": {
                    "Null": {"s3:if-match": "true", "s3:if-none-match": "true"},
                },
            },
            {
                "Sid": "FencedNoDelete",
                "Effect": "Deny",
                "Principal": "*",
                "Action": ["s3:DeleteObject", "s3:DeleteObjectVersion"],
                "Resource": cells,
            },
        ],
    }
