"""Counters behind WSGI: Flask with SQLAlchemy's Session, for gunicorn."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flask import Flask, jsonify, make_response, request
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

import fenced
from fenced import sql
from fenced.http import BeforeHandler, WsgiBefore, WsgiReceiver, atomic, flask_answer
from fenced.http.wsgi import WsgiApp
from tests.http.counting import ADD, LOOK, RULES, crash_if, guard_options, name_of, table_of


def app_from_environment() -> WsgiApp:
    return make_app(os.environ["DATABASE_URL"], os.environ["STORE_URL"])


def make_app(database: str, store: str) -> WsgiApp:
    engine = create_engine(database.replace("postgresql:", "postgresql+psycopg:"))
    apps: dict[str, WsgiApp] = {}
    for rule in RULES:
        apps[f"/atomic/{rule}"] = _atomic(engine, rule)
        apps[f"/before/{rule}"] = WsgiBefore(
            _before(engine, rule).wsgi_app,
            store=f"{store}-{rule}",
            names={"/{id:int}": name_of("before", rule, 0).replace("0", "{id}")},
            rule=rule,  # type: ignore[arg-type]
        )
        handlers = BeforeHandler(f"{store}-{rule}", rule=rule, request=request)  # type: ignore[arg-type]
        decorated = _before(engine, rule, "handler", handlers(f"handler-{rule}/{{number}}"))
        decorated.register_error_handler(fenced.FencedError, flask_answer)
        apps[f"/handler/{rule}"] = WsgiReceiver(decorated.wsgi_app)

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        mount, _, rest = environ["PATH_INFO"].rpartition("/")
        return apps[mount]({**environ, "SCRIPT_NAME": mount, "PATH_INFO": f"/{rest}"}, start_response)

    return app


def _atomic(engine: Any, rule: str) -> WsgiApp:
    guard = sql.Guard(**guard_options(rule))  # type: ignore[arg-type]
    table = table_of("atomic", rule)

    def add(number: int) -> Any:
        replies = None if rule == "retry" else "fenced_replies"
        with Session(engine) as session:
            with atomic(guard, session, request, replies=replies) as operation:
                crash_if(request.headers.get("x-crash"))
                qty = session.execute(text(ADD.format(table=table, id=number))).scalar_one()
                response = jsonify({"qty": qty})
                response.status_code = 201
                if rule != "retry":
                    operation.keep(response)
            return response

    app = _flask(engine, table, add)
    app.register_error_handler(fenced.FencedError, flask_answer)
    return WsgiReceiver(app.wsgi_app)


def _before(
    engine: Any, rule: str, way: str = "before", judged: Callable[[Any], Any] = lambda handler: handler
) -> Flask:
    table = table_of(way, rule)

    @judged
    def add(number: int) -> Any:
        crash_if(request.headers.get("x-crash"))
        with Session(engine) as session, session.begin():
            qty = session.execute(text(ADD.format(table=table, id=number))).scalar_one()
        return make_response({"qty": qty}, 201)

    return _flask(engine, table, add)


def _flask(engine: Any, table: str, add: Callable[[int], Any]) -> Flask:
    app = Flask(__name__)

    def look(number: int) -> str:
        with engine.connect() as connection:
            return str(connection.execute(text(LOOK.format(table=table, id=number))).scalar_one())

    app.post("/<int:number>")(add)
    app.get("/<int:number>")(look)
    return app
