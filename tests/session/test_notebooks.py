"""Cells that are run again, interrupted, or copied: a session goes on, or is clearly closed."""

import asyncio
import copy
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
import torch
from tests.session.models import (
    ALGORITHM,
    QUICK,
    Events,
    equal,
    net,
    no_threads_left,
    train_until,
)

import gradientmail as gm
from gradientmail import events
from gradientmail.mailbox.wrapped import Call, WrappedMailbox

PACKAGE = str(Path(gm.__file__).parent)


def session(box: gm.Mailbox, model: torch.nn.Module, **changes: Any) -> gm.Session:
    """A session that is quick and silent; ``changes`` to its arguments."""
    given: dict[str, Any] = {"algorithm": ALGORITHM, "callbacks": [], **QUICK, **changes}
    return gm.Session(model, mailbox=box, **given)


def train(joined: gm.Session, model: torch.nn.Module, rounds: int = 2) -> None:
    """Train until so many more rounds were seen."""
    train_until(joined, model, joined.rounds_seen + rounds)


# A cell that is run again


def test_a_new_session_on_the_model_closes_the_old_one() -> None:
    box, model, heard = gm.MemoryMailbox(), net(), Events()
    with no_threads_left():
        first = session(box, model, learner_id="a", callbacks=[heard])
        train(first, model)
        with session(box, torch.nn.DataParallel(model), learner_id="b") as second:
            assert [one.clean for one in heard.of(events.Closed)] == [False]
            with pytest.raises(gm.SessionClosed, match="another Session was made with its model"):
                first.step(samples=1)
            assert {key.split("/")[1] for key in asyncio.run(box.list("leases/"))} == {"b"}
            train(second, model)
            first.close()


def test_a_step_that_copies_while_another_thread_takes_the_model_over_ends_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it still needs is not let go under its hands."""
    box, model, later = gm.MemoryMailbox(), net(), list[gm.Session]()
    first = session(box, model, learner_id="a")
    capture = first._parameters.capture

    def capturing(arrays: Any) -> Callable[[], None]:
        if not later:
            taking = threading.Thread(
                target=lambda: later.append(session(box, model, learner_id="b"))
            )
            taking.start()
            taking.join(60)
        return capture(arrays)

    monkeypatch.setattr(first._parameters, "capture", capturing)
    while not later:
        first.step(samples=1)
    with pytest.raises(gm.SessionClosed, match="another Session was made with its model"):
        first.step(samples=1)
    assert (first.rounds_seen, len(later)) == (-1, 1)
    later[0].close()


def test_a_step_that_waits_in_another_thread_ends() -> None:
    box, model = gm.MemoryMailbox(), net()
    algorithm = gm.DiLoCo(sync_every=2, fragments=1, in_flight=1, overlap_steps=0, quorum_size=2)
    other = session(box, net(1), algorithm=algorithm, learner_id="never-steps")
    first = session(box, model, algorithm=algorithm, learner_id="a")
    told: list[str] = []

    def wait() -> None:
        try:
            for _ in range(3):
                first.step(samples=1)
        except gm.SessionClosed as error:
            told.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not any("/a." in key for key in asyncio.run(box.list("snapshots/"))):
        time.sleep(0.01)
    second = session(box, model, algorithm=algorithm, learner_id="b")
    waiting.join(90)
    assert "another Session was made" in told[0]
    for one in (other, second):
        with pytest.raises(KeyboardInterrupt), one:
            raise KeyboardInterrupt


class Counting(WrappedMailbox):
    """Counts the calls of one node."""

    calls = 0

    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        self.calls += 1
        return await act()


def test_another_model_under_the_same_id_replaces_the_old_session_at_once() -> None:
    """Not only at its next beat, and then it asks the store for nothing more."""
    inner, heard = gm.MemoryMailbox(), Events()
    box, model = Counting(inner), net()
    slow: dict[str, Any] = {"lease_every": 600.0, "lease_timeout": 1200.0, "learner_id": "a"}
    first = session(box, model, callbacks=[heard], **slow)
    elsewhere = session(gm.MemoryMailbox(), net(2), **slow)
    train(first, model, 1)
    with session(inner, net(1), **slow):
        with pytest.raises(gm.LearnerReplaced, match="'a'"):
            train(first, model, 10**6)
        assert len(heard.of(events.LeaseLost)) == 1
        ends = time.monotonic() + 90
        while not all(task.done() for task in first._node._tasks):  # a commit may be under way
            assert time.monotonic() < ends, "it does not leave its work"
            time.sleep(0.01)
        before = box.calls
        time.sleep(0.3)
        assert box.calls == before
        with pytest.raises(gm.LearnerReplaced):
            first.close()
    elsewhere.step(samples=1)  # the same id in another run is its own
    elsewhere.close()


def test_a_session_that_could_not_join_is_forgotten() -> None:
    box, model = gm.MemoryMailbox(), net()
    session(box, net()).close()
    with pytest.raises(gm.RunConfigMismatch):
        session(box, model, algorithm=gm.DiLoCo(8, 2))
    assert gm.align(model, mailbox=box) == -1


def test_a_model_in_a_session_is_not_aligned_by_hand() -> None:
    """The learner would take it for its own progress, and publish it once more."""
    box, model = gm.MemoryMailbox(), net()
    with session(box, model):
        with pytest.raises(RuntimeError, match="copy"):
            gm.align(model, mailbox=box)
        assert gm.align(copy.deepcopy(model), mailbox=box) == -1
    gm.align(model, mailbox=box)


# Copies


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_session_is_not_copied_and_the_error_says_what_to_do(how: Callable[[Any], Any]) -> None:
    model = net()
    with session(gm.MemoryMailbox(), model) as joined:
        with pytest.raises(TypeError, match=r"Copy the model.*another learner_id"):
            how(joined)
        with pytest.raises(TypeError, match="Session cannot be copied"):
            how([model, {"session": joined}]) if how is not copy.copy else how(joined)
        copied = copy.deepcopy(model)  # the model itself can be
        assert equal(copied, model)
        train(joined, model)


# Interrupts


class Interrupts:
    """Raises ``KeyboardInterrupt`` at one line, of all that a call runs in the package."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> Self:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("overlap_steps", [0, None])
