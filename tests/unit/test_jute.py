"""Replies of ZooKeeper that are cut or damaged are typed errors, whoever reads them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from fenced.errors import Indeterminate
from fenced.stores.zookeeper.wire import jute

STAT = bytes(68)
TEXT = struct.pack(">i", 2) + b"/a"
BODIES: dict[Callable[[bytes], Any], bytes] = {
    jute.stat_of: STAT,
    jute.data_of: TEXT + STAT,
    jute.children_of: struct.pack(">i", 2) + TEXT + TEXT + STAT,
    jute.results_of: struct.pack(">i?i", 15, False, 0) + TEXT + STAT + struct.pack(">i?i", -1, True, -1),
}


@pytest.mark.parametrize("read", BODIES, ids=lambda read: read.__name__)
def test_a_reply_that_is_cut_is_malformed(read: Callable[[bytes], Any]) -> None:
    body = BODIES[read]
    read(body)
    for size in range(len(body)):
        with pytest.raises(jute.MalformedJute) as error:
            read(body[:size])
        assert isinstance(error.value, Indeterminate), "of fenced.errors: no private error leaves the wire"


def test_a_text_that_is_none_is_malformed() -> None:
    with pytest.raises(jute.MalformedJute):
        jute.children_of(struct.pack(">ii", 1, 2) + b"\xff\xfe" + STAT)
