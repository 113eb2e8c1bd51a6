"""Sessions with MLX models: threads under load, event loops, the end of the interpreter."""

import asyncio
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from tests.session.models import ALGORITHM, QUICK, Events, no_threads_left, together

import gradientmail as gm
from gradientmail import events


class Net(nn.Module):
    """A small network."""

    def __init__(self, seed: int, width: int = 8, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__()
        mx.random.seed(seed)
        self.layers = [nn.Linear(4, width), nn.Linear(width, 3)]
        self.set_dtype(dtype)

    def __call__(self, x: mx.array) -> mx.array:
        return self.layers[1](mx.tanh(self.layers[0](x)))


def contents(model: nn.Module) -> dict[str, Any]:
    """The parameters now, copied, as float32."""
    flat: Any = tree_flatten(model.parameters())
    return {name: np.array(array.astype(mx.float32)) for name, array in flat}


def equal(left: nn.Module, right: nn.Module) -> bool:
    a, b = contents(left), contents(right)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def trainer(model: Net, seed: int) -> Callable[[], None]:
    """One optimizer step a call, on the calling thread."""
    optimizer = optimizers.Adam(learning_rate=0.01)
    keys = iter(range(1000 * seed, 1000 * seed + 10**6))

    def loss(x: mx.array) -> mx.array:
        return (model(x) - x.sum(1, keepdims=True)).astype(mx.float32).square().mean()

    gradients = nn.value_and_grad(model, loss)

    def step() -> None:
        number = next(keys)
        x = mx.random.normal((6, 4), key=mx.random.key(number)).astype(model.layers[0].bias.dtype)
        optimizer.update(model, gradients(x)[1])
        if number % 3 == 1:  # as those do who overlap steps; else left to whoever looks
            mx.async_eval(model.parameters(), optimizer.state)
        elif number % 3 == 2:
            mx.eval(model.parameters(), optimizer.state)

    return step


@pytest.mark.parametrize(
    "seconds", [2.0, pytest.param(6.0, marks=pytest.mark.soak)], ids=["short", "longer"]
)
def test_training_and_exchange_on_their_threads_under_load(seconds: float) -> None:
    """Two nodes with three threads each, and one more that does what MLX does best beside them.

    Rounds come as quickly as they can, so that snapshots, alignments and steps meet in every order.
    """
    box, ends, seen = gm.MemoryMailbox(), time.monotonic() + seconds, Events()
    models = [Net(seed, width=300, dtype=mx.bfloat16) for seed in range(2)]
    for model in models:
        mx.eval(model.parameters())  # they are trained on other threads
    algorithm = gm.DiLoCo(
        sync_every=4, fragments=3, in_flight=3, mixing=0.25, delta_dtype="F4", commit_dtype="BF16"
    )

    def node(number: int) -> None:
        step = trainer(models[number], number)
        with gm.Session(
            models[number],
            algorithm=algorithm,
            mailbox=box,
            learner_id=f"n{number}",
            callbacks=[seen],
            poll_interval=0.002,
            lease_every=0.5,
            lease_timeout=30.0,
        ) as session:
            while time.monotonic() < ends or session.rounds_seen < 4:
                step()
                session.step(samples=6)
        mx.eval(models[number].parameters())

    def neighbour() -> None:
        x = mx.random.normal((64, 64))
        while time.monotonic() < ends:
            x = mx.tanh(x @ x)
            mx.eval(x)

    with no_threads_left():
        together(lambda: node(0), lambda: node(1), neighbour)
    for kind in (events.TaskFailed, events.ParametersNotFinite, events.GaveUp):
        assert seen.of(kind) == []
    fresh = Net(9, width=300, dtype=mx.bfloat16)
    newest = gm.align(fresh, mailbox=box)
    assert newest == max(event.round for event in seen.of(events.RoundCommitted)) > 3
    assert any(equal(model, fresh) for model in models)


def test_a_session_in_a_running_event_loop() -> None:
    """A notebook's cell: the loop runs on the thread that trains."""

    async def cell() -> tuple[int, bool]:
        model, fresh, box = Net(1), Net(2), gm.MemoryMailbox()
        step = trainer(model, 1)
        with gm.Session(model, algorithm=ALGORITHM, mailbox=box, **QUICK) as session:
            while session.rounds_seen < 5:
                step()
                session.step(samples=6)
                await asyncio.sleep(0)
        return gm.align(fresh, mailbox=box), equal(model, fresh)

    with no_threads_left():
        newest, same = asyncio.run(cell())
    assert newest >= 5
    assert same


def test_a_session_made_on_one_thread_and_stepped_on_another() -> None:
    model, fresh, box = Net(1), Net(2), gm.MemoryMailbox()
    with gm.Session(model, algorithm=ALGORITHM, mailbox=box, **QUICK) as session:

        def work() -> None:
            step = trainer(model, 1)
            while session.rounds_seen < 5:
                step()
                session.step(samples=6)
            mx.eval(model.parameters())

        together(work)
    assert gm.align(fresh, mailbox=box) >= 5
    assert equal(model, fresh)


def test_parameters_that_become_nan_are_put_back_and_training_goes_on() -> None:
    model, box, seen = Net(1), gm.MemoryMailbox(), Events()
    step = trainer(model, 1)
    with gm.Session(model, algorithm=ALGORITHM, mailbox=box, callbacks=[seen], **QUICK) as session:
        number = handled = 0
        while session.rounds_seen < 8 or not handled:
            step()
            if number >= 5 and not handled:  # a commit may come first, and heal what it replaces
                model.layers[0].weight[1, 2] = math.nan
                model.layers[1].bias[0] = math.inf
            session.step(samples=6)
            number += 1
            if len(seen.of(events.ParametersNotFinite)) > handled:
                handled += 1
                step = trainer(model, 2)  # what the event says: optimizer state may need a reset
    tensors = seen.of(events.ParametersNotFinite)[0].tensors
    assert {"layers.0.weight", "layers.1.bias"} <= set(tensors)
    assert all(np.isfinite(array).all() for array in contents(model).values())


def run_script(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c", code, str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


UNCLOSED = """
import sys
import mlx.core as mx, mlx.nn as nn
import gradientmail as gm
import gradientmail.session
gradientmail.session.ABANDON_SECONDS = 60.0  # the machine may be busy
model = nn.Linear(1500, 1500)
session = gm.Session(
    model, algorithm=gm.DiLoCo(2, 2), mailbox=gm.FilesystemMailbox(sys.argv[1]),
    poll_interval=0.005, learner_id="left",
)
for step in range(6):
    model.weight = model.weight * 0.99
    session.step(samples=1)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("raise SystemExit(3)", 3), ("lazy = model.weight @ model.weight", 0)],
    ids=["end", "exit", "lazy"],
)
def test_the_interpreter_ends_while_a_session_exchanges(
    tmp_path: Path, end: str, code: int
) -> None:
    """Nobody closed it: it ends quickly, says no more than that, and takes its lease along."""
    done = run_script(UNCLOSED + end, tmp_path)
    said = f"{events.NeverClosed(learner='left')}\n"
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)
    assert list(tmp_path.glob("leases/left/*")) == []


def test_no_thread_is_left_behind_by_one_session_after_another() -> None:
    """MLX would keep a worker for each thread that has computed."""

    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    def session() -> None:
        model = Net(1)
        step = trainer(model, 1)
        with gm.Session(model, algorithm=ALGORITHM, mailbox=gm.MemoryMailbox(), **QUICK) as node:
            while node.rounds_seen < 3:
                step()
                node.step(samples=6)

    if not Path("/proc/self/task").exists():
        pytest.skip("counts threads in /proc")
    session()
    settle()
    before = count()
    for _ in range(4):
        session()
    ends = time.monotonic() + 90.0
    while count() > before:  # what has ended for Python, the system may still show for a moment
        assert time.monotonic() < ends, f"{count()} threads, {before} before"
        time.sleep(0.02)


def settle() -> None:
    """Wait for the threads of sessions to end."""
    for thread in threading.enumerate():
        if thread.name.startswith("gradientmail-"):
            thread.join(60)
