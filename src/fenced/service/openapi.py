"""The OpenAPI 3.1 document, made from the table of routes and the classes of the bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from fenced import __version__
from fenced.net.problems import PROBLEM_MEDIA_TYPE
from fenced.service import bodies, views
from fenced.service.routes import ROUTES, ApiRoute
from fenced.values.model import TOKEN_MAX

_REF = "#/components/schemas/{name}"
_PARAMETERS: dict[str, dict[str, Any]] = {
    "namespace": {"schema": {"type": "string", "default": "default"}},
    "realm": {
        "schema": {"type": "string"},
        "description": "The realm that the client began with. An instance with another store refuses the request.",
    },
    "after": {"schema": {"type": "string", "default": ""}, "description": "List what comes after this name."},
    "limit": {"schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 1000}},
    "at_least": {
        "schema": {"type": "integer", "minimum": 0, "maximum": TOKEN_MAX, "default": 0},
        "description": "Answer 503 while no token as high as this was seen.",
    },
}
_HEADERS = {
    "Prefer": "`wait=S`: answer a waiter when it is worth asking again, or after S seconds.",
    "Fenced-Stamp": "The stamp of the lease, in quotation marks.",
    "Fenced-Proof": "The proof of the stamp, in quotation marks, for guards that require one.",
    "If-Match": "The ETag of the value that is to be replaced.",
    "If-None-Match": "`*`: write only if there is no value yet.",
}
_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
_OCTETS: dict[str, Any] = {"application/octet-stream": {"schema": {}}}


def document() -> dict[str, Any]:
    used: dict[Any, None] = dict.fromkeys((bodies.ProblemView, bodies.Turn, views.LiveChange))
    for route in ROUTES:
        used |= dict.fromkeys((route.body, *route.answers.values()))
    kinds = [kind for kind in used if kind not in (None, bytes)]
    references, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, references, strict=True))
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "fenced", "version": __version__, "description": "Leases with fencing tokens."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _operation(route: ApiRoute, schema_of: dict[Any, Any]) -> dict[str, Any]:
    parameters = [_parameter(name) for name in route.parameters]
    if "{name}" in route.path:
        parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
    problem = {"content": {PROBLEM_MEDIA_TYPE: {"schema": schema_of[bodies.ProblemView]}}}
    responses: dict[str, Any] = {
        str(status): {
            "description": _described(kind),
            **(_STREAM if route.streams else _content(kind, schema_of)),
        }
        for status, kind in route.answers.items()
    }
    for status, response in responses.items():
        if int(status) >= 400:  # the same status may also be a problem, such as 404 for a namespace
            response["content"] |= problem["content"]
    responses["default"] = {"description": "A problem document (RFC 9457).", **problem}
    operation: dict[str, Any] = {
        "operationId": route.handler,
        "summary": route.summary,
        "parameters": parameters,
        "responses": responses,
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, **_content(route.body, schema_of)}
    return operation


def _parameter(name: str) -> dict[str, Any]:
    if name in _HEADERS:
        return {"name": name, "in": "header", "schema": {"type": "string"}, "description": _HEADERS[name]}
    return {"name": name, "in": "query", **_PARAMETERS[name]}


def _described(kind: Any) -> str:
    return "OK" if kind in (None, bytes) else (kind.__doc__ or kind.__name__).partition("\n")[0]


def _content(kind: Any, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if kind is None:
        return {}
    return {"content": _OCTETS if kind is bytes else {"application/json": {"schema": schema_of[kind]}}}
