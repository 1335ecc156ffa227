"""Which clients may work with a stored schema: one rule, and every store keeps both numbers."""

from __future__ import annotations

import json

import pytest

from fenced.errors import Misconfigured
from fenced.stores.etcd.authority.keys import Meta
from fenced.stores.postgresql.authority.schema import SCHEMA as AUTHORITY
from fenced.stores.postgresql.guard.schema import SCHEMA as GUARD
from fenced.stores.zookeeper.authority import tree
from fenced.stores.zookeeper.wire.jute import Stat
from fenced.values.schema import (
    RELEASE,
    V0_1,
    Installed,
    Schema,
    SqlSchema,
    check_readable,
    is_older,
    parsed_schema,
)

STAT = Stat(*(0 for _ in Stat._fields))


def test_a_client_uses_what_it_can_read() -> None:
    check_readable("the store", Schema(3, 1), known=1)
    check_readable("the store", Schema(1, 1), known=3)
    with pytest.raises(Misconfigured) as caught:
        check_readable("the store", Schema(4, 3, "9.1"), known=2)
    assert str(caught.value) == (
        "the store has schema 4, which a client can use if it knows schema 3 or later; "
        f"this fenced {RELEASE} knows 2: install fenced 9.1 or later"
    )


def test_a_layout_of_0_1_has_one_number() -> None:
    assert parsed_schema({"schema": 1}) == Schema(1, 1)
    assert parsed_schema({"schema": "2", "version": "5", "release": "9.1"}) == Schema(5, 2, "9.1")


def test_rewriting_a_layout_keeps_fields_of_later_versions() -> None:
    meta = Meta.read(Meta("realm", "lineage", 7).written()[:-1] + b',"version":5,"release":"9.1"}')
    raised = json.loads(meta._replace(offset=9).written())
    assert (raised["offset"], raised["version"], raised["release"]) == (9, 5, "9.1")
    root = json.dumps({**json.loads(tree.new_space("realm")), "version": 5, "release": "9.1"}).encode()
    again = json.loads(tree.space_of(root, STAT, "here").raised(12))
    assert (again["added"], again["version"], again["release"], again["schema"]) == (12, 5, "9.1", 1)
    with pytest.raises(Misconfigured, match=r"install fenced 9\.1 or later"):
        tree.space_of(root.replace(b'"schema": 1', b'"schema": 4'), STAT, "here")


@pytest.mark.parametrize("schema", [AUTHORITY, GUARD], ids=lambda schema: schema.name)
def test_an_upgrade_changes_what_is_older_and_nothing_else(schema: SqlSchema) -> None:
    current = Installed(Schema(schema.version, 1, RELEASE), schema.digest)
    for found, upgrades in (
        (None, True),
        (V0_1, True),
        (current, False),
        (Installed(current.schema, "other functions"), True),
        (Installed(Schema(schema.version, 1, "99.0"), "those of a later fenced"), False),
        (Installed(Schema(schema.version + 1, 1, RELEASE), "those of a later schema"), False),
    ):
        assert bool(schema.upgrade(found)) == schema.needs_upgrade(found) == upgrades, found
    assert len(schema.tables(1)) == schema.version - 1


def test_releases_have_an_order() -> None:
    assert is_older("0.2.0", "0.10.0") and is_older("0.2", "0.2.1")
    assert not is_older("0.2.0", "0.2.0") and not is_older("1.0.0", "0.9.9")
