"""The wake-ups of the blocking runtime: a wait ends at its time, and a flag that is set lets everybody through."""

import random
import threading

from fenced.runtime.blocking import BlockingRuntime, Flag, step


def test_the_shortest_wait_ends() -> None:
    """Its time may be over before it begins: then `queue.SimpleQueue.get(timeout=...)` of Python 3.11 never returns."""
    runtime = BlockingRuntime()

    def wait() -> None:
        for _ in range(5000):
            step(runtime.wait(runtime.wakeup(), runtime.now() + random.random() * 2e-6))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()


def test_a_flag_lets_all_waiters_through() -> None:
    runtime, flag = BlockingRuntime(), Flag()
    for _ in range(3):
        threads = [threading.Thread(target=flag.wait, args=(120,), daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        flag.set()
        flag.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert step(runtime.wait(flag, runtime.now() + 60))
        flag.clear()
        assert not step(runtime.wait(flag, runtime.now() + 0.001))
