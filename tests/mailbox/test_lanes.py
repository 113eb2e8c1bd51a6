"""The threads of a mailbox whose requests block."""

import threading
import time

import pytest

from gradientmail.mailbox import lanes
from gradientmail.mailbox.lanes import Lanes


def own_threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{name}-")]


def test_threads_without_a_call_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody closes a mailbox, and an evaluation may make one for each look."""
    monkeypatch.setattr(lanes, "IDLE_SECONDS", 0.05)
    pool, gate = Lanes(8, "ending"), threading.Barrier(7)
    calls = [pool.submit(gate.wait, 60, bulk=number % 3 > 0) for number in range(7)]
    assert sorted(call.result(60) for call in calls) == [*range(7)]
    assert len(own_threads("ending")) >= 7
    ends = time.monotonic() + 60
    while own_threads("ending") and time.monotonic() < ends:
        time.sleep(0.01)
    assert own_threads("ending") == []
    assert pool.submit(sum, (1, 2)).result(60) == 3
    assert len(own_threads("ending")) == 1


@pytest.mark.parametrize("bulk", [False, True])
def test_no_call_is_lost_to_a_thread_that_is_about_to_end(
    monkeypatch: pytest.MonkeyPatch, bulk: bool
) -> None:
    """Calls come just when the threads' patience ends."""
    monkeypatch.setattr(lanes, "IDLE_SECONDS", 0.002)
    pool = Lanes(2, "racing")
    for number in range(400):
        assert pool.submit(int, number, bulk=bulk).result(60) == number
        time.sleep(0.002 * (0.9 + number % 3 / 10))
