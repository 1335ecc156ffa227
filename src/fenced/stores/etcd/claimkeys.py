"""The keys of a namespace's holders, which its authority writes and a guard on the same etcd compares. Pure."""

from __future__ import annotations

from fenced.stores.etcd.wire.messages import valued_between

ROOT = b"fenced/"


class ClaimKeys:
    """Where the claims of one namespace are: the key of a name exists while a lease holds it."""

    def __init__(self, namespace: str) -> None:
        self.start = ROOT + namespace.encode() + b"\0"
        self._names = self.start + b"n\0"

    def claim(self, name: str) -> bytes:
        return b"%b%b\0c" % (self._names, name.encode())


def claimed_by(grant: str) -> bytes:
    """How the value of a claim begins."""
    return b'{"grant":"%b",' % grant.encode()


def still_claimed(key: bytes, grant: str) -> list[bytes]:
    """Compares that prove that this grant has the claim."""
    start = claimed_by(grant)
    return valued_between(key, start, start[:-1] + b"-")  # "-" follows the "," in the order of bytes
