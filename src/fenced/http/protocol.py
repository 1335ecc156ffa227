"""The protocol: which headers carry a stamp. Pure; docs/protocol.md describes it.

A receiver calls `read_fence(headers)` for the stamp of a request; a sender adds `fence_headers(stamp)`. Which answer
each error is: fenced.net.problems.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from fenced.errors import InvalidStamp, Misuse
from fenced.proofs import Proof
from fenced.values.model import Stamp

STAMP_HEADER = "Fenced-Stamp"
PROOF_HEADER = "Fenced-Proof"
KEY_HEADER = "Idempotency-Key"
HEADER_BYTES_MAX = 4096
"""How long the value of a header may be. Proxies and servers refuse requests with much longer ones."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""The methods that change nothing (RFC 9110): a request with one of them needs no stamp."""

_STAMP_NAMES = frozenset({STAMP_HEADER.lower(), STAMP_HEADER.lower().encode()})
_PROOF_NAMES = frozenset({PROOF_HEADER.lower(), PROOF_HEADER.lower().encode()})
# A string of RFC 9651 without escapes, since neither a stamp nor a proof has a character that needs one. Parameters
# are not allowed. The spaces and tabs around a value are not part of it.
_STRING = re.compile(r'[ \t]*"([!#-\[\]-~]*)"[ \t]*', re.ASCII)


def read_fence(headers: Iterable[tuple[str | bytes, str | bytes]]) -> Stamp | Proof | None:
    """The stamp of a request, with its proof if there is one; None without. InvalidStamp for anything else.

    `headers` are the pairs of the request, every repeated header as often as it was sent. The text that was sent is
    in no message: it could be a stamp with a typing error, and messages are logged.
    """
    stamps, proofs = [], []
    for name, value in headers:
        lowered = name.lower()
        if lowered in _STAMP_NAMES:
            stamps.append(value)
        elif lowered in _PROOF_NAMES:
            proofs.append(value)
    if not stamps:
        if proofs:
            raise InvalidStamp(f"{PROOF_HEADER} without {STAMP_HEADER}")
        return None
    text = _string(STAMP_HEADER, stamps)
    try:
        stamp = Stamp.parse(text)
    except InvalidStamp:
        raise InvalidStamp(f"{STAMP_HEADER} is not a stamp in its canonical form") from None
    if not proofs:
        return stamp
    try:
        return Proof(stamp, _string(PROOF_HEADER, proofs))
    except InvalidStamp:
        raise InvalidStamp(f"{PROOF_HEADER} is not a proof") from None


def _string(header: str, values: list[str | bytes]) -> str:
    """The one value of a header, without its quotes."""
    if len(values) > 1:
        raise InvalidStamp(f"{header} must be there once, not {len(values)} times")
    value = values[0]
    if len(value) > HEADER_BYTES_MAX:
        raise InvalidStamp(f"{header} has more than {HEADER_BYTES_MAX} bytes")
    found = _STRING.fullmatch(value.decode("latin-1") if isinstance(value, bytes) else value)
    if found is None:
        raise InvalidStamp(f'{header} must be one string in quotation marks: {header}: "..."')
    return found[1]


def fence_headers(fence: Stamp | Proof) -> dict[str, str]:
    """The headers that carry a stamp. The same stamp always has the same headers, for a retry too."""
    stamp = fence.stamp if isinstance(fence, Proof) else fence
    if not isinstance(stamp, Stamp):
        raise Misuse(f"headers carry a stamp, such as lease.next_stamp(), not a {type(fence).__name__}")
    headers = {STAMP_HEADER: f'"{stamp}"'}
    if len(headers[STAMP_HEADER]) > HEADER_BYTES_MAX:
        raise Misuse(
            f"the {len(stamp.names)} names of this lease need {len(headers[STAMP_HEADER])} bytes in {STAMP_HEADER}, "
            f"which has at most {HEADER_BYTES_MAX}: hold fewer names in one lease"
        )
    if isinstance(fence, Proof):
        headers[PROOF_HEADER] = f'"{fence.text}"'
    key = operation_id(stamp)
    if key is not None:
        headers[KEY_HEADER] = f'"{key}"'
    return headers


def operation_id(stamp: Stamp) -> str | None:
    """The id of the operation, for Idempotency-Key; None for a stamp that names none: an announcement, a bare stamp.

    Keys end up in logs, so it is a hash, from which nobody can make a stamp.
    """
    if not stamp.seq:
        return None
    return hashlib.sha256(f"fenced operation:{stamp.grant}:{stamp.seq}".encode()).hexdigest()[:32]
