"""`fenced authority show` and `fenced authority move`: what they print, and when they refuse."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import fenced
from fenced import cli
from fenced.client.moving import GAP
from fenced.sql import Guard

ORDERS = Guard(table="orders", name="orders/{id}")


class House:
    """Two authorities, a guarded table that trusts the first one, and a command line in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.old, self.new, self.shop = (f"sqlite:///{folder}/{name}.db" for name in ("old", "new", "shop"))
        self.db = sqlite3.connect(folder / "shop.db", isolation_level=None)
        self.db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, qty INTEGER)")
        self.db.execute("INSERT INTO orders VALUES (1, 0)")
        ORDERS.install(self.db, mode="require")
        self._capsys = capsys

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Run `fenced authority ...`; its status, and what it printed."""
        code = cli._guarded(["authority", *args])
        return code, *self._capsys.readouterr()

    def show(self, url: str) -> Any:
        return json.loads(self("show", url, "--json")[1])

    def write(self, url: str) -> int:
        with fenced.Client(url) as client, client.hold("orders/1") as lease:
            with ORDERS.transaction(self.db, lease) as tx:
                tx.execute("UPDATE orders SET qty = qty + 1")
            return lease.token


@pytest.fixture
def house(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[House]:
    house = House(tmp_path, capsys)
    with closing(house.db):
        house.write(house.old)
        yield house


def test_showing_an_authority(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = house.show(house.old)
    assert shown == {
        "authority": house.old,
        "namespace": "default",
        "guarantee": "strict",
        "realm": shown["realm"],
        "last_token": 1,
        "doubts": [],
        "warnings": [],
        "schema": {"version": 1, "readable_by": 1, "release": ""},
        "clock": None,
        "stopped": None,
    }
    monkeypatch.setenv("FENCED_AUTHORITY", house.old)
    assert house("show")[1].splitlines() == [
        f"{house.old}, namespace default",
        f"  realm       {shown['realm']}",
        "  last token  1; every later one is greater",
        "  guarantee   strict",
        "  schema      1",
    ]
    assert house("show", house.new)[0] == 78 and not (house.folder / "new.db").exists()


def test_moving_there_and_back(house: House) -> None:
    with pytest.raises(fenced.ForeignRealm) as refused:
        house.write(house.new)
    old, new = house.show(house.old)["realm"], house.show(house.new)["realm"]
    assert f"of realm {new}, and this guard trusts realm {old}." in str(refused.value)
    assert "fenced authority move OLD NEW --guards URL" in str(refused.value)
    with fenced.Client(house.old, label="clerk") as client, client.hold("orders/1"):
        code, printed, _ = house("move", house.old, house.new, "--guards", house.shop)
    assert code == 0
    *lines, name = printed.splitlines()
    assert lines == [
        f"the floor of NEW is {GAP + 2}, above every token of OLD",
        f"{house.shop} trusts NEW from now on, and OLD no longer",
        "moved: 1 database",
        f"  from realm {old}, {house.old}",
        f"    to realm {new}, {house.new}",
        "still in use in OLD, where the guards refuse every holder: 1 name",
    ]
    assert name.startswith("  orders/1 by clerk (pid ")
    with pytest.raises(fenced.ForeignRealm):
        house.write(house.old)
    assert house.write(house.new) == GAP + 3
    code, printed, _ = house("move", house.old, house.new, "--guards", house.shop, "--json")
    assert (code, json.loads(printed)) == (
        0,
        {
            "old": {"authority": house.old, "realm": old, "last_token": 3},
            "new": {"authority": house.new, "realm": new, "last_token": GAP + 3},
            "guards": [
                {"url": house.shop, "realm": new, "highest": GAP + 3, "max_jump": None, "waiting": {}}
            ],
            "held_in_old": [],
        },
    )
    assert house("move", house.new, house.old, "--guards", house.shop)[0] == 0
    assert house.write(house.old) > 2 * GAP
    assert house.db.execute("SELECT qty FROM orders").fetchone() == (3,)
    assert house.db.execute("PRAGMA journal_mode").fetchone() == ("delete",), "the program's choice stays"


def test_refusing_before_anything_changes(house: House) -> None:
    cases = [
        ((house.old, house.new), 64, "which guards? Pass --guards URL"),
        ((house.old, house.old, "--guards", house.shop), 64, "the same authority"),
        ((f"{house.old}.gone", house.new, "--guards", house.shop), 78, "no file"),
        ((house.old, "memory:", "--guards", house.shop), 78, "one process"),
        ((house.old, house.new, "--guards", f"{house.shop}.gone"), 78, "no file"),
    ]
    for args, status, message in cases:
        code, printed, complaint = house("move", *args)
        assert (code, printed, message in complaint) == (status, "", True), (args, complaint)
    assert not (house.folder / "new.db").exists()
    ORDERS.adopt(house.db, "00000000000000cc")
    code, printed, complaint = house("move", house.old, house.new, "--guards", house.shop)
    assert (code, printed) == (78, "") and "trusts realm 00000000000000cc, which is neither" in complaint
    assert house.show(house.new)["last_token"] == 0
