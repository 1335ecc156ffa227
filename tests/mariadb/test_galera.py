"""Why leases are not kept in a Galera cluster: what two of its nodes promise at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest

import fenced
from fenced.errors import Misconfigured
from fenced_testkit.servers import GaleraCluster, MariadbServer
from fenced_testkit.servers.mysql import MYSQL_VARIABLE

pytestmark = [
    pytest.mark.xdist_group("galera"),
    pytest.mark.skipif(bool(os.environ.get(MYSQL_VARIABLE)), reason="MySQL has no Galera"),
]
DEADLOCK = 1213


@pytest.fixture(scope="module")
def cluster() -> Iterator[GaleraCluster]:
    with GaleraCluster() as cluster:
        cluster.nodes[0].execute("CREATE DATABASE t")
        cluster.nodes[0].execute("CREATE TABLE t.name (name varchar(20) PRIMARY KEY, holder text)")
        cluster.nodes[0].execute("CREATE TABLE t.token (id bigint AUTO_INCREMENT PRIMARY KEY, name text)")
        yield cluster


class Node:
    """A session on one node, which sees what the other one has committed before."""

    def __init__(self, server: MariadbServer) -> None:
        self._connection = pymysql.connect(
            host=server.host, port=server.port, user="root", database="t", autocommit=True
        )
        self.run("SET wsrep_sync_wait = 7")

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def token(self) -> int:
        self.run("INSERT INTO token (name) VALUES ('x')")
        ((token,),) = self.run("SELECT last_insert_id()")
        return int(token)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def nodes(cluster: GaleraCluster) -> Iterator[list[Node]]:
    nodes = [Node(server) for server in cluster.nodes]
    nodes[0].run("REPLACE INTO name VALUES ('x', '')")
    yield nodes
    for node in nodes:
        node.close()


LOCK = "SELECT holder FROM name WHERE name = 'x' FOR UPDATE"


def test_two_nodes_grant_one_name_and_its_tokens_fall(nodes: list[Node]) -> None:
    """A row is locked on one node alone, and each node has its own share of the numbers."""
    slow, fast = nodes[1], nodes[0]
    slow.run("BEGIN")
    assert slow.run(LOCK) == [("",)]
    early = slow.token()
    later = []
    for _ in range(3):
        fast.run("BEGIN")
        assert fast.run(LOCK) == [("",)], "it does not wait for the other one"
        later.append(fast.token())
        fast.run("COMMIT")
    slow.run("COMMIT")
    assert early < later[-1], "granted last, and it is lower"
    shares = [node.run("SELECT @@auto_increment_increment, @@auto_increment_offset")[0] for node in nodes]
    assert sorted(shares) == [(2, 1), (2, 2)]


def test_a_holder_learns_at_commit_that_it_has_lost(nodes: list[Node]) -> None:
    """With a row that both change, the second COMMIT fails. Until then each has been told that it has the name."""
    for node in nodes:
        node.run("BEGIN")
        assert node.run(LOCK) == [("",)]
        node.run("UPDATE name SET holder = @@server_id")
    nodes[0].run("COMMIT")
    with pytest.raises(pymysql.OperationalError) as refused:
        nodes[1].run("COMMIT")
    assert refused.value.args[0] == DEADLOCK


def test_a_named_lock_is_held_on_both(nodes: list[Node]) -> None:
    assert [node.run("SELECT get_lock('x', 0)") for node in nodes] == [[(1,)], [(1,)]]


# proves authority mariadb: one-writer
def test_a_cluster_is_best_effort_and_says_to_write_to_one_node(cluster: GaleraCluster) -> None:
    """On one node all is as on a server alone."""
    url = cluster.nodes[0].url("t")
    with (
        fenced.Client(url) as strict,
        pytest.raises(Misconfigured, match="let all clients write to one node"),
    ):
        strict.acquire("orders")
    with fenced.Client(url, guarantee="best-effort") as client:
        tokens = []
        for _ in range(5):
            with client.hold("orders") as lease:
                tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


def test_numbers_of_two_nodes_fall(cluster: GaleraCluster, nodes: list[Node]) -> None:
    """As a grant on the one draws its number before, and commits after grants on the other: nobody waits for it."""
    with fenced.Client(cluster.nodes[0].url("t"), guarantee="best-effort") as client:
        client.acquire("orders").release()  # the tables are there
    slow, fast = nodes[1], nodes[0]
    number = "INSERT INTO fenced_number () VALUES ()"
    slow.run("BEGIN")
    slow.run(number)
    ((early,),) = slow.run("SELECT last_insert_id()")
    later = []
    for _ in range(3):
        fast.run(number)
        later += [found for (found,) in fast.run("SELECT last_insert_id()")]
    slow.run("COMMIT")
    assert early < later[-1], "granted last, and it is lower"
