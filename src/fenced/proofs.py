"""Proofs: signed stamps, for guards that must not trust a token without a signature.

    key = HmacKey.read("shop-1", "/etc/shop/proofs.key")
    guard.announce(key.sign(lease.announcement()))

A proof covers realm, names, token and grant, but not the seq: one proof serves all operations of a lease.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from fenced.errors import InvalidStamp, Misconfigured, Misuse, shown
from fenced.values.model import Stamp

__all__ = ["Ed25519Key", "Ed25519Public", "HmacKey", "Proof", "VerifyingKey", "check_key_id", "verify"]

CONTEXT = b"fenced proof 1\n"
"""Precedes the signed text, so that a signature made for another purpose is not a proof."""
SECRET_BYTES_MIN = 32
SECRET_BYTES_MAX = 1024

_KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)
_PROOF = re.compile(r"([A-Za-z0-9_-]{1,32}):([0-9a-f]{64}|[0-9a-f]{128})", re.ASCII)
_PEM = re.compile(r"-----BEGIN ([A-Z ]+)-----\s([A-Za-z0-9+/=\s]+)-----END \1-----\s*", re.ASCII)
# What comes before the 32 bytes of an Ed25519 key in DER (RFC 8410).
_PUBLIC_DER = bytes.fromhex("302a300506032b6570032100")
_PRIVATE_DER = bytes.fromhex("302e020100300506032b657004220420")

_P = 2**255 - 19
_Y8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022
_SMALL = frozenset({0, 1, _P - 1, _Y8, _P - _Y8})
"""The y of the points of small order: with such a key, anybody could sign."""


def check_key_id(key_id: object) -> str:
    """Return `key_id` if it is one, else raise Misuse."""
    if not isinstance(key_id, str) or not _KEY_ID.fullmatch(key_id):
        raise Misuse(f"a key's id is 1 to 32 of A-Z, a-z, 0-9, _ and -, not {shown(key_id)}")
    return key_id


@dataclass(frozen=True, slots=True)
class Proof:
    """A stamp, and the text that proves it: `KEYID:SIGNATURE`. fenced.sql accepts it wherever it accepts a stamp."""

    stamp: Stamp
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.stamp, Stamp):
            raise Misuse(f"a proof is about a stamp, not about {shown(self.stamp)}")
        if not isinstance(self.text, str) or not _PROOF.fullmatch(self.text):
            raise InvalidStamp("not a proof, which is KEYID:SIGNATURE", stamp=self.stamp)


def _signed(stamp: object) -> bytes:
    if not isinstance(stamp, Stamp):
        raise Misuse(f"only a stamp can be signed, such as lease.announcement(), not {shown(stamp)}")
    return CONTEXT + stamp.bare_text.encode()


@dataclass(frozen=True, slots=True, eq=False)
class HmacKey:
    """A secret that signers and guards share: HMAC-SHA256, inside one trust domain."""

    kind: ClassVar[str] = "hmac"
    id: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_key_id(self.id)
        if not isinstance(self.secret, bytes) or not (
            SECRET_BYTES_MIN <= len(self.secret) <= SECRET_BYTES_MAX
        ):
            raise Misuse(f"the secret of a key is {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} random bytes")

    @classmethod
    def read(cls, key_id: str, path: str | PathLike[str]) -> HmacKey:
        """The key in a file: its bytes in hexadecimal, as `openssl rand -hex 32` writes them."""
        return cls(key_id, _hexadecimal(_text_of(path), path))

    def sign(self, stamp: Stamp) -> Proof:
        return Proof(stamp, f"{self.id}:{self._mac(_signed(stamp)).hex()}")

    def verifies(self, message: bytes, signature: bytes) -> bool:
        return hmac.compare_digest(self._mac(message), signature)

    def _mac(self, message: bytes) -> bytes:
        return hmac.new(self.secret, message, hashlib.sha256).digest()


@dataclass(frozen=True, slots=True, eq=False)
class Ed25519Public:
    """The public key with which a guard checks proofs of another trust domain; it cannot sign."""

    kind: ClassVar[str] = "ed25519"
    id: str
    public: bytes

    def __post_init__(self) -> None:
        check_key_id(self.id)
        if not isinstance(self.public, bytes) or len(self.public) != 32 or _is_weak(self.public):
            raise Misuse("an Ed25519 public key is 32 bytes, written canonically, and not of small order")

    @classmethod
    def read(cls, key_id: str, path: str | PathLike[str]) -> Ed25519Public:
        """The key in a file: PEM, as `openssl pkey -pubout` writes it, or 64 hexadecimal digits."""
        return cls(key_id, _key_in(path, "PUBLIC KEY", _PUBLIC_DER))

    def verifies(self, message: bytes, signature: bytes) -> bool:
        if len(signature) != 64 or _is_weak(signature[:32]):
            return False
        key = _ed25519().Ed25519PublicKey
        from cryptography.exceptions import InvalidSignature

        try:
            key.from_public_bytes(self.public).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Ed25519Key:
    """A private key; guards know only its public part. For proofs between trust domains. Needs cryptography."""

    id: str
    private: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_key_id(self.id)
        if not isinstance(self.private, bytes) or len(self.private) != 32:
            raise Misuse("an Ed25519 private key is 32 bytes")

    @classmethod
    def read(cls, key_id: str, path: str | PathLike[str]) -> Ed25519Key:
        """The key in a file: PEM, as `openssl genpkey -algorithm ed25519` writes it, or 64 hexadecimal digits."""
        return cls(key_id, _key_in(path, "PRIVATE KEY", _PRIVATE_DER))

    def sign(self, stamp: Stamp) -> Proof:
        message = _signed(stamp)
        return Proof(stamp, f"{self.id}:{self._key().sign(message).hex()}")

    def public(self) -> Ed25519Public:
        return Ed25519Public(self.id, self._key().public_key().public_bytes_raw())

    def _key(self) -> Any:
        return _ed25519().Ed25519PrivateKey.from_private_bytes(self.private)


VerifyingKey = HmacKey | Ed25519Public


def verify(proof: Proof, keys: Iterable[VerifyingKey]) -> bool:
    """Whether one of the keys signed the stamp."""
    key_id, _, signature = proof.text.partition(":")
    message = _signed(proof.stamp)
    return any(key.verifies(message, bytes.fromhex(signature)) for key in keys if key.id == key_id)


def _is_weak(point: bytes) -> bool:
    """Whether this is not the canonical form of a point, or one of a point of small order."""
    y = int.from_bytes(point, "little") & (2**255 - 1)
    return y >= _P or y in _SMALL


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise Misconfigured(f"Ed25519 needs cryptography ({error}): pip install cryptography") from error
    return ed25519


def _text_of(path: str | PathLike[str]) -> str:
    try:
        return Path(path).read_bytes().decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise Misconfigured(f"the key in {path} cannot be read: {reason}") from None


def _hexadecimal(text: str, path: str | PathLike[str]) -> bytes:
    if not re.fullmatch(r"([0-9A-Fa-f]{2})+", text):
        raise Misconfigured(f"the key in {path} is not written in hexadecimal digits")
    return bytes.fromhex(text)


def _key_in(path: str | PathLike[str], label: str, before: bytes) -> bytes:
    text = _text_of(path)
    found = _PEM.fullmatch(text)
    if found is None:
        return _hexadecimal(text, path)
    try:
        written = base64.b64decode("".join(found[2].split()), validate=True)
    except ValueError:
        written = b""
    if found[1] != label or len(written) != len(before) + 32 or not written.startswith(before):
        raise Misconfigured(f"{path} does not hold an Ed25519 {label.lower()}")
    return written[len(before) :]


def __dir__() -> list[str]:
    return __all__
