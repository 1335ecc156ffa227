"""Where the authority's file may lie, and what happens when the ground under it fails. Real mounts, real disks."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fenced
from fenced.errors import Indeterminate, Misconfigured, Misuse, Unavailable
from fenced.runtime import clocks, machine
from fenced.runtime.blocking import BlockingRuntime, step
from fenced.stores.sqlite.authority.authority import SqliteAuthority
from fenced.stores.sqlite.authority.connecting import Deadline
from fenced.testing.kit import asking, granted
from fenced.values.model import Ask, Ended, Granted, Holder, Kept
from tests.sqlite.lease_files import OneStore

HOLDER = Holder("0" * 32, "label", "host", 1)


def ask(number: int, name: str = "orders") -> Ask:
    return Ask(f"{number:032x}", (name,), 10.0, HOLDER)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[OneStore]:
    opened = OneStore(tmp_path / "leases.db", "default", clocks.now_ns)
    opened.open()
    yield opened
    opened.close()


def mounted(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script and then Python in mount namespace of its own, also without root."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    return subprocess.run(
        [*unshare, "sh", "-ec", script, "sh", sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


HOLD = "import fenced, sys; fenced.Client('sqlite:///' + sys.argv[1], guarantee='best-effort').acquire('a', wait=0)"


# proves authority sqlite: one-machine
def test_a_bind_mounted_file_is_refused(tmp_path: Path) -> None:
    """One file under two names has two logs, and both mint the same tokens."""
    fenced.Client(f"sqlite:///{tmp_path}/leases.db").acquire("a")
    (tmp_path / "other.db").touch()
    script = f'mount --bind "$2" "$3"; exec "$1" -c "{HOLD}" "$3"'
    result = mounted(script, tmp_path / "leases.db", tmp_path / "other.db")
    assert "Misconfigured" in result.stderr, result.stderr
    assert "itself a mount point" in result.stderr


def test_a_hard_linked_file_is_refused(store: OneStore, tmp_path: Path) -> None:
    os.link(store.path, tmp_path / "twin.db")
    for name in ("leases.db", "twin.db"):
        with pytest.raises(Misconfigured, match="hard links"):
            OneStore(tmp_path / name, "default", clocks.now_ns).open()


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network file system can be mounted here; its line in the kernel's list of mounts can be written."""
    listed = tmp_path / "mountinfo"
    listed.write_text(f"1 0 8:1 / / rw - ext4 x rw\n2 1 0:9 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(machine, "_MOUNTS", listed)
    with pytest.raises(Misconfigured, match="network file system"):
        OneStore(tmp_path / "leases.db", "default", clocks.now_ns).open()
    assert not (tmp_path / "leases.db").exists()


IN_MEMORY = """
import sys
import fenced
url = 'sqlite:///' + sys.argv[1] + '/leases.db'
try:
    fenced.Client(url).acquire('a', wait=0)
except fenced.Misconfigured as error:
    print(error)
print(fenced.Client(url, guarantee='best-effort').acquire('a', wait=0).token)
"""


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_file_in_memory_is_best_effort(kind: str, tmp_path: Path) -> None:
    result = mounted(f'mount -t {kind} none "$3"; exec "$1" -c "$2" "$3"', IN_MEMORY, tmp_path)
    says, token = result.stdout.splitlines()
    assert f"kept in memory ({kind})" in says and "put it on a disk" in says and "best-effort" in says
    assert token == "1", result.stderr


def test_of_stacked_mounts_the_upper_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As systemd's automount makes them: autofs below, the network on top."""
    listed = tmp_path / "mountinfo"
    stacked = f"2 1 0:8 / {tmp_path} rw - autofs x rw\n3 2 0:9 / {tmp_path} rw - nfs4 server:/x rw\n"
    listed.write_bytes(b"1 0 8:1 / /caf\xe9 rw - ext4 x rw\n" + stacked.encode())
    monkeypatch.setattr(machine, "_MOUNTS", listed)
    with pytest.raises(Misconfigured, match="nfs4"):
        OneStore(tmp_path / "leases.db", "default", clocks.now_ns).open()


def test_a_link_to_the_file_is_the_file(store: OneStore, tmp_path: Path) -> None:
    os.symlink(store.path, tmp_path / "link.db")
    client = fenced.Client(f"sqlite:///{tmp_path}/link.db")
    assert client.url == f"sqlite:///{store.path}"


def test_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="does not exist"):
        fenced.Client(f"sqlite:///{tmp_path}/nowhere/leases.db").acquire("a")


