"""One guard's marks and configuration on a server, whichever client reaches it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, Protocol

from fenced.errors import (
    Conflict,
    Contended,
    FencedError,
    Indeterminate,
    Misconfigured,
    Misuse,
    Unsupported,
    shown,
)
from fenced.guards.answers import DEFAULT_RULE, RECORDS_MAX, check_rule, error_for, expect_rule
from fenced.guards.cells import Config
from fenced.guards.options import with_options
from fenced.stores.redis.guard.scripts import COMMANDS, ONE, SWAP, GuardScript
from fenced.stores.redis.wire.finding import slot_of
from fenced.stores.redis.wire.resp import ErrorReply
from fenced.stores.redis.wire.settings import QUESTIONS, ServerSettings
from fenced.values.decision import Mark, Mode, Rule, Verdict, judge, rule_on
from fenced.values.model import Stamp, check_name, is_seq

Guarantee = Literal["strict", "best-effort"]
Word = Any
"""A word of a command, as the client takes it: bytes, str, int or float."""

KIND = "a guard in Redis"
TAG = "guard"
TRIES = 50
"""How often an operation is tried while others change the configuration."""
CONFIRM_SECONDS = 1.0
"""How long a replica has for confirming a mark."""
WAIT = ("WAIT", 1, int(1000 * CONFIRM_SECONDS))
WORDS_MAX = 7000
"""Of one command: Lua passes no more arguments to a function than about 8,000."""
REMEMBERED_MAX = 10_000
RIGHTS = (
    "~fenced:* +evalsha +eval +get +mget +set +sadd +smembers +zscore +zadd +zrem +zcard +zrange +hincrby +hset "
    "+hgetall +hget +hmget +xadd +xrevrange +time +info +wait +config|get"
)
"""What an ACL user needs beyond its own commands and keys, as ACL SETUSER takes it."""


class RedisChannel(Protocol):
    """A way to the server. Errors of the server come back as an ErrorReply; lost replies raise Indeterminate."""

    @property
    def where(self) -> str:
        """Where the server is, without secrets."""

    in_cluster: bool
    """Whether it finds the node of a cluster that has a key."""
    doubts: tuple[str, ...]
    """Why marks could be lost, whatever the settings of the server are."""

    @property
    def promotes(self) -> bool:
        """Whether it follows a promotion to another server, by sentinels or in a cluster."""

    async def ask(self, questions: Sequence[tuple[Word, ...]], key: bytes) -> list[Any]:
        """The replies to several commands that change nothing, of the server that has `key`."""

    async def run(
        self,
        script: GuardScript,
        keys: Sequence[str | bytes],
        arguments: Sequence[Word],
        *,
        again: bool,
        confirm: bool = False,
    ) -> Any:
        """The reply of a script. `again`: it may be sent twice if its reply is lost.

        `confirm`: Indeterminate unless a replica has what the script wrote.
        """

    def refused(self, error: ErrorReply) -> Exception:
        """The exception for an error of the server, or of the caller's own commands."""


class Compared(NamedTuple):
    """A value that must be there (None: must not) for the commands to run."""

    words: tuple[Word, ...]
    value: Word | None


@dataclass(frozen=True)
class MarkOptions:
    """What a program says about its guard. The mode counts only if the guard is created."""

    tag: str = TAG
    rule: Rule | None = None
    """Misconfigured if the guard that is there has another one. None: any; `retry` if the guard is created."""
    mode: str = "enforce"
    guarantee: Guarantee = "strict"
    name: str | None = None
    """How a name follows from the tag of its keys, such as `stock/{tag}`. Then each name is in the slot of that tag."""
    prefix: str = field(init=False)
    """With which all keys of the guard begin. The tag in its braces decides their slot in a cluster."""
    header: bytes = field(init=False)
    """The first line of the configuration of a guard with `name`, so that nobody takes it for one without."""

    def __post_init__(self) -> None:
        if self.rule is not None:
            check_rule(self.rule)
        if self.guarantee not in ("strict", "best-effort"):
            raise Misuse(f"a guarantee is strict or best-effort, not {shown(self.guarantee)}")
        Mode.parse(self.mode)
        object.__setattr__(self, "prefix", f"fenced:{{{_check_tag(self.tag)}}}:")
        if self.name is not None and (
            not isinstance(self.name, str)
            or self.name.count("{tag}") != 1
            or set(self.name.replace("{tag}", "")) & set("{}")
        ):
            raise Misuse(f"name is a pattern with one {{tag}}, such as stock/{{tag}}, not {shown(self.name)}")
        object.__setattr__(self, "header", b"" if self.name is None else f"name {self.name}\n".encode())

    def guard_at(self, url: str) -> str:
        """The address of the guard on the server with this one."""
        return with_options(url, tag=None if self.tag == TAG else self.tag, name=self.name)

    def slot_of_names(self, names: Sequence[str]) -> int:
        """The slot of the tag of these names. Unsupported if there are several."""
        slots = {slot_of(f"{{{self.tag_of(name)}}}") for name in names}
        if len(slots) != 1:
            raise Unsupported(
                f"{', '.join(names)} are in several slots of a cluster, and an operation happens in one: use "
                "one operation for each, or a guard without `name`, which has one slot for all names"
            )
        return slots.pop()

    def tag_of(self, name: str) -> str:
        """The tag of the keys that a name is about."""
        before, _, after = (self.name or "").partition("{tag}")
        tag = check_name(name)[len(before) : len(name) - len(after)]
        if not tag or before + tag + after != name or tag.startswith("}"):  # Redis ignores {} in a key
            raise Unsupported(
                f"{shown(name)} is not a name of this guard: they are like {self.name}, for keys with this {{tag}}"
            )
        return tag

    @property
    def config(self) -> Config:
        return Config(self.rule or DEFAULT_RULE, {"*": str(Mode.parse(self.mode))})


