"""Work beside the training that fails, for want of memory say: no snapshot may be made of ruins."""

import contextlib
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

import gradientmail as gm
from gradientmail import events
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.blanks import Blanks
from gradientmail.exchange import compression
from gradientmail.handoff import Blank, Handoff, Outgoing

ALGORITHM = gm.DiLoCo(
    sync_every=2, fragments=1, in_flight=1, overlap_steps=0, outer_lr=1.0, outer_momentum=0.0
)
ROUNDS = 3


def train(
    compression: Literal["off", "zstd"] = "off",
    *,
    algorithm: gm.DiLoCo = ALGORITHM,
    steps: int = 2 * ROUNDS,
    heard: list[events.Event] | None = None,
) -> tuple[int, list[float], list[str]]:
    """Two tensors that each step takes 1 off: rounds, the values at last, and what failed."""
    model = {name: np.full(70_000, 100.0, np.float32) for name in "ab"}
    seen: list[events.Event] = [] if heard is None else heard
    with gm.Session(
        model,
        algorithm=algorithm,
        mailbox=gm.MemoryMailbox(),
        poll_interval=0.02,
        compression=compression,
        callbacks=(seen.append,),
    ) as session:
        for _ in range(steps):
            for array in model.values():
                np.subtract(array, 1.0, out=array)
            with contextlib.suppress(KeyboardInterrupt):
                session.step(samples=1)
    failed = [event.task for event in seen if isinstance(event, events.TaskFailed)]
    values = sorted({float(value) for array in model.values() for value in array[:: 10**4]})
    return session.rounds_seen + 1, values, failed


def failing_once(call: Callable[..., Any], turn: int) -> Callable[..., Any]:
    """``call``, but for one ``turn`` of it."""
    turns = iter(range(turn + 1))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(turns, None) == turn:
            raise MemoryError("no memory for a moment")
        return call(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_a_delta_that_cannot_be_compressed_at_once_is_not_made_again(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of each round the delta, theta and the outer state are compressed; θ⁰ once before.
    failing = failing_once(compression.compress, 1 + 3 * turn)
    monkeypatch.setattr(compression, "compress", failing)
    assert train("zstd") == (ROUNDS, [100.0 - 2 * ROUNDS], ["publish"])


@pytest.mark.parametrize("turn", range(2 * ROUNDS))
def test_a_delta_that_fails_halfway_is_made_of_another_snapshot(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = failing_once(NumpyBackend.subtract_squares, turn)
    monkeypatch.setattr(NumpyBackend, "subtract_squares", failing)
    # The round is published a step later, of three steps, and the last one while leaving.
    expected = (2, [95.0]) if turn < 2 * (ROUNDS - 1) else (3, [94.0])
    assert train() == (*expected, ["publish"])


@pytest.mark.parametrize("turn", range(2 * ROUNDS))
def test_a_delta_that_fails_while_a_session_leaves_is_in_its_last_rounds(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``flush_on_close`` no step is lost, whichever of the deltas it is."""
    failing = failing_once(NumpyBackend.subtract_squares, turn)
    monkeypatch.setattr(NumpyBackend, "subtract_squares", failing)
    _, values, failed = train(algorithm=replace(ALGORITHM, flush_on_close=True), steps=5)
    assert (values, failed) == ([95.0], ["publish"])


@pytest.mark.parametrize("turn", range(2 * ROUNDS))
def test_a_snapshot_that_is_posted_twice_is_not_made_of_ruins(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C right after it was posted, and then its delta fails halfway."""
    post, interrupted = Handoff.post, list[int]()

    def posting(handoff: Handoff, outgoing: Outgoing) -> None:
        post(handoff, outgoing)
        in_step = any(frame.function == "_act" for frame in inspect.stack())
        if in_step and outgoing.round not in interrupted:
            interrupted.append(outgoing.round)
            raise KeyboardInterrupt

    failing = failing_once(NumpyBackend.subtract_squares, turn)
    monkeypatch.setattr(NumpyBackend, "subtract_squares", failing)
    monkeypatch.setattr(Handoff, "post", posting)
    algorithm, heard = replace(ALGORITHM, flush_on_close=True), list[events.Event]()
    _, values, failed = train(algorithm=algorithm, steps=7, heard=heard)
    # Ctrl-C ended the waiting: a step after the snapshot goes when its commit comes.
    replaced = sum(event.steps_replaced for event in heard if isinstance(event, events.Aligned))
    assert (values, failed) == ([93.0 + replaced], ["publish"])
    assert len(interrupted) >= 2


@pytest.mark.parametrize("turn", range(3))
def test_memory_for_the_next_snapshot_that_is_short_ends_no_node(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, failing = Blanks.make, failing_once(Blanks.make, turn)

    def beside(blanks: Blanks, fragment: int) -> Blank:
        is_loop = threading.current_thread() is not threading.main_thread()
        return (failing if is_loop else make)(blanks, fragment)

    monkeypatch.setattr(Blanks, "make", beside)
    rounds, values, failed = train()
    assert (rounds, values) == (ROUNDS, [100.0 - 2 * ROUNDS])
    assert failed in (["publish"], ["fetch"])
