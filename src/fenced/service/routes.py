"""The routes of the API: one table, from which the application and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from msgspec import Struct

from fenced.service import bodies, views

Right = Literal["lease", "guard", "observe", "operate"]


class ApiRoute(Struct, frozen=True):
    """One method of one path."""

    method: str
    path: str
    handler: str
    """The name of the method of `Api` that serves it."""
    summary: str
    right: Right | None
    """What a credential must allow; None: nothing."""
    body: Any = None
    """The class of its body; `bytes`: any."""
    answers: Mapping[int, Any] = MappingProxyType({})
    parameters: tuple[str, ...] = ("namespace", "realm")
    streams: bool = False
    """The answer is a stream of server-sent events."""
    page: bool = False
    """It belongs to the live page, and is no part of the API."""


STAMP = ("Fenced-Stamp", "Fenced-Proof")

ROUTES = (
    ApiRoute("GET", "/v1", "look", "What the store promises", "lease", None, {200: bodies.StandingBody}),
    ApiRoute(
        "POST",
        "/v1/namespaces",
        "create",
        "Create or open a namespace",
        "lease",
        bodies.NamespaceBody,
        {200: bodies.StandingBody},
        (),
    ),
    ApiRoute(
        "POST",
        "/v1/leases",
        "ask",
        "Ask for a lease",
        "lease",
        bodies.AskBody,
        {
            200: bodies.GrantedAnswer,
            202: bodies.WaitingAnswer,
            409: bodies.BusyAnswer,
            410: bodies.EndedAnswer,
        },
        ("namespace", "realm", "Prefer"),
    ),
    ApiRoute(
        "POST",
        "/v1/leases/renew",
        "renew",
        "Renew leases and places in queues",
        "lease",
        bodies.RenewBody,
        {200: bodies.RenewedAnswers},
    ),
    ApiRoute(
        "POST",
        "/v1/leases/release",
        "release",
        "Release a lease",
        "lease",
        bodies.ReleaseBody,
        {200: bodies.ReleasedAnswer, 404: bodies.GoneAnswer, 410: bodies.EndedAnswer},
    ),
    ApiRoute(
        "POST",
        "/v1/leases/withdraw",
        "withdraw",
        "End an attempt, granted or not",
        "lease",
        bodies.WithdrawBody,
        {200: bodies.ReleasedAnswer, 404: bodies.GoneAnswer, 410: bodies.EndedAnswer},
    ),
    ApiRoute(
        "POST",
        "/v1/batch",
        "batch",
        "Several operations in one request",
        "lease",
        bodies.BatchBody,
        {200: bodies.BatchAnswers},
    ),
    ApiRoute(
        "GET",
        "/v1/names",
        "survey",
        "The names that are held or waited for",
        "observe",
        None,
        {200: bodies.NamesBody},
        ("namespace", "realm", "after", "limit"),
    ),
    ApiRoute(
        "GET",
        "/v1/hot",
        "hot",
        "The names that were most often waited for at this instance in the last minutes",
        "observe",
        None,
        {200: bodies.HotBody},
    ),
    ApiRoute("GET", "/v1/names/{name}", "observe", "One name", "observe", None, {200: bodies.NameBody}),
    ApiRoute(
        "GET",
        "/v1/events",
        "live_events",
        "The live page: events `names`, lists of LiveName, if there are many; `state`, a LiveState with the rest of "
        "them; then `change`, LiveChanges, until the client goes away",
        "observe",
        None,
        {200: views.LiveState},
        streams=True,
    ),
    ApiRoute(
        "POST",
        "/v1/names/{name}/force-release",
        "force_release",
        "Take a name from its holder",
        "operate",
        bodies.ForceReleaseBody,
        {200: bodies.MintedBody},
    ),
    ApiRoute(
        "POST",
        "/v1/floor",
        "raise_floor",
        "Raise the floor of the tokens",
        "operate",
        bodies.FloorBody,
        {200: bodies.FloorAnswer},
    ),
    ApiRoute(
        "POST",
        "/v1/tidy",
        "tidy",
        "Forget attempts that ended long ago",
        "operate",
        bodies.TidyBody,
        {200: bodies.TidyAnswer},
    ),
    ApiRoute(
        "PUT",
        "/v1/values/{name}",
        "write_value",
        "Write a value, unless a newer holder has been seen",
        "guard",
        bytes,
        {200: bodies.WrittenBody},
        (*STAMP, "If-Match", "If-None-Match"),
    ),
    ApiRoute(
        "GET",
        "/v1/values/{name}",
        "read_value",
        "Read a value; with a stamp, older holders can no longer write from then on",
        "guard",
        None,
        {200: bytes},
        (*STAMP, "at_least"),
    ),
    ApiRoute(
        "GET",
        "/v1/marks/{name}",
        "mark",
        "The highest token that the guard has seen for a name",
        "observe",
        None,
        {200: bodies.MarkBody},
        (),
    ),
    ApiRoute("GET", "/healthz", "health", "Whether the process answers", None, None, {200: None}, ()),
    ApiRoute("GET", "/readyz", "ready", "Whether the store answers", None, None, {200: None}, ()),
    ApiRoute("GET", "/metrics", "metrics", "Counters, for Prometheus", "observe", None, {200: None}, ()),
    ApiRoute("GET", "/openapi.json", "openapi", "This document", None, None, {200: None}, ()),
)