class RedisMarks:
    """Checks operations in the same step as their commands. Threads and tasks may share it.

    What it remembers of the server may be old: the script checks all of it.
    """

    def __init__(
        self,
        channel: RedisChannel,
        options: MarkOptions,
        prefix: str | None = None,
        header: bytes | None = b"",
    ) -> None:
        self.channel = channel
        self.prefix = prefix or options.prefix
        self.known: tuple[bytes, Config] | None = None
        """The configuration that was last seen."""
        self.replicated = False
        """Whether a replica may take the server's place. Then one confirms every mark that is raised."""
        self.seen: dict[str, tuple[str, int, str]] = {}
        """Whose mark each name had: realm, token and grant of a lease that was admitted."""
        self._options = options
        self._header = header

    def key(self, kind: str, name: str = "") -> bytes:
        """In UTF-8, whatever encoding a client has for the program's own words: all clients share the marks."""
        return (f"{self.prefix}{kind}:{name}" if name else f"{self.prefix}{kind}").encode()

    # Opening.

    async def open(self) -> None:
        """Check the server, and create the configuration if there is none."""
        await self.check_server()
        await self._swap(b"", self._options.config)
        await self.config()

    async def check_server(self) -> None:
        """Misconfigured if its settings let marks get lost."""
        where, settings = self.channel.where, await self._settings()
        if settings.is_cluster_node and not self.channel.in_cluster:
            raise Unsupported(f"{where} is a node of a cluster: give the guard a client of the whole cluster")
        if settings.evicts:
            raise Misconfigured(
                f"{where}: {settings.evicts} may evict marks, and an older holder would be admitted again "
                "(redis.conf: maxmemory-policy noeviction, or volatile-*, which spares keys that do not expire)"
            )
        self.replicated = self.channel.promotes or settings.has_replicas
        if doubts := self._doubts(settings):
            raise Misconfigured(
                f"{where}: marks could be lost, and an older holder would be admitted again: {'; '.join(doubts)}. "
                "Correct that, or accept it: guarantee='best-effort'"
            )

    async def doubts(self) -> tuple[str, ...]:
        """How marks could be lost by the server's settings, as they are now, unless that is accepted."""
        return self._doubts(await self._settings())

    async def _settings(self) -> ServerSettings:
        return ServerSettings(await self.channel.ask(QUESTIONS, self.key("config")), self.channel.refused)

    def _doubts(self, settings: ServerSettings) -> tuple[str, ...]:
        if self._options.guarantee == "best-effort":
            return ()
        return (*settings.doubts("marks", "marks"), *self.channel.doubts)

    # The configuration.

    async def config(self) -> tuple[bytes, Config]:
        """The configuration as it is now."""
        blob, config = await self.stored_config()
        if config is None:
            raise Misconfigured(
                f"{self.channel.where}: there is no guard with the tag {self._options.tag!r} here"
            )
        known = self.known = blob, config
        return known

    async def stored_config(self) -> tuple[bytes, Config | None]:
        """The configuration, or None if there is none."""
        (blob,) = await self._ask(("GET", self.key("config")))
        return (b"", None) if blob is None else (_bytes(blob), self.unpacked(_bytes(blob)))

    def unpacked(self, blob: bytes) -> Config:
        """The configuration in a blob. Misconfigured if it is that of a guard with another `name`."""
        name = blob[: blob.index(b"\n") + 1] if blob.startswith(b"name ") else b""
        if self._header not in (None, name):
            says = f"name={name.decode()[5:-1]!r}" if name else "no name"
            raise Misconfigured(
                f"{self.channel.where}: the guard with the tag {self._options.tag!r} has {says}: use the same, or "
                "another tag"
            )
        config = Config.unpacked(blob.rpartition(b"\n")[2])
        expect_rule(f"{self.channel.where}, tag {self._options.tag!r}", config.rule, self._options.rule)
        return config

    async def reconfigure(self, change: Callable[[Config], Config]) -> Config:
        """Change the configuration; returns the previous one."""
        for _ in range(TRIES):
            blob, config = await self.config()
            wanted = change(config)
            if wanted == config:
                return config
            if await self._swap(blob, wanted, touch=wanted.realm != config.realm):
                return config
        raise Contended(f"{self.channel.where}: others changed the configuration {TRIES} times; try again")

    async def renumber(self, known: bytes, version: int) -> None:
        """Give the known configuration a higher version, so that slots accept it. If it is another one, do nothing."""
        await self._swap(known, self.unpacked(known), version=version)

    async def _swap(
        self, known: bytes, wanted: Config, *, touch: bool = False, version: int | None = None
    ) -> bool:
        """Replace the known configuration; False if it is another one. Sent twice, it is replaced once."""
        packed = wanted.packed()
        if self._header:  # the slots get copies, which must not replace later ones
            packed = b"%s%d\n%s" % (self._header, version or version_in(known) + 1, packed)
        keys = [self.key("config"), self.key("tokens")]
        arguments = [known, packed, self.key("mark:") if touch else ""]
        reply = await self.channel.run(SWAP, keys, arguments, again=True)
        if isinstance(reply, ErrorReply):
            raise self.channel.refused(reply)
        return bool(reply)

    # Operations.

    async def step(
        self,
        stamp: Stamp | None,
        names: Sequence[str],
        *,
        commands: Sequence[tuple[Word, ...]] = (),
        compared: Sequence[Compared] = (),
        keys: Sequence[str | bytes] = (),
        announce: bool = False,
        quiet: bool = False,
        again: bool = False,
    ) -> list[Any]:
        """Check the marks and the compared values, and run the commands, in one step; returns their replies.

        The replies end with an ErrorReply (or the client's own error) if a command failed. `keys`: in a cluster all
        keys of the commands, so that a node that has only some of them refuses before it begins. `quiet`: what is let
        through is not noted, because the operation that follows notes it.
        """
        if not self.channel.in_cluster:
            keys = ()
        for words in commands:
            if len(words) > WORDS_MAX:
                raise Unsupported(
                    f"{KIND} runs commands of at most {WORDS_MAX} words; split {shown(words[0])}"
                )
        for name in names:
            check_name(name)
        if len(commands) == len(names) == 1 and not compared and (own := self._own_mark(stamp, names)):
            key = self.key("mark", names[0])
            reply = await self.channel.run(ONE, (key, *keys), (own, *commands[0]), again=again)
            if not isinstance(reply, ErrorReply):
                return [reply]
            if reply.code != "FENCED":
                raise self.channel.refused(reply)
            self._forget(names)
        tail: list[Word] = [len(compared)]
        for each in compared:
            tail += ("-", "") if each.value is None else ("=", each.value)
            tail += (len(each.words), *each.words)
        for words in commands:
            tail += (len(words), *words)
        replies: list[Any] = await self._decided(
            COMMANDS,
            stamp,
            names,
            tail,
            keys=keys,
            announce=announce,
            quiet=quiet,
            again=again,
            compared=compared,
        )
        return replies

    async def run(
        self,
        script: GuardScript,
        stamp: Stamp | None,
        names: Sequence[str],
        tail: Sequence[Word],
        keys: Sequence[str],
    ) -> Any:
        """Run a script of the caller's that begins with the check. A refusal is raised."""
        for name in names:
            check_name(name)
        return await self._decided(script, stamp, names, tail, keys=keys)

    async def _decided(
        self,
        script: GuardScript,
        stamp: Stamp | None,
        names: Sequence[str],
        tail: Sequence[Word],
        *,
        keys: Sequence[str | bytes] = (),
        announce: bool = False,
        quiet: bool = False,
        again: bool = False,
        compared: Sequence[Compared] = (),
    ) -> Any:
        marks = [self.key("mark", name) for name in names]
        others = [self.key(kind) for kind in ("config", "tokens", "records", "counts")]
        for _ in range(TRIES):
            blob, config = self.known or await self.config()
            if own := self._own_mark(stamp, names):
                reply = await self.channel.run(
                    script, [*marks, *keys], [own, len(names), "", *tail], again=again
                )
            else:
                confirm = self.replicated and stamp is not None
                # A slot among several gets its realm with its configuration.
                trusts = self._header is not None
                details = _details(blob, config, stamp, names, announce, quiet, confirm, trusts)
                reply = await self.channel.run(
                    script,
                    [*marks, *others, *keys],
                    ["", len(names), details, *tail],
                    again=again,
                    confirm=confirm,
                )
            if not isinstance(reply, ErrorReply):
                self._remember(config, stamp, names)
                return reply
            if reply.code != "FENCED":
                raise self.channel.refused(reply)
            self._forget(names)
            word, *rest = reply.split()[1:]
            if word == "configuration":
                self.known = None
            elif word != "undecided":
                raise self._error(word, rest, stamp, names, config, compared)
        raise Contended(f"{', '.join(names)}: others changed the configuration {TRIES} times; try again")

    def _own_mark(self, stamp: Stamp | None, names: Sequence[str]) -> str:
        """The mark of this lease, if it is probably the mark of all names already: then nothing needs to be decided.

        No mark becomes a lease's own without a decision, and a change of realm touches every mark. So the script has
        nothing to compare but the marks.
        """
        if stamp is None or not is_seq(stamp.seq) or self.known is None or self.known[1].rule != "retry":
            return ""
        marks, covered, lease = self.seen, stamp.names, (stamp.realm, stamp.token, stamp.grant)
        for name in names:
            if marks.get(name) != lease or name not in covered:
                return ""
        return _lease_mark(stamp)

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.seen.pop(name, None)

    def _remember(self, config: Config, stamp: Stamp | None, names: Sequence[str]) -> None:
        """What is probably so after this operation; the script checks it."""
        if stamp is None:
            return
        if config.realm is None and self._header is not None:
            config = replace(config, realm=stamp.realm)
            self.known = config.packed(), config
        if config.realm == stamp.realm:
            if len(self.seen) > REMEMBERED_MAX:
                self.seen.clear()
            self.seen.update(dict.fromkeys(names, (stamp.realm, stamp.token, stamp.grant)))

    def _error(
        self,
        word: str,
        rest: list[str],
        stamp: Stamp | None,
        names: Sequence[str],
        config: Config,
        compared: Sequence[Compared],
    ) -> FencedError:
        index = int(rest[0]) - 1
        if word == "conflict":
            words = " ".join(_text(each) for each in compared[index].words)
            return Conflict(f"{words} does not return the expected value")
        name = names[index]
        if word == "broken":
            return self.broken(name)
        mark = mark_in(rest[1]) if rest[1] != "-" else None
        guard = self._options.guard_at(self.channel.where)
        return error_for(Verdict(word), name=name, stamp=stamp, mark=mark, realm=config.realm, guard=guard)

    def broken(self, name: str) -> Misconfigured:
        return Misconfigured(
            f"{_text(self.key('mark', name))} is not a guard's mark: another program wrote to it"
        )

    # Looking.

    async def mark(self, name: str) -> Mark | None:
        (raw,) = await self._ask(("GET", self.key("mark", check_name(name))))
        return self._parsed(name, raw)

    def _parsed(self, name: str, raw: Any) -> Mark | None:
        try:
            return None if raw is None else mark_in(_text(raw))
        except ValueError:
            raise self.broken(name) from None

    async def read(self, name: str, at_least: int, *words: Word) -> Any:
        """The reply to a command that reads; Contended if the mark was below `at_least` before it."""
        raw, reply = await self._ask(("GET", self.key("mark", check_name(name))), words)
        mark = self._parsed(name, raw)
        if at_least and (mark is None or mark.token < at_least):
            raise Contended(f"{name}: token {at_least} has not been seen here yet; look again")
        return reply

    async def slots(self) -> list[int]:
        """The slots in use, if this is the guard's own slot and others have the marks."""
        (found,) = await self._ask(("SMEMBERS", self.key("slots")))
        return [int(slot) for slot in found]

    async def tokens(self) -> tuple[int, int]:
        """How many names have a mark, and the highest token among them."""
        key = self.key("tokens")
        count, highest = await self._ask(("ZCARD", key), ("ZRANGE", key, -1, -1, "WITHSCORES"))
        while highest and isinstance(highest[0], list):  # RESP3 nests pairs
            highest = highest[0]
        return count, int(float(highest[-1])) if highest else 0

    async def counts(self) -> dict[str, tuple[int, datetime]]:
        """How many decisions there were of each "verdict ruling mode", and when the last one was."""
        (flat,) = await self._ask(("HGETALL", self.key("counts")))
        found = {_text(field): int(number) for field, number in _pairs(flat)}
        return {
            kind: (number, datetime.fromtimestamp(found["@" + kind], UTC))
            for kind, number in found.items()
            if not kind.startswith("@")
        }

    async def records(self, limit: int) -> list[tuple[datetime, dict[str, str]]]:
        """The newest records, oldest first."""
        (entries,) = await self._ask(("XREVRANGE", self.key("records"), "+", "-", "COUNT", limit))
        return [
            (
                datetime.fromtimestamp(int(_text(entry).split("-")[0]) / 1000, UTC),
                {_text(field): _text(value) for field, value in _pairs(fields)},
            )
            for entry, fields in reversed(entries)
        ]

    async def _ask(self, *questions: tuple[Word, ...]) -> list[Any]:
        replies = await self.channel.ask(questions, self.key("config"))
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise self.channel.refused(reply)
        return replies


