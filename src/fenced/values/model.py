"""The values that all parts share: names, holders, stamps, asks and their answers.

Nothing here does I/O, reads a clock or draws a random number.
"""

from __future__ import annotations

import hashlib
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from fenced.errors import FencedError, InvalidStamp, LeaseLost, Misuse, shown

if TYPE_CHECKING:
    from fenced.values.schema import Schema

TOKEN_MAX = 2**53 - 1
"""The largest token: exact in SQL BIGINT, JSON, JavaScript and Redis Lua alike."""

SEQ_MAX = 2**53 - 1
NAME_BYTES_MAX = 200
NAMES_MAX = 64
"""How many names one lease may cover; bounds the length of a stamp."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.:@=+-]*(/[A-Za-z0-9_-][A-Za-z0-9_.:@=+-]*)*")
# Marks that change the direction of text, and the byte order mark: with them two names could look the same.
_INVISIBLE = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")
_BANNED_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})


@lru_cache(maxsize=4096)
def _checked(name: str) -> str:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise Misuse(f"a name must be encodable as UTF-8: {shown(name)}") from None
    if not 1 <= size <= NAME_BYTES_MAX:
        raise Misuse(f"a name has 1 to {NAME_BYTES_MAX} bytes of UTF-8, not {size}: {shown(name)}")
    if _PLAIN_NAME.fullmatch(name):
        return name
    for character in name:
        if character in _INVISIBLE or unicodedata.category(character) in _BANNED_CATEGORIES:
            raise Misuse(f"a name holds no control characters: {shown(name)}")
    for segment in name.split("/"):
        if segment in ("", ".", "..") or segment != segment.strip():
            raise Misuse(
                "the segments of a name are not empty, not '.' or '..', "
                f"and have no white space at their ends: {shown(name)}"
            )
    return name


def check_name(name: object) -> str:
    """Return `name` if it is one, else raise Misuse. Names are compared byte by byte."""
    if not isinstance(name, str):
        raise Misuse(f"a name is a str, not {type(name).__name__}: {shown(name)}")
    return _checked(name)


def check_names(names: Iterable[object]) -> tuple[str, ...]:
    """The names of one lease: valid, sorted by their bytes, none twice, at most NAMES_MAX."""
    if isinstance(names, str | bytes):
        raise Misuse(f"names are a list of str, not one {type(names).__name__}: {shown(names)}")
    if not isinstance(names, Iterable):
        raise Misuse(f"names are a list of str, not {shown(names)}")
    checked = [check_name(name) for name in names]
    if not 1 <= len(checked) <= NAMES_MAX:
        raise Misuse(f"a lease covers 1 to {NAMES_MAX} names, not {len(checked)}")
    if len(checked) == 1:
        return (checked[0],)
    if len(set(checked)) != len(checked):
        raise Misuse(f"the same name twice: {shown(checked)}")
    return tuple(sorted(checked, key=str.encode))


class CallTemplate:
    """The template of the name that a call is about: `valves/{id}`, or `valves/{valve.id}` for an attribute."""

    def __init__(self, text: object) -> None:
        try:
            parts = [] if not isinstance(text, str) else list(string.Formatter().parse(text))
        except ValueError:
            parts = []
        if not parts or any(field == "" for _, field, _, _ in parts):  # {} has no name
            raise Misuse(f"a name with fields is a template such as 'orders/{{id}}', not {shown(text)}")
        self.text = str(text)
        self.fields = frozenset(re.split(r"[.\[]", field)[0] for _, field, _, _ in parts if field is not None)
        self._slashes = sum(literal.count("/") for literal, _, _, _ in parts)

    def filled(self, fields: Mapping[str, Any]) -> str | None:
        """The name; None if a value contains a slash: two things could have the same name."""
        try:
            name = self.text.format_map(fields)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Misuse(f"the name {shown(self.text)} has a field without a value: {shown(error)}") from None
        return name if name.count("/") == self._slashes else None


_REALM = re.compile(r"[0-9a-f]{16}", re.ASCII)


def check_realm(realm: object) -> str:
    """Return `realm` if it is one, else raise Misuse."""
    if not isinstance(realm, str) or not _REALM.fullmatch(realm):
        raise Misuse(f"a realm is 16 hexadecimal digits, not {shown(realm)}")
    return realm


def is_seq(seq: int | None) -> bool:
    """Whether an operation can have this number; only a stamp made by hand has another. None: it has none."""
    return seq is None or 0 <= seq <= SEQ_MAX


def check_floor(above: object) -> int:
    """Return `above` if a greater token still exists, else raise Misuse."""
    if type(above) is not int or not 0 <= above < TOKEN_MAX:
        raise Misuse(f"a floor is a whole number from 0 to 2**53 - 2, not {shown(above)}")
    return above


_GRANT_HASH = hashlib.sha256(b"fenced grant:")


@lru_cache(maxsize=1024)
def grant_id(secret: str) -> str:
    """The public id of an attempt and its grant, derived from the secret."""
    found = _GRANT_HASH.copy()  # faster than a new one
    found.update(secret.encode())
    return found.hexdigest()[:32]


_SERIES_HASH = hashlib.sha256(b"fenced series:")


@lru_cache(maxsize=1024)
def series_id(secret: str) -> str:
    """What an authority stores of a client's series instead of the secret."""
    found = _SERIES_HASH.copy()
    found.update(secret.encode())
    return found.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Holder:
    """Who asks: a random id per client instance, and a label, host and pid that help people to find it."""

    id: str
    label: str
    host: str
    pid: int

    def __hash__(self) -> int:
        """Ids are random: the other fields would only cost time. A holder is looked up in a cache for each ask."""
        return hash(self.id)


