"""Protobuf's wire format, as far as etcd's messages use it: whole numbers and strings of bytes. Pure.

A message is written by adding fields, and read as a list of (field number, value). Zero and empty fields are left out,
as every protobuf library does. Callers skip fields that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterator

from fenced.errors import Indeterminate

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MASK = 2**64 - 1
_SIGN = 2**63
_VARINT_MAX = 10


class MalformedMessage(Indeterminate):
    """These bytes are no protobuf message. Whether the request was carried out is unknown."""


_SMALL = [bytes([number]) for number in range(0x80)]


def varint(number: int) -> bytes:
    """A whole number in 7-bit groups, the lowest first. A negative int64 takes ten bytes."""
    if 0 <= number < 0x80:
        return _SMALL[number]
    number &= _MASK
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def integer(field: int, number: int) -> bytes:
    """A field with a whole number or a bool."""
    return varint(field << 3 | VARINT) + varint(number) if number else b""


def data(field: int, value: bytes) -> bytes:
    """A field with bytes; nothing if they are empty."""
    return message(field, value) if value else b""


def message(field: int, value: bytes) -> bytes:
    """A field with a message, even if the message is empty."""
    tag, size = field << 3 | BYTES, len(value)
    if tag < 0x80 and size < 0x4000:  # most are so short
        if size < 0x80:
            return _SMALL[tag] + _SMALL[size] + value
        return b"%c%c%c%b" % (tag, size & 0x7F | 0x80, size >> 7, value)
    return varint(tag) + varint(size) + value


def signed(number: int) -> int:
    """The int64 that a varint stands for."""
    return number - 2**64 if number >= _SIGN else number


def fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in their order. Fixed-width fields are skipped: we read none."""
    at, end = 0, len(raw)
    while at < end:
        key = raw[at]
        at += 1
        if key > 0x7F:
            key, at = _varint_at(raw, at - 1)
        field, kind = key >> 3, key & 7
        if kind == VARINT:
            number, at = _varint_at(raw, at)
            yield field, number
        elif kind == BYTES:
            size, at = _varint_at(raw, at)
            value = raw[at : at + size]
            if len(value) < size:
                raise MalformedMessage("a field is longer than its message")
            at += size
            yield field, value
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            raise MalformedMessage(f"wire type {kind}")


def _varint_at(raw: bytes, at: int) -> tuple[int, int]:
    if at < len(raw) and (number := raw[at]) < 0x80:  # most are so small
        return number, at + 1
    number = shift = 0
    for byte in raw[at : at + _VARINT_MAX]:
        at += 1
        if byte < 0x80:
            return (number | byte << shift) & _MASK, at
        number |= (byte & 0x7F) << shift
        shift += 7
    raise MalformedMessage("a number does not end")


def number(raw: bytes) -> int:
    """A whole number that takes all of these bytes."""
    value = 0
    for byte in reversed(raw):
        value = value << 7 | byte & 0x7F
    return value & _MASK


def whole(value: int | bytes) -> int:
    """A field's value, which must be a number."""
    if not isinstance(value, int):
        raise MalformedMessage("bytes where a number was expected")
    return value


def raw(value: int | bytes) -> bytes:
    """A field's value, which must be bytes."""
    if not isinstance(value, bytes):
        raise MalformedMessage("a number where bytes were expected")
    return value
