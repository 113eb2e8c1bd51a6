"""``state_dict`` and ``load_state_dict``: who comes back stands where a paused node would."""

import asyncio
import copy
import io
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.session.models import QUICK, Events, equal, net, parameters, together, train_step

import gradientmail as gm
from gradientmail import events


class Stop(Exception):
    """The process ends, and nothing is published or waited for."""


SLOW = gm.DiLoCo(sync_every=20, fragments=2, in_flight=2)
"""Rounds at steps 10, 20, 30, …."""


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def loaded(state: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def records(box: gm.Mailbox, kind: str) -> list[dict[str, Any]]:
    """The records under a prefix."""
    keys = asyncio.run(box.list(kind))
    found = [asyncio.run(box.get(key)) for key in keys]
    return [json.loads(bytes(data)) for data in found if data is not None]  # not swept meanwhile


def train(
    session: gm.Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> None:
    for step in steps:
        train_step(model, optimizer, step)
        session.step(samples=6)


def until(reached: Callable[[], object]) -> None:
    for _ in range(9000):
        if reached():
            return
        time.sleep(0.01)
    raise AssertionError("it does not happen")


class Keeper(gm.MemoryMailbox):
    """A store that never deletes, so that a test can look at snapshots."""

    async def delete(self, keys: Any, /) -> None:
        """Only leases go."""
        await super().delete([key for key in keys if key.startswith("leases/")])


class Late(Keeper):
    """A store that no commit reaches before it is told to let them through."""

    def __init__(self) -> None:
        super().__init__()
        self.commits = threading.Event()

    async def put_if_absent(self, key: str, data: Any, /) -> bool:
        """As the store's, in time."""
        if key.startswith("rounds/"):
            await asyncio.to_thread(self.commits.wait, 60.0)
        return await super().put_if_absent(key, data)


def life(
    box: gm.Mailbox,
    steps: range,
    state: dict[str, Any] | None = None,
    *,
    algorithm: gm.DiLoCo = SLOW,
    name: str = "a",
    clean: bool = False,
    leaving: Callable[[], object] | None = None,
    model_first: bool = True,
    rounds: int = 0,
    snapshots: int = 0,
) -> tuple[dict[str, Any], Events]:
    """One process: goes on from ``state``, trains, saves, and ends. Its checkpoint and events.

    It ends when there are so many ``snapshots`` and it has seen so many ``rounds``, for which it
    trains on. ``leaving`` is called when all is saved.
    """
    model, seen = net(0), Events()
    optimizer = sgd(model)
    saved: dict[str, Any] = {}

    def load_model() -> None:
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    if model_first:
        load_model()
    try:
        with gm.Session(
            model, algorithm=algorithm, mailbox=box, learner_id=name, callbacks=[seen], **QUICK
        ) as session:
            if not model_first:
                load_model()
            if state is not None:
                session.load_state_dict(state["session"])
            train(session, model, optimizer, steps)
            until(lambda: len(records(box, "snapshots/")) >= snapshots)
            for step in itertools.count(steps.stop):
                if session.rounds_seen + 1 >= rounds:
                    break
                train(session, model, optimizer, range(step, step + 1))
                time.sleep(0.002)
            saved = {
                "model": copy.deepcopy(model.state_dict()),
                "optimizer": copy.deepcopy(optimizer.state_dict()),
                "session": session.state_dict(),
            }
            if leaving is not None:
                leaving()
            if not clean:
                raise Stop
    except Stop:
        pass
    return loaded(saved), seen


@pytest.mark.parametrize("model_first", [True, False])
def test_a_node_that_comes_back_publishes_what_an_uninterrupted_one_does(
    model_first: bool,
) -> None:
    """No step is lost: the same delta, of the same steps, bit for bit."""
    whole, parts = Keeper(), Keeper()
    whole_end, _ = life(whole, range(10), snapshots=1)
    state, _ = life(parts, range(4))
    state, _ = life(parts, range(4, 7), state, model_first=model_first)
    state, seen = life(parts, range(7, 10), state, model_first=model_first, snapshots=1)
    (restored,) = seen.of(events.StateRestored)
    assert (restored.local_step, restored.kept, restored.moved) == (7, (0, 1), ())
    first, second = (records(box, "snapshots/")[0] for box in (whole, parts))
    assert first["local_step"] == 10
    for name in ("local_step", "steps", "tokens", "round", "base_version"):
        assert first[name] == second[name], name
    assert first["payload"]["sha256"] == second["payload"]["sha256"]
    for name, value in whole_end["model"].items():
        assert torch.equal(value, state["model"][name])
    assert whole_end["session"]["fragments"] == state["session"]["fragments"]


def test_a_state_is_plain() -> None:
    state, _ = life(gm.MemoryMailbox(), range(3))

    def check(value: object) -> None:
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert type(value) in (int, float, str, torch.Tensor)

    check(state["session"])
    held = sum(t.untyped_storage().nbytes() for t in state["session"]["parameters"].values())
    assert held == sum(p.numel() * 4 for p in net().parameters())
    json.dumps({k: v for k, v in state["session"].items() if k != "parameters"})


@pytest.mark.parametrize("mixing", [0.0, 0.25])
def test_what_the_run_committed_meanwhile_is_aligned_with(mixing: float) -> None:
    """As a live learner does: Θ, or the mix, and the counters that mixing leaves."""
    box, algorithm = Keeper(), gm.DiLoCo(sync_every=20, fragments=2, in_flight=2, mixing=mixing)
    state, _ = life(box, range(7), algorithm=algorithm)
    # Another node commits round 0 alone.
    other = net(1)
    try:
        with gm.Session(
            other, algorithm=algorithm, mailbox=box, learner_id="b", **QUICK
        ) as session:
            train(session, other, sgd(other), range(100, 110))
            until(lambda: records(box, "rounds/"))
            raise Stop
    except Stop:
        pass
    (record,) = records(box, "rounds/")
    plan = json.loads(bytes(asyncio.run(box.get("manifest.json")) or b""))["plan"]
    newest, seen, model = net(5), Events(), net(0)
    assert gm.align(newest, mailbox=box) == record["round"] == 0
    model.load_state_dict(state["model"])
    try:
        with gm.Session(
            model, algorithm=algorithm, mailbox=box, learner_id="a", callbacks=[seen], **QUICK
        ) as session:
            session.load_state_dict(state["session"])
            found, committed = parameters(model), parameters(newest)
            for name in plan[0]:
                expected = mixing * state["model"][name] + (1 - mixing) * committed[name]
                torch.testing.assert_close(found[name], expected)
            for name in plan[1]:
                assert torch.equal(found[name], state["model"][name])
            rows = session.state_dict()["fragments"]
            assert [row["version"] for row in rows] == [1, 0]
            assert [row["steps"] for row in rows] == [int(mixing * 7), 7]
            assert [row["tokens"] for row in rows] == [int(mixing * 42), 42]
            until(lambda: seen.of(events.StateRestored))
            raise Stop
    except Stop:
        pass
    (restored,) = seen.of(events.StateRestored)
    assert (restored.kept, restored.moved, restored.steps_replaced) == ((1,), (0,), 7)


def test_a_clean_exit_and_a_return_lose_no_step_of_fragments_that_were_not_in_flight() -> None:
    box = Late()
    # Round 0 is published at 10 and commits while the session is closed.
    state, _ = life(box, range(13), clean=True, leaving=box.commits.set)
    assert [record["round"] for record in records(box, "rounds/")] == [0]
    state, seen = life(box, range(13, 20), state, snapshots=2)
    (restored,) = seen.of(events.StateRestored)
    assert (restored.kept, restored.moved) == ((1,), (0,))
    assert restored.steps_replaced == 3  # of 13, the commit has 10
    snapshot = records(box, "snapshots/")[-1]
    # Round 1 is due a gap after round 0 was published, with all the steps of its fragment.
    assert (snapshot["round"], snapshot["local_step"], snapshot["steps"]) == (1, 20, 20)


class Mute(gm.MemoryMailbox):
    """A store that takes no snapshot: the process dies before one has left."""

    mute = True

    async def put_if_absent(self, key: str, data: Any, /) -> bool:
        """As the store's, but for snapshots."""
        if self.mute and "snapshots/" in key:
            raise gm.MailboxUnavailable("away")
        return await super().put_if_absent(key, data)


def test_a_snapshot_that_never_left_is_published_again() -> None:
    """Else the node would wait for ever for the commit of a round that nobody contributes to."""
    box = Mute()
    algorithm = gm.DiLoCo(sync_every=10, fragments=1, in_flight=1)
    state, _ = life(box, range(12), algorithm=algorithm)
    assert state["session"]["in_flight"] == [0]
    box.mute = False
    _, seen = life(box, range(12, 40), state, algorithm=algorithm, clean=True)
    assert next(e.round for e in seen.of(events.SnapshotPublished)) == 0
    assert seen.of(events.Closed)[0].rounds_seen >= 0


def test_under_another_name_what_was_in_flight_is_left_to_the_old_one() -> None:
    box = Mute()
    state, _ = life(box, range(12))
    assert state["session"]["in_flight"] == [0]
    _, seen = life(box, range(12, 13), state, name="b")
    (restored,) = seen.of(events.StateRestored)
    assert (restored.kept, restored.moved) == ((1,), (0,))


def test_bf16_and_numpy_models_keep_their_state_too() -> None:
    box = gm.MemoryMailbox()
    model = net(0, torch.bfloat16)
    with gm.Session(model, algorithm=SLOW, mailbox=box, learner_id="a", **QUICK) as session:
        train(session, model, sgd(model), range(3))
        state = loaded(session.state_dict())
        assert {t.dtype for t in state["parameters"].values()} == {torch.bfloat16}
    again = net(1, torch.bfloat16)
    with gm.Session(again, algorithm=SLOW, mailbox=box, learner_id="a", **QUICK) as session:
        session.load_state_dict(state)
        assert all(torch.equal(state["parameters"][n], p) for n, p in parameters(again).items())
    box = gm.MemoryMailbox()
    arrays = {"w": np.ones((3, 2), np.float32), "b": np.zeros(4, np.float32)}
    with gm.Session(arrays, algorithm=SLOW, mailbox=box, learner_id="a", **QUICK) as session:
        arrays["w"] += 2
        session.step(samples=1)
        kept = session.state_dict()
        arrays["w"] += 2
    assert (kept["parameters"]["w"] == 3).all()
    with gm.Session(arrays, algorithm=SLOW, mailbox=box, learner_id="a", **QUICK) as session:
        session.load_state_dict(kept)
        assert (arrays["w"] == 3).all()


def broken(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(state), **changes}


def test_what_is_no_state_of_this_run_is_refused_and_changes_nothing() -> None:
    box, model = gm.MemoryMailbox(), net(0)
    with gm.Session(model, algorithm=SLOW, mailbox=box, learner_id="a", **QUICK) as session:
        train(session, model, sgd(model), range(3))
        state = session.state_dict()
    rows: list[dict[str, Any]] = state["fragments"]
    shape = {**state["parameters"], "0.bias": torch.zeros(9)}
    dtype = {n: t.double() for n, t in state["parameters"].items()}
    others = {n: t.numpy() for n, t in state["parameters"].items()}
    words = {**state["parameters"], "0.bias": "x"}
    more = {**state["parameters"], "module.0.bias": torch.zeros(1), 7: torch.zeros(1)}
    less = {n: t for n, t in state["parameters"].items() if n != "0.bias"}
    cases: list[tuple[Any, type[Exception], str]] = [
        (None, TypeError, "state_dict"),
        ([], TypeError, "state_dict"),
        ({}, ValueError, "format"),
        (broken(state, format=2), ValueError, "format 2"),
        (broken(state, local_step=-1), ValueError, "local_step"),
        (broken(state, local_step=True), ValueError, "local_step"),
        (broken(state, step_seconds=float("nan")), ValueError, "step_seconds"),
        (broken(state, run="0" * 64), ValueError, "another run"),
        (broken(state, fragments=rows[:1]), ValueError, "another run"),
        (broken(state, fragments=[{**row, "anchor": "0" * 64} for row in rows]), ValueError, "run"),
        (broken(state, fragments=[{**row, "version": 9} for row in rows]), ValueError, "set back"),
        (broken(state, fragments=[1, 2]), TypeError, "fragment 0"),
        (broken(state, parameters=shape), ValueError, "0.bias"),
        (broken(state, parameters=dtype), ValueError, "float64"),
        (broken(state, parameters=others), TypeError, "is a numpy.ndarray, and .* gave a torch"),
        (broken(state, parameters=words), TypeError, "'0.bias' is a builtins.str"),
        (broken(state, parameters=more), ValueError, "not have: 'module.0.bias', 7; pass"),
        (broken(state, parameters=less), ValueError, "in training: '0.bias'; pass"),
        (broken(state, in_flight=["x"]), ValueError, "in_flight"),
    ]
    with gm.Session(model, algorithm=SLOW, mailbox=box, learner_id="a", **QUICK) as session:
        before = parameters(model)
        for bad, kind, said in cases:
            with pytest.raises(kind, match=said):
                session.load_state_dict(bad)
            assert all(torch.equal(before[n], p) for n, p in parameters(model).items())
        session.load_state_dict(state)
        train(session, model, sgd(model), range(1))
        with pytest.raises(RuntimeError, match="before the first step"):
            session.load_state_dict(state)
    with pytest.raises(gm.SessionClosed, match="before its end"):
        session.state_dict()
    with pytest.raises(gm.SessionClosed, match="open one"):
        session.load_state_dict(state)


def test_two_nodes_stop_and_come_back_and_agree() -> None:
    box = gm.MemoryMailbox()
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=2)
    states: dict[str, dict[str, Any]] = {}

    def run(name: str, turn: int) -> None:
        steps = range(40 * turn, 40 * turn + 40)
        kept, _ = life(
            box,
            steps,
            states.get(name),
            algorithm=algorithm,
            name=name,
            clean=turn == 2,
            rounds=2 * turn + 2,
        )
        states[name] = kept

    for turn in range(3):
        together(lambda turn=turn: run("a", turn), lambda turn=turn: run("bb", turn))
    one, other = net(3), net(4)
    assert gm.align(one, mailbox=box) == gm.align(other, mailbox=box) >= 4
    assert equal(one, other)
    assert all(p.isfinite().all() for p in one.parameters())