def _check_tag(tag: object) -> str:
    """The text in the braces of the guard's keys, which decides their slot in a cluster."""
    if not isinstance(tag, str) or not 1 <= len(tag) <= 100 or not tag.isprintable() or set(tag) & set("{}"):
        raise Misuse(f"a tag is a short text without braces, not {shown(tag)}")
    return tag


def version_in(blob: bytes) -> int:
    """How often the configuration of a guard with `name` was changed; 0 if there is none."""
    return int(blob.split(b"\n")[-2]) if blob else 0


def mark_in(text: str) -> Mark:
    token, grant, seq = text.rstrip("~").split(":")
    return Mark(int(token), grant, 0 if seq == "-" else int(seq))


def _lease_mark(stamp: Stamp) -> str:
    """The mark of a lease under rule `retry`, which counts no operations; under other rules no mark looks like this."""
    return f"{stamp.token}:{stamp.grant}:-"


def unconfirmed(where: str, reply: Any, confirmations: Any) -> Indeterminate | None:
    """The error, if WAIT found no replica that has what an operation wrote. A refused one wrote no mark."""
    if isinstance(reply, ErrorReply) and not reply.startswith("FENCED applied"):
        return None
    if isinstance(confirmations, int) and confirmations >= 1:
        return None
    return Indeterminate(
        f"{where}: no replica confirmed the mark, so a promotion could lose it; repeat the operation as after a lost "
        f"reply ({confirmations} replicas within {CONFIRM_SECONDS:g} s)"
    )