_STAMP = re.compile(
    r"1:(?P<realm>[0-9a-f]{16}):(?P<token>[1-9][0-9]{0,15}):(?P<seq>-|0|[1-9][0-9]{0,15})"
    r":(?P<grant>[0-9a-f]{32}):(?P<names>[A-Za-z0-9_.~/%,-]+)",
    re.ASCII,
)
_STAMP_LENGTH_MAX = 96 + NAMES_MAX * (3 * NAME_BYTES_MAX + 1)


@lru_cache(maxsize=4096)
def _names_text(names: tuple[str, ...]) -> str:
    return ",".join(quote(name, safe="/") for name in names)


@lru_cache(maxsize=1024)
def _names_in(text: str) -> tuple[str, ...]:
    return check_names([unquote_to_bytes(name).decode() for name in text.split(",")])


def stamp_text(realm: str, names: tuple[str, ...], token: int, seq: int | None, grant: str) -> str:
    """The text of the stamp with these fields."""
    return f"1:{realm}:{token}:{'-' if seq is None else seq}:{grant}:{_names_text(names)}"


def _described(text: object) -> str:
    """What was given instead of a stamp. Not quoted: it may be a stamp with a typing error, and messages are logged."""
    return f"a text of {len(text)} characters" if isinstance(text, str) else f"a {type(text).__name__}"


class Stamp(NamedTuple):
    """What an operation carries to a guard. `seq` 0 announces; rule `retry` alone accepts None."""

    realm: str
    names: tuple[str, ...]
    token: int
    seq: int | None
    grant: str

    def __str__(self) -> str:
        return stamp_text(*self)

    @property
    def bare_text(self) -> str:
        """The text of this stamp without its seq: the same for all operations of one lease."""
        return str(self._replace(seq=None))

    @property
    def names_text(self) -> str:
        """The names, encoded as in the text of this stamp."""
        return _names_text(self.names)

    @classmethod
    def parse(cls, text: object) -> Stamp:
        """Read the one canonical text form; anything else is InvalidStamp."""
        if not isinstance(text, str) or len(text) > _STAMP_LENGTH_MAX:
            raise InvalidStamp(f"not a stamp: {_described(text)}")
        found = _STAMP.fullmatch(text)
        if found is None:
            raise InvalidStamp(f"not a stamp: {_described(text)}")
        seq = None if found["seq"] == "-" else int(found["seq"])
        try:
            names = _names_in(found["names"])
        except (Misuse, UnicodeDecodeError):
            raise InvalidStamp(f"not a stamp, its names are not names: {_described(text)}") from None
        stamp = cls(found["realm"], names, int(found["token"]), seq, found["grant"])
        in_range = stamp.token <= TOKEN_MAX and is_seq(seq)
        # The pattern leaves one way to write each of the other parts.
        if not in_range or _names_text(names) != found["names"]:
            raise InvalidStamp(f"not a stamp in its canonical form: {_described(text)}")
        return stamp

    @classmethod
    def foreign(
        cls,
        source: str,
        cluster: str,
        names: str | Iterable[str],
        number: int,
        holder: str,
        *,
        seq: int | None = None,
        guarantee: str = "strict",
    ) -> Stamp:
        """The stamp of a lock of ZooKeeper's or etcd's own clients, by the number of its node or key.

        `source`: zookeeper-czxid or etcd-revision. `cluster`: your name for it, the same everywhere. `holder`: what
        differs between any two grants, such as the session and the node's path.
        """
        from fenced.values.foreign import foreign_stamp

        return foreign_stamp(source, cluster, names, number, holder, seq=seq, guarantee=guarantee)

    def announcing(self) -> Stamp:
        """The same grant's stamp for an announcement."""
        return self if self.seq == 0 else self._replace(seq=0)


