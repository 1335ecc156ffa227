"""What the service says, as values of the model. The requests and answers are described by its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from fenced.errors import FencedError, Misconfigured, Unavailable
from fenced.net.pool import ConnectionBroken
from fenced.net.problems import error_from
from fenced.stores.service.wire.connection import HttpReply
from fenced.values.contracts import Trait
from fenced.values.model import (
    Ask,
    AskAnswer,
    Busy,
    Ended,
    Gone,
    Granted,
    HeldBy,
    Holder,
    Kept,
    NameView,
    ReleaseAnswer,
    Released,
    RenewAnswer,
    Standing,
    Unknown,
    Waiter,
    Waiting,
)
from fenced.values.schema import Schema

Fields = Mapping[str, Any]


_text = json.JSONEncoder(separators=(",", ":")).encode


def packed(document: object) -> bytes:
    return _text(document).encode()


def read(reply: HttpReply, where: str) -> Fields:
    """The fields of an answer. A problem document becomes the error that the instance raised.

    Only a problem document of ours says that nothing happened. An error of a gateway says nothing: ConnectionBroken.
    """
    if (error := error_from(reply.status, reply.media_type, reply.body)) is not None:
        raise error
    if reply.status >= 500:
        raise ConnectionBroken(
            f"{where}: it answered {reply.status}, and not by a problem document of fenced"
        )
    try:
        fields = json.loads(reply.body)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict) and "title" not in fields:
        return fields
    raise _refused(reply.status, fields, where)


def _refused(status: int, fields: Any, where: str) -> FencedError:
    why = (
        fields.get("detail") or fields.get("title")
        if isinstance(fields, dict)
        else "this is not a fenced service"
    )
    kind = Unavailable if status == 429 else Misconfigured
    return kind(f"{where}: it answered {status}: {why}")


def ask_body(ask: Ask) -> bytes:
    holder = ask.holder
    return packed(
        {
            "attempt": ask.secret,
            "names": ask.names,
            "ttl": ask.ttl,
            "wait": ask.wait,
            "lock_delay": ask.lock_delay,
            "holder": {"id": holder.id, "label": holder.label, "host": holder.host, "pid": holder.pid},
            "keeps": True,
            "series": ask.series,
            "number": ask.number,
            "settled": ask.settled,
        }
    )


_ASKED = {"granted": Granted, "waiting": Waiting, "busy": Busy, "ended": Ended}
_RENEWED = {"kept": Kept, "waiting": Waiting, "ended": Ended, "gone": Gone, "unknown": Unknown}
_RELEASED = {"released": Released, "ended": Ended, "gone": Gone}
"""Answers by their names. Their fields have the names that the service's OpenAPI document gives them."""


def asked(fields: Fields) -> AskAnswer:
    return cast("AskAnswer", _answer(_ASKED, fields))


def renewed(fields: Fields) -> RenewAnswer:
    return cast("RenewAnswer", _answer(_RENEWED, fields))


def released(fields: Fields) -> ReleaseAnswer:
    return cast("ReleaseAnswer", _answer(_RELEASED, fields))


def _answer(kinds: Mapping[str, Any], fields: Fields) -> object:
    kind = kinds.get(fields["answer"])
    if kind is None:
        raise ValueError("an answer that this client does not know")
    values = {name: fields[name] for name in kind.__match_args__}
    if "held_by" in values:
        values["held_by"] = _held_by(values["held_by"])
    return kind(**values)


def _holder(fields: Fields) -> Holder:
    return Holder(fields["id"], fields["label"], fields["host"], fields["pid"])


def _held_by(fields: Fields | None) -> HeldBy | None:
    if fields is None:
        return None
    return HeldBy(_holder(fields["holder"]), fields["token"], fields["grant"], fields["remaining"])


def view(fields: Fields) -> NameView:
    waiters = (
        Waiter(_holder(each["holder"]), tuple(each["names"]), each["remaining"]) for each in fields["waiters"]
    )
    return NameView(
        fields["name"],
        _held_by(fields["held_by"]),
        tuple(fields["names"]),
        fields["ttl"],
        fields["free_in"],
        tuple(waiters),
    )


def standing(fields: Fields) -> Standing:
    stored = fields["schema"]
    return Standing(
        fields["realm"],
        fields["last_token"],
        tuple(fields["doubts"]),
        tuple(fields["warnings"]),
        None if stored is None else Schema(stored["version"], stored["readable_by"], stored["release"]),
    )


def traits(fields: Fields) -> tuple[Trait, ...]:
    return tuple(Trait(each["key"], each["sentence"]) for each in fields["traits"])