def _details(
    blob: bytes,
    config: Config,
    stamp: Stamp | None,
    names: Sequence[str],
    announce: bool,
    quiet: bool,
    confirm: bool,
    trusts: bool,
) -> bytes:
    """What the script needs to decide. What a stamp is by itself, and what each mode does, is found here."""
    seq = (stamp.seq or 0) if stamp else 0
    rows = []
    for name in names:
        # Without a mark `judge` finds what is wrong with the stamp itself, and nothing else.
        verdict = judge(None, stamp, name=name, rule="retry", realm=config.realm).verdict
        bad = Verdict.STALE if verdict is Verdict.ADMIT else verdict
        mode = config.mode_of(name)
        screened = "" if verdict is Verdict.ADMIT else verdict.value
        rows.append([name, screened, rule_on(bad, mode, name).value, str(mode)])
    mark = ""
    if stamp is not None:
        counted = f"{stamp.token}:{stamp.grant}:{0 if announce else seq}"
        mark = _lease_mark(stamp) if config.rule == "retry" else counted
    trusting = trusts and stamp is not None and config.realm is None
    details = {
        "config": blob.decode(),
        "rule": config.rule,
        "announce": announce,
        "quiet": quiet,
        "confirm": confirm,
        "token": str(stamp.token) if stamp else "",
        "grant": stamp.grant if stamp else "",
        "seq": str(seq),
        "stamp": str(stamp) if stamp else "",
        "mark": mark,
        "trusting": replace(config, realm=stamp.realm).packed().decode() if stamp and trusting else "",
        "names": rows,
        "records": RECORDS_MAX,
    }
    return json.dumps(details).encode()


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _pairs(flat: Any) -> list[tuple[Any, Any]]:
    """Fields and values: a flat list in RESP2, a mapping in RESP3."""
    return list(flat.items()) if isinstance(flat, dict) else list(zip(flat[::2], flat[1::2], strict=True))
