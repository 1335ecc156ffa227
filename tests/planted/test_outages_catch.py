"""The outage kit can fail: what a client must not do in an outage is caught on a real server."""

import pytest

from fenced.core.acquiring import LeaseEngine
from fenced.runtime.blocking import BlockingRuntime
from fenced.runtime.sockets import SocketStream
from fenced.stores.redis.authority.authority import RedisAuthority
from fenced.values.model import AskAnswer
from fenced_testkit import outages
from fenced_testkit.servers import RedisServer
from tests.outage_harness import own_server
from tests.planted import bugs
from tests.planted.test_kits_catch import is_caught
from tests.redis.test_outages import Harness

pytestmark = pytest.mark.xdist_group("redis")
server = own_server(RedisServer)

CHECKS = {check.name: check for check in outages.CHECKS}


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("a_failed_release_is_repeated", bugs.GivenUpIsForgotten),
        ("a_failed_withdrawal_is_repeated", bugs.GivenUpIsForgotten),
        ("a_silent_server_keeps_nobody_past_its_wait", bugs.WithdrawalIsWaitedFor),
    ],
)
def test_a_planted_bug_is_caught(
    name: str, bug: type[LeaseEngine], server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = CHECKS[name]
    monkeypatch.setattr("fenced.testing.kit.LeaseEngine", bug)
    monkeypatch.setattr(outages, "SOON", 2.0)  # what does not come in the end need not be waited for so long
    assert is_caught(check, lambda runtime: Harness(runtime, server))


def test_a_refusal_that_is_believed_after_a_doubt_is_caught(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ask whose first try was cut off and whose second was refused is not withdrawn: its first copy is a ghost."""

    async def believed(answer: AskAnswer, *_: object) -> AskAnswer:
        return answer

    monkeypatch.setattr("fenced.leases.pooled.made_final", believed)
    monkeypatch.setattr(outages, "SOON", 2.0)
    check = CHECKS["a_late_copy_of_a_refused_ask_is_granted_to_nobody"]
    assert is_caught(check, lambda runtime: Harness(runtime, server))


def test_a_call_without_a_deadline_is_caught(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's call that drops its caller's deadline takes as long as the default."""
    observe = RedisAuthority.observe
    monkeypatch.setattr(RedisAuthority, "observe", lambda self, name, until=None: observe(self, name))
    assert is_caught(CHECKS["every_call_ends_by_its_deadline"], lambda runtime: Harness(runtime, server))


def test_a_limit_for_each_read_is_caught(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte that comes starts the limit anew, and the call lasts as long as the server likes."""
    receive, dripped = SocketStream.receive, [0]

    async def each(line: SocketStream, until: float) -> bytes:
        got = await receive(line, BlockingRuntime().now() + 0.8 if dripped[0] < 10 else until)
        dripped[0] += len(got) == 1
        return got

    monkeypatch.setattr(SocketStream, "receive", each)
    assert is_caught(CHECKS["every_call_ends_by_its_deadline"], lambda runtime: Harness(runtime, server))
    assert dripped[0] >= 10, "and it was not the silence that caught it"
