"""What the training thread does: with nothing due it counts, and it waits for no copy."""

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.node.bench import Bench
from tests.session.models import QUICK, net

import gradientmail as gm
from gradientmail.backend.base import Parameters


def calls_of(step: Callable[[], object], times: int) -> dict[str, int]:
    """The functions that this thread calls in so many steps, and how often; C's among them."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(argument, "__name__", "")] += 1

    def run() -> None:
        for _ in range(times):
            step()

    before = sys.getprofile()
    gc.disable()  # what it takes apart here may have functions
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    for own in (run.__qualname__, step.__qualname__, "setprofile"):
        calls.pop(own, None)
    calls.pop("type", None)  # which Python calls and which it looks up differs by its version
    print(dict(calls))
    return dict(calls)


def just_counts(bench: Bench, steps: int) -> bool:
    """Whether so many steps call nothing but the clock, and count."""
    expected, woken = bench.learner.local_step + steps, bench.woken
    bench.learner._now = time.perf_counter
    calls = calls_of(lambda: bench.learner.step(4), steps)
    assert bench.learner.local_step == expected
    assert bench.woken == woken
    return calls == {"Learner.step": steps, "perf_counter": steps}


def test_a_step_with_nothing_due_does_no_more_than_count() -> None:
    """Before a round is due, while commits are awaited, and after one has come."""
    bench = Bench(gm.DiLoCo(sync_every=200, fragments=2, in_flight=2))
    bench.steps(2)  # when the time of a step is known, the loop is told what is next
    assert just_counts(bench, 97)
    bench.steps(1)
    assert [row[:2] for row in bench.sent()] == [(0, 100)]
    assert just_counts(bench, 99)
    bench.steps(1)
    assert [row[:2] for row in bench.sent()] == [(1, 200)]
    assert just_counts(bench, 500)  # no more may be in flight
    bench.arrive(0, 1.0, {"me": (100, 400)})
    bench.steps(2)  # of its fragment's new parameters one has to be trained
    assert [row[:2] for row in bench.sent()] == [(2, 702)]
    assert just_counts(bench, 500)


def test_a_step_that_may_yet_wait_does_no_more_than_count() -> None:
    bench = Bench(gm.DiLoCo(sync_every=100, fragments=1, in_flight=1, overlap_steps=50))
    bench.steps(100)
    assert [row[:2] for row in bench.sent()] == [(0, 100)]
    assert just_counts(bench, 49)
    bench.arrive(0, 1.0, {"me": (100, 400)})
    bench.steps(1)
    assert just_counts(bench, 49)


def test_a_sessions_step_with_nothing_due_does_no_more_than_count() -> None:
    """Once the loop has told that nobody else is there."""
    algorithm = gm.DiLoCo(sync_every=2_000_000, fragments=2)
    mailbox = gm.MemoryMailbox()
    with gm.Session(net(), algorithm=algorithm, mailbox=mailbox, callbacks=(), **QUICK) as session:
        for _ in range(9000):
            session.step(samples=1)
            if session._handoff.others == (0, 0):
                break
            time.sleep(0.01)
        assert session._handoff.others == (0, 0)
        session._thread.call(_nothing())  # it has raised the flag by now
        session.step(samples=1)
        calls = calls_of(lambda: session.step(samples=1), 1000)
    assert calls == {"Session.step": 1000, "Learner.step": 1000, "perf_counter": 1000}


class Threads:
    """Notes on which threads the copies of a model's parameters are waited for, and brought."""

    def __init__(self, parameters: Parameters, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parameters = parameters
        self.waited: list[int] = []
        self.staged: list[int] = []
        self.brought: list[Mapping[str, Any]] = []
        self.applied: list[Mapping[str, Any]] = []
        self._capture, self._stage = parameters.capture, parameters.stage
        self._apply = parameters.apply
        for name in ("capture", "stage", "apply"):
            monkeypatch.setattr(parameters, name, getattr(self, name))

    def capture(self, arrays: Mapping[str, Any]) -> Callable[[], None]:
        """As on a device, where the copy takes longer than this."""
        ready = self._capture(arrays)

        def wait() -> None:
            self.waited.append(threading.get_ident())
            ready()

        return wait

    def stage(self, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """As on a device, where this copies."""
        self.staged.append(threading.get_ident())
        self.brought.append(dict(self._stage(arrays)))
        return self.brought[-1]

    def apply(self, staged: Mapping[str, Any], *, mixing: float = 0.0) -> None:
        """As everywhere."""
        self.applied.append(staged)
        self._apply(staged, mixing=mixing)


def test_the_training_thread_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device ``step`` neither waits for a snapshot's copy nor copies what a commit brings.

    The event loop does not, either.
    """
    model = {name: np.ones(9, np.float32) for name in "ab"}
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, in_flight=2, overlap_steps=1)
    mailbox = gm.MemoryMailbox()
    with gm.Session(model, algorithm=algorithm, mailbox=mailbox, callbacks=(), **QUICK) as session:
        with monkeypatch.context() as patched:  # joining and leaving may do both
            threads = Threads(session._parameters, patched)
            while session.rounds_seen < 6:
                for array in model.values():
                    np.multiply(array, 0.99, out=array)
                session.step(samples=1)
        busy = {threading.get_ident(), session._thread._thread.ident}
        assert len(threads.waited) >= 7
        assert busy.isdisjoint(threads.waited)
        assert busy.isdisjoint(threads.staged)
        # What the model takes is what another thread has brought to it.
        brought = [id(one) for one in threads.brought]
        assert len(threads.applied) >= 2
        assert [one for one in threads.applied if id(one) not in brought] == []


async def _nothing() -> None:
    """Takes a turn of the loop."""
