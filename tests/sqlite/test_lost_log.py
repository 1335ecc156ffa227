"""The write-ahead log, its index or the file itself is removed or put back from a copy: no token repeats or falls."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fenced.errors import Misconfigured
from fenced.runtime import clocks
from fenced.stores.sqlite.authority.connecting import LeaseFile
from fenced.stores.sqlite.authority.floor import Floor
from fenced.stores.sqlite.failures import _never_closed
from tests.sqlite.lease_files import OneStore, checkpoint, opened, tokens_of

REMOVED = [("-wal",), ("-shm",), ("-wal", "-shm")]

OTHER = """
import json, sys
from pathlib import Path
from fenced.errors import FencedError
from tests.sqlite.lease_files import OneStore, opened, tokens_of
try:
    store = opened(Path(sys.argv[1]))
    print(json.dumps(tokens_of(store, int(sys.argv[2]))), flush=True)
    if sys.argv[3] == "close":
        store.close()
    else:
        import os
        os._exit(0)  # as if killed: nothing is closed, nothing is carried over from the log
except FencedError as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def another_process(path: Path, count: int = 3, end: str = "close") -> list[int] | str:
    """The tokens that another process gets, or the error that it meets."""
    ran = subprocess.run(
        [sys.executable, "-c", OTHER, path, str(count), end],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ran.returncode == 0, ran.stderr
    told: list[int] | str = json.loads(ran.stdout)
    return told


def raise_floor(path: Path, above: int) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "fenced", "authority", "raise", "--above", str(above)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FENCED_AUTHORITY": f"sqlite:///{path}"},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def rises(tokens: list[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(tokens))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "leases.db"


@pytest.fixture
def store(path: Path) -> Iterator[OneStore]:
    made = opened(path)
    yield made
    made.close()
    while _never_closed:
        _never_closed.pop().close()


# proves authority sqlite: lost-log-noticed
@pytest.mark.parametrize("removed", REMOVED, ids="".join)
def test_a_log_removed_under_a_running_process_is_noticed(
    store: OneStore, path: Path, removed: tuple[str, ...]
) -> None:
    """The running process hands out no token any more, and saves what it knows; whoever comes counts on."""
    tokens = tokens_of(store, 5)
    for ending in removed:
        os.unlink(f"{path}{ending}")
    for _ in range(2):
        with pytest.raises(Misconfigured, match=r"was removed or replaced.*fenced authority raise"):
            tokens_of(store, 1)
        with pytest.raises(Misconfigured):
            store.renew(["0" * 32])
    more = another_process(path)
    assert isinstance(more, list) and rises(tokens + more), (tokens, more)
    with pytest.raises(Misconfigured):  # until it is started again
        tokens_of(store, 1)


@pytest.mark.parametrize("removed", REMOVED[1:], ids="".join)
def test_a_log_that_others_have_replaced_is_not_carried_over(
    store: OneStore, path: Path, removed: tuple[str, ...]
) -> None:
    """Another process was first: the old log's owner notices, and what it knows overwrites nothing."""
    tokens_of(store, 3)
    checkpoint(path)
    tokens = tokens_of(store, 2)
    for ending in removed:
        os.unlink(f"{path}{ending}")
    said = another_process(path)
    if "-wal" in removed:
        assert isinstance(said, str) and "tokens up to 5 were handed out" in said
        assert "raise --above 5" in said
        assert raise_floor(path, 100) == "the floor is 100: every later token is greater\n"
        said = another_process(path)
    assert isinstance(said, list) and rises(tokens + said), (tokens, said)
    with pytest.raises(Misconfigured, match="was removed or replaced"):
        tokens_of(store, 1)
    store.close()
    more = another_process(path)
    assert isinstance(more, list) and rises(tokens + said + more), (tokens, said, more)


OLD = """
import sys
from pathlib import Path
from fenced.errors import Misconfigured
from tests.sqlite.lease_files import OneStore, checkpoint, opened, tokens_of
store = opened(Path(sys.argv[1]))
tokens_of(store, 3)
checkpoint(Path(sys.argv[1]))
tokens_of(store, 20)
print("ready", flush=True)
while (order := sys.stdin.readline()) == "ask\\n":
    try:
        tokens_of(store, 1)
    except Misconfigured:
        print("refused", flush=True)
store.close()
"""


@contextlib.contextmanager
def old_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has handed out 23 tokens, the last 20 of them in its log alone. It asks again for each line."""
    with subprocess.Popen(
        [sys.executable, "-c", OLD, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.mark.parametrize("orders", ["", "ask\n"], ids=["knows nothing", "knows"])
def test_a_process_that_ends_carries_no_old_log_over(path: Path, orders: str) -> None:
    """It ends in good order, as the last that has the file open, with a log in its hands that others have replaced."""
    with old_process(path) as old:
        os.unlink(f"{path}-wal")
        os.unlink(f"{path}-shm")
        raise_floor(path, 1000)
        assert another_process(path, 5) == [1001, 1002, 1003, 1004, 1005]
        assert old.communicate(orders, timeout=60)[0] == orders.replace("ask", "refused")
    assert another_process(path, 2) == [1006, 1007]


def test_an_index_without_its_log_is_for_nobody(path: Path) -> None:
    """The log alone is gone: whoever comes finds an index that points into nothing, until the old process has ended."""
    with old_process(path) as old:
        os.unlink(f"{path}-wal")
        assert "Stop all processes" in str(another_process(path))
        assert old.stdin is not None and old.stdout is not None
        old.stdin.write("ask\n")
        old.stdin.flush()
        assert old.stdout.readline() == "refused\n"
        assert "Stop all processes" in str(another_process(path)), "and no lock is left behind"
        old.communicate("", timeout=60)
    assert "raise --above 23" in str(another_process(path))
    raise_floor(path, 23)
    assert another_process(path, 2) == [24, 25]


@pytest.mark.parametrize("removed", [("-wal",), ("-wal", "-shm")], ids="".join)
def test_a_log_removed_after_a_crash_is_noticed(path: Path, removed: tuple[str, ...]) -> None:
    """Nobody runs, and the log is all that has the last tokens: nothing is granted until the floor is raised."""
    store = opened(path)
    tokens = tokens_of(store, 3)
    store.close()
    crashed = another_process(path, 4, "die")
    assert isinstance(crashed, list) and rises(tokens + crashed)
    for ending in removed:
        os.unlink(f"{path}{ending}")
    after = opened(path)
    with pytest.raises(Misconfigured, match=r"up to 7 .* is 3: .*fenced authority raise --above 7"):
        tokens_of(after, 1)
    assert after.raise_floor(0) == 7, "raising takes what is known into account, whatever it is told"
    assert rises(tokens + crashed + tokens_of(after, 2))
    after.close()


def test_a_copy_put_back_in_place_is_noticed(path: Path) -> None:
    store = opened(path)
    tokens = tokens_of(store, 3)
    store.close()
    shutil.copy(path, path.with_name("backup"))
    store = opened(path)
    tokens += tokens_of(store, 3)
    store.close()
    shutil.copy(path.with_name("backup"), path)
    assert "up to 6" in str(another_process(path))
    raise_floor(path, 6)
    more = another_process(path)
    assert isinstance(more, list) and rises(tokens + more)


def test_a_new_file_in_the_same_place_begins_anew(path: Path) -> None:
    """It is another realm, whose tokens nobody compares with the old ones."""
    store = opened(path)
    tokens_of(store, 3)
    store.close()
    path.unlink()
    store = opened(path)
    assert tokens_of(store, 2) == [1, 2]
    other = OneStore(path, "other", clocks.now_ns)
    other.open()
    assert tokens_of(other, 2) == [1, 2], "and another namespace has a floor of its own"
    for each in (store, other):
        each.close()


def test_without_a_look_and_a_floor_tokens_repeat(
    store: OneStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: a process that looks at its files by name only when it opens them. Real tokens fall."""
    monkeypatch.setattr(LeaseFile, "check_files", lambda *_: None)
    monkeypatch.setattr(Floor, "read", lambda *_: 0)
    tokens_of(store, 3)
    checkpoint(path)
    tokens = tokens_of(store, 2)
    os.unlink(f"{path}-wal")
    os.unlink(f"{path}-shm")
    Path(f"{path}.floor").unlink()  # the other process has the real one
    said = another_process(path)
    assert isinstance(said, list) and set(said) & set(tokens), "handed out twice"
    assert tokens_of(store, 1) == [6], "and nobody noticed"


# Settings.


def test_another_journal_mode_is_noticed_by_each_new_connection(store: OneStore, path: Path) -> None:
    """While a connection is open SQLite lets nobody change it. How far a commit is synced is each connection's own."""
    tokens = tokens_of(store, 1)
    db = sqlite3.connect(path, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        db.execute("PRAGMA journal_mode = DELETE")
    store.file.close_idle()  # as before a fork
    db.execute("PRAGMA journal_mode = DELETE")
    with pytest.raises(Misconfigured, match="journal_mode delete"):
        tokens_of(store, 1)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = OFF")
    assert rises(tokens + tokens_of(store, 1))
    assert store.file.idle[-1].db.execute("PRAGMA synchronous").fetchone() != (0,)
    db.close()