def test_ctrl_c_at_every_line_of_step_leaves_a_session_that_trains_on(
    overlap_steps: int | None,
) -> None:
    """Nothing published is lost, and nothing is waited for that never comes."""
    model, heard = net(), Events()
    algorithm = gm.DiLoCo(sync_every=2, fragments=1, in_flight=1, overlap_steps=overlap_steps)
    box = gm.MemoryMailbox()
    joined = session(box, model, algorithm=algorithm, callbacks=[heard], poll_interval=0.005)
    at, interrupted, ends = 1, 0, time.monotonic() + 90
    misses = 0
    while misses < 20 and time.monotonic() < ends:
        try:
            with Interrupts(at):
                joined.step(samples=1)
        except KeyboardInterrupt:
            interrupted, misses = interrupted + 1, 0
            at += 1
        else:
            misses += 1  # this step was shorter: nothing was due, perhaps
        if misses in (0, 10):
            seen, until = joined.rounds_seen, time.monotonic() + 60
            while joined.rounds_seen < seen + 1:
                assert time.monotonic() < until, f"stands still after an interrupt at line {at}"
                joined.step(samples=1)
                time.sleep(0.0005)
    joined.close()
    assert interrupted > 50
    assert heard.of(events.GaveUp) == []
    published = Counter(event.round for event in heard.of(events.SnapshotPublished))
    assert set(published.values()) == {1}
    assert joined.rounds_seen == max(published)


def test_ctrl_c_in_the_loop_and_the_loop_run_again() -> None:
    model = net()
    joined = session(gm.MemoryMailbox(), model)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            interrupted_cell(joined, model)
    train(joined, model)
    joined.close()
    with pytest.raises(gm.SessionClosed, match="new Session"):
        joined.step(samples=1)


def interrupted_cell(joined: gm.Session, model: torch.nn.Module) -> None:
    train(joined, model, 1)
    raise KeyboardInterrupt


def test_cells_inside_a_running_loop_across_awaits() -> None:
    """Each cell is a task of the notebook's loop; the session lives between them."""

    async def notebook() -> int:
        model, box = net(), gm.MemoryMailbox()
        joined = session(box, model)
        for _ in range(3):
            await asyncio.sleep(0)
            train(joined, model, 1)
        joined.close()
        return gm.align(net(1), mailbox=box)

    assert asyncio.run(notebook()) >= 2
