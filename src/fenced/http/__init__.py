"""Fenced requests over HTTP: the protocol on the wire, and what sends and receives it."""

from fenced.http.protocol import (
    KEY_HEADER,
    PROBLEM_MEDIA_TYPE,
    PROOF_HEADER,
    SAFE_METHODS,
    STAMP_HEADER,
    Problem,
    error_from,
    fence_headers,
    operation_id,
    problem,
    read_fence,
)
from fenced.http.sending import operation, stamping

__all__ = [
    "KEY_HEADER",
    "PROBLEM_MEDIA_TYPE",
    "PROOF_HEADER",
    "SAFE_METHODS",
    "STAMP_HEADER",
    "Problem",
    "error_from",
    "fence_headers",
    "operation",
    "operation_id",
    "problem",
    "read_fence",
    "stamping",
]