class Ask(NamedTuple):
    """A request for one lease over `names`. `secret` identifies the attempt; only its owner knows it."""

    secret: str
    names: tuple[str, ...]
    ttl: float
    holder: Holder
    wait: bool = False
    lock_delay: float = 0.0
    series: str = ""
    """A secret of a client that counts its attempts: nobody else can say which of them are over. Empty: it does not."""
    number: int = 0
    """Counts the attempts of this series from 1."""
    settled: int = 0
    """The attempts of this series up to this number are over, and never sent again: an authority may forget them."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """One renewal in a batch of operations."""

    secret: str


class Release(NamedTuple):
    """One release in a batch of operations."""

    secret: str
    keep: float = 0.0


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """One withdrawal in a batch of operations."""

    secret: str


@dataclass(frozen=True, slots=True)
class HeldBy:
    """Who holds a name, for messages and operators."""

    holder: Holder
    token: int
    grant: str
    remaining: float


class Granted(NamedTuple):
    """Yes. `remaining` is by the authority's clock; `ttl` may differ from the one that was asked for."""

    token: int
    remaining: float
    ttl: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """In the queue. Ask again after a wake-up or after `check_in` seconds, whichever comes first."""

    check_in: float
    ahead: int | None = None
    held_by: HeldBy | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """No, and not queued."""

    ahead: int
    held_by: HeldBy | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt has ended: released, withdrawn, expired, or revoked by an operator."""

    reason: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Renewed; `remaining` seconds are left by the authority's clock."""

    remaining: float


@dataclass(frozen=True, slots=True)
class Unknown:
    """This attempt of a batch may have been renewed or not."""

    why: str


@dataclass(frozen=True, slots=True)
class Released:
    """The grant was released, by this call or by an earlier one."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The authority does not know this attempt, or no longer knows it."""


AskAnswer = Granted | Waiting | Busy | Ended
RenewAnswer = Kept | Waiting | Ended | Gone | Unknown
ReleaseAnswer = Released | Ended | Gone
BatchOperation = Ask | Renewal | Release | Withdrawal
BatchAnswer = AskAnswer | RenewAnswer | ReleaseAnswer | FencedError
"""The answer to one operation of a batch, or the error that it alone would have raised."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """One place in a queue, for messages and operators."""

    holder: Holder
    names: tuple[str, ...]
    remaining: float


@dataclass(frozen=True, slots=True)
class NameView:
    """One name as the authority sees it now."""

    name: str
    held_by: HeldBy | None
    names: tuple[str, ...]
    ttl: float | None
    free_in: float
    waiters: tuple[Waiter, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """What an authority learned about its store when it opened it."""

    realm: str
    last_token: int
    doubts: tuple[str, ...] = ()
    """Why tokens could repeat on this store, and what prevents it; empty means strict."""
    warnings: tuple[str, ...] = ()
    """Known faults of this store that end leases early or late, but repeat no token."""
    schema: Schema | None = None  # None where nothing is stored
    stopped: str | None = None  # why nothing is granted until an operator acts, if opening it shows that
    clock: float | None = None  # the store's own wall clock, where it has one that is not this machine's


@dataclass(frozen=True, slots=True)
class Credential:
    """What one operation, transaction or request is fenced with. Every kind of guard takes it whole."""

    stamps: tuple[Stamp, ...]
    names: tuple[str, ...] = ()
    """The names that the operation uses. Empty: all that the stamps cover."""
    left: float | None = None
    """Seconds that the transaction may be idle, until `max_hold` has passed. None: no limit."""
    still_held: bool = False
    """Refuse if the authority, in the same database, says that the lease has ended."""
    proofs: tuple[str, ...] = ()
    """One for each stamp, if the guard requires proofs."""
    lost: Callable[[], LeaseLost | None] | None = field(default=None, compare=False, repr=False)
    """The error of a lease that its holder has lost by now; None if none is lost. Stamps alone cannot know it."""