@pytest.mark.parametrize(
    "url", ["sqlite:", "sqlite://", "sqlite:///", "sqlite://host/x", "sqlite:///a?b", "x", "", 5]
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(Misuse):
        fenced.Client(url)


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(Misconfigured, match="sqlite"):
        fenced.Client("carrier-pigeon://coop")


def test_somebody_elses_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE orders (id)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(Misconfigured, match="another program"):
        OneStore(path, "default", clocks.now_ns).open()
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "leases.db"
    path.write_bytes(b"this is not a database, it is a letter to one" * 100)
    with pytest.raises(Misconfigured, match="damaged or not a database"):
        OneStore(path, "default", clocks.now_ns).open()


def test_a_newer_schema_is_refused(store: OneStore) -> None:
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(Misconfigured, match="install a later fenced"):
        OneStore(store.path, "default", clocks.now_ns).open()


def test_a_replaced_file_is_noticed(store: OneStore) -> None:
    """A process that kept the old file open would mint tokens into a file that nobody else sees."""
    assert isinstance(store.ask(ask(1), ""), Granted)
    os.rename(store.path, store.path.with_name("moved.db"))
    with pytest.raises(Misconfigured, match="removed or replaced"):
        store.ask(ask(2, "other"), "")
    with pytest.raises(Misconfigured):
        store.renew([f"{1:032x}"])
    assert not store.path.exists(), "nor is an empty one made in its place"


def test_a_locked_file_is_unavailable(store: OneStore, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = sqlite3.connect(store.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked"):
        store.renew([f"{1:032x}"], Deadline.of(0.1))
    blocker.execute("ROLLBACK")
    blocker.close()
    assert isinstance(store.ask(ask(1), ""), Granted)


def renew_behind_a_lock(store: OneStore) -> object:
    """The answer to a renewal that left in time and then waited for the lock until the lease was over."""
    lease = Ask(f"{7:032x}", ("behind",), 0.3, HOLDER)
    assert isinstance(store.ask(lease, ""), Granted)
    blocker = sqlite3.connect(store.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    answers: list[object] = []
    renewal = threading.Thread(target=lambda: answers.extend(store.renew([lease.secret])))
    renewal.start()
    over = clocks.now() + 0.4
    while clocks.now() < over:
        renewal.join(0.01)
    blocker.execute("ROLLBACK")
    blocker.close()
    renewal.join(90)
    return answers[0]


def test_the_clock_is_read_after_the_lock(store: OneStore) -> None:
    assert renew_behind_a_lock(store) == Ended("expired")


def test_a_clock_read_before_the_lock_would_be_noticed(store: OneStore) -> None:
    """The planted bug: the time of a request is taken when it begins, and a wait behind a lock revives."""
    clock, renew = store._clock, store.renew

    def early(secrets: list[str]) -> list[object]:
        began = clock()
        store._clock = lambda: began
        try:
            return list(renew(secrets))
        finally:
            store._clock = clock

    store.renew = early  # type: ignore[method-assign, assignment]
    assert isinstance(renew_behind_a_lock(store), Kept)


FILL = """
import os, sys
import fenced
from fenced.errors import Unavailable
client = fenced.Client('sqlite:///' + sys.argv[1] + '/leases.db', guarantee='best-effort')
first = client.acquire('first', wait=0)
ballast = os.open(sys.argv[1] + '/ballast', os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(ballast, bytes(4096))
except OSError:
    os.close(ballast)
tokens = []
try:
    for number in range(10000):
        tokens.append(client.acquire(f'name/{number}', wait=0).token)
    print('never full')
except Unavailable as error:
    assert 'full' in str(error), error
os.unlink(sys.argv[1] + '/ballast')
after = client.acquire('after', wait=0)
assert after.token > max([first.token, *tokens]), (after.token, tokens)
first.release()
print('ok')
"""


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """The ask fails with a typed error; once there is room again, everything goes on, and tokens rise."""
    result = mounted('mount -t tmpfs -o size=1m none "$3"; exec "$1" -c "$2" "$3"', FILL, tmp_path)
    assert (result.stdout, result.stderr) == ("ok\n", "")


FULL_AT_FIRST = """
import os, sqlite3, sys
import fenced
from fenced.errors import Unavailable
from fenced.testing.kit import stamp
folder = sys.argv[1]
with fenced.Client(f'sqlite:///{folder}/leases.db', guarantee='best-effort') as client:
    client.acquire('first', wait=0).release()
orders = fenced.sql.Guard(table='orders', name='orders/{id}')
for journal in ('wal', 'delete'):
    db = sqlite3.connect(f'{folder}/{journal}.db', isolation_level=None)
    db.execute(f'PRAGMA journal_mode = {journal}')
    db.execute('CREATE TABLE orders (id INTEGER PRIMARY KEY)')
    orders.install(db, mode='require')
    db.close()
ballast = os.open(f'{folder}/ballast', os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(ballast, bytes(4096))
except OSError:
    pass
def told(work):
    try:
        work()
    except Unavailable as error:
        print('is full' in str(error))
def guarded(journal):
    db = sqlite3.connect(f'{folder}/{journal}.db', isolation_level=None)
    with orders.transaction(db, stamp(5, 1, 'orders/1')) as tx:
        tx.execute('INSERT INTO orders VALUES (1)')
told(lambda: fenced.Client(f'sqlite:///{folder}/leases.db', guarantee='best-effort').acquire('more', wait=0))
told(lambda: guarded('wal'))
told(lambda: guarded('delete'))
"""


def test_a_disk_that_is_full_at_first_says_so(tmp_path: Path) -> None:
    """There is no room for the index of the log either, which SQLite calls an I/O error."""
    result = mounted('mount -t tmpfs -o size=1m none "$3"; exec "$1" -c "$2" "$3"', FULL_AT_FIRST, tmp_path)
    assert result.stdout == "True\n" * 3, result.stderr


READ_ONLY = """
import sys
import fenced
try:
    fenced.Client('sqlite:///' + sys.argv[1] + '/leases.db').acquire('other', wait=0)
except fenced.Misconfigured as error:
    print('ok', 'read-only' in str(error))
"""


def test_a_read_only_file_system_says_so(tmp_path: Path) -> None:
    script = 'mount -t tmpfs none "$3"; "$1" -c "$4" "$3/leases.db"; mount -o remount,ro "$3"; exec "$1" -c "$2" "$3"'
    result = mounted(script, READ_ONLY, tmp_path, HOLD)
    assert result.stdout == "ok True\n", result.stderr


# proves authority sqlite: reboot-frees
def test_leases_end_with_the_boot_and_tokens_go_on(store: OneStore) -> None:
    """After a restart of the machine no holder lives, and times of the old boot mean nothing."""
    first = store.ask(ask(1), "")
    assert isinstance(first, Granted)
    store.close()
    with sqlite3.connect(store.path) as connection:
        connection.execute("UPDATE machine SET boot = 'the boot before'")
    connection.close()
    again = OneStore(store.path, "default", clocks.now_ns)
    again.open()
    second = again.ask(ask(2), "")
    assert isinstance(second, Granted)
    assert second.token > first.token
    assert again.release(f"{1:032x}").reason == "expired"  # type: ignore[union-attr]
    again.close()


# proves authority sqlite: synced-grants
def test_grants_are_synced(store: OneStore) -> None:
    """What hands out tokens writes ahead and syncs fully; `make evidence` cuts the power to show it."""
    store.ask(ask(1), "")
    connection = store.file.idle[-1].db
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# proves authority sqlite: restore-unnoticed
def test_a_restored_file_repeats_tokens_unless_the_floor_is_raised(store: OneStore, tmp_path: Path) -> None:
    """What the trait says: nothing in the file tells a backup from the original."""
    store.ask(ask(1), "")
    with sqlite3.connect(store.path) as source, sqlite3.connect(tmp_path / "backup.db") as backup:
        source.backup(backup)
    backup.close()
    source.close()
    later = [store.ask(ask(n, f"n{n}"), "") for n in (2, 3)]
    for floor, repeats in ((None, True), (3, False)):
        restored_path = tmp_path / f"restored-{floor}.db"
        restored_path.write_bytes((tmp_path / "backup.db").read_bytes())
        restored = OneStore(restored_path, "default", clocks.now_ns)
        restored.open()
        if floor is not None:
            restored.raise_floor(floor)
        again = restored.ask(ask(4, "n4"), "")
        assert isinstance(again, Granted)
        assert (again.token in [granted.token for granted in later]) is repeats  # type: ignore[union-attr]
        restored.close()


def test_counting_state_cannot_be_deleted_or_lowered(store: OneStore) -> None:
    store.ask(ask(1), "")
    with sqlite3.connect(store.path) as connection:
        for statement in ("SET token = 0", "SET token = 'x'", "SET realm = 'other'"):
            with pytest.raises(sqlite3.IntegrityError):
                connection.execute(f"UPDATE namespace {statement}")
        replace = "REPLACE INTO namespace SELECT id, name, realm, 0, 0 FROM namespace"
        for statement in ("DELETE FROM namespace", replace):
            with pytest.raises(sqlite3.IntegrityError):
                connection.execute(statement)
    connection.close()


def test_a_disk_error_is_unknown(store: OneStore) -> None:
    """An I/O error at COMMIT may or may not have reached the disk."""
    from fenced.stores.sqlite.failures import translate

    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    assert isinstance(translate(error, store.path), Indeterminate)


def test_a_time_namespace_does_not_shift_the_clock(tmp_path: Path) -> None:
    """A container with a clock of its own sees the same leases expire at the same time."""
    client = fenced.Client(f"sqlite:///{tmp_path}/leases.db")
    client.acquire("held", ttl=60)
    script = "import fenced, sys; c = fenced.Client('sqlite:///' + sys.argv[1]); print(c.try_hold('held').__enter__())"
    flags = ["unshare", "--time", "--boottime", "86400"]
    if os.geteuid() != 0:
        flags.insert(1, "-r")
    result = subprocess.run(
        [*flags, sys.executable, "-c", script, tmp_path / "leases.db"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == "None\n", result.stderr


def test_a_long_path_does_not_matter_to_the_sockets(tmp_path: Path) -> None:
    """Path sockets have 108 bytes; the folder is reached through a descriptor."""
    folder = tmp_path / ("x" * 120) / ("y" * 120)
    folder.mkdir(parents=True)
    one, two = (fenced.Client(f"sqlite:///{folder}/leases.db") for _ in range(2))
    lease = one.acquire("a")
    got: list[fenced.Lease] = []
    waiter = threading.Thread(target=lambda: got.append(two.acquire("a")))
    waiter.start()
    while not step(one._authority.observe("a")).waiters:
        time.sleep(0.01)
    lease.release()
    waiter.join(90)
    assert got
    assert [path.name for path in folder.iterdir() if path.name.endswith("-wake")] == ["leases.db-wake"]
    one.close()
    two.close()
    assert list((folder / "leases.db-wake").iterdir()) == []


def test_only_a_client_that_waits_binds_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "leases.db"
    with fenced.Client(f"sqlite:///{path}") as one, fenced.Client(f"sqlite:///{path}") as two:
        with one.hold("a"), one.hold("b", wait=5), pytest.raises(fenced.NotGranted):
            two.acquire("a", wait=0)
        assert not path.with_name("leases.db-wake").exists(), "nobody has waited"
        with one.hold("a"), pytest.raises(fenced.NotGranted):
            two.acquire("a", wait=0.05)
        assert path.with_name("leases.db-wake").exists()


def test_a_client_that_cannot_listen_leaves_the_queue(tmp_path: Path) -> None:
    """The attempt is queued before its client binds a socket. If it cannot, its caller takes it for never sent."""
    runtime, path = BlockingRuntime(), tmp_path / "leases.db"
    authority = SqliteAuthority(path, runtime)
    step(authority.open())
    step(granted(authority, asking(runtime, "a")))
    path.with_name("leases.db-wake").write_text("in the way")
    with pytest.raises(Unavailable, match="cannot listen"):
        step(authority.ask(asking(runtime, "a", wait=True)))
    assert step(authority.observe("a")).waiters == ()
    step(authority.close())
