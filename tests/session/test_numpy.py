"""Sessions over dicts of NumPy arrays, and rounds closed with NumPy for models of PyTorch."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.session.models import QUICK, Events, no_threads_left, together

import gradientmail as gm
from gradientmail import events
from gradientmail.backend import Backend, NumpyBackend, TorchBackend
from gradientmail.backend.base import Combination

SHAPES = {"a.weight": (8, 4), "b.bias": (3,), "embed.weight": (5, 6), "scale": ()}
NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
PRECISIONS = [("float32", None, None), ("bfloat16", None, None), ("float32", "F4", "F4")]


def arrays(seed: int, dtype: str = "float32") -> dict[str, Any]:
    """A model, and a counter that is none of it."""
    draw = np.random.default_rng(seed)
    model = {n: np.array(draw.standard_normal(s)).astype(NUMPY[dtype]) for n, s in SHAPES.items()}
    return {**model, "step": np.arange(2)}


def module(seed: int, dtype: str = "float32") -> torch.nn.Module:
    """The same parameters in PyTorch."""
    model = torch.nn.Module()
    draw = torch.Generator().manual_seed(seed)
    for name, shape in SHAPES.items():
        *parts, own = name.split(".")
        inner = torch.nn.Module() if parts else model
        value = torch.randn(shape, generator=draw).to(getattr(torch, dtype))
        inner.register_parameter(own, torch.nn.Parameter(value))
        if parts:
            model.add_module(parts[0], inner)
    return model


def change(model: object, seed: int) -> None:
    """A step of training, the same numbers in both frameworks."""
    draw = np.random.default_rng(seed)
    for name, shape in SHAPES.items():
        noise = np.array(0.05 * draw.standard_normal(shape), np.float32)
        if isinstance(model, dict):
            model[name] += noise.astype(model[name].dtype)
        elif isinstance(model, torch.nn.Module):
            model.get_parameter(name).data.add_(torch.from_numpy(noise))


def contents(model: object) -> dict[str, bytes]:
    """The bytes of the parameters."""
    if isinstance(model, dict):
        return {name: model[name].tobytes() for name in SHAPES}
    assert isinstance(model, torch.nn.Module)
    found = {name: p.detach().reshape(-1).view(torch.uint8) for name, p in model.named_parameters()}
    return {name: x.numpy().tobytes() for name, x in found.items()}


class Merging(NumpyBackend):
    """Counts the outer steps that it is asked for."""

    def __init__(self) -> None:
        self.steps = 0

    def nesterov(self, delta: Combination, momentum: Any, master: Any, **options: Any) -> bool:
        self.steps += 1
        return super().nesterov(delta, momentum, master, **options)


class TorchMerging(TorchBackend):
    """The same with PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def nesterov(self, delta: Combination, momentum: Any, master: Any, **options: Any) -> bool:
        self.steps += 1
        return super().nesterov(delta, momentum, master, **options)


def life(
    name: str,
    model: object,
    folder: Path,
    seen: Events,
    algorithm: gm.DiLoCo,
    *,
    backend: Backend | None = None,
    seed: int = 1,
    rounds: int = 9,
    joined: Callable[[], object] = bool,
) -> Callable[[], None]:
    """Join, train until so many rounds are in the model, close."""

    def live() -> None:
        with gm.Session(
            model,
            algorithm=algorithm,
            mailbox=gm.FilesystemMailbox(folder),
            learner_id=name,
            backend=backend,
            callbacks=[seen],
            **QUICK,
        ) as session:
            joined()
            step = 0
            while session.rounds_seen < rounds:
                change(model, 10_000 * seed + step)
                session.step(samples=4)
                step += 1
                time.sleep(0.002)

    return live


@pytest.mark.parametrize(("dtype", "delta_dtype", "commit_dtype"), PRECISIONS)
@pytest.mark.parametrize("kinds", ["torch and arrays", "torch by numpy", "arrays by torch"])
def test_nodes_agree_whatever_closes_their_rounds(
    kinds: str, dtype: str, delta_dtype: str | None, commit_dtype: str | None, tmp_path: Path
) -> None:
    """Both take part; the parameters of the newest commit are the same bytes everywhere."""
    algorithm = gm.DiLoCo(
        sync_every=4,
        fragments=2,
        quorum_size=2,
        overlap_steps=0,
        delta_dtype=delta_dtype,
        commit_dtype=commit_dtype,
    )
    make = {
        "torch and arrays": (module, arrays),
        "torch by numpy": (module, module),
        "arrays by torch": (arrays, arrays),
    }[kinds]
    kind = {"torch by numpy": Merging, "arrays by torch": TorchMerging}.get(kinds)
    merging = [kind() if kind else None for _ in range(2)]
    models = [one(number, dtype) for number, one in enumerate(make)]
    seen = [Events(), Events()]
    joined = threading.Barrier(2, timeout=90).wait

    def node(i: int) -> Callable[[], None]:
        return life(
            f"n{i}",
            models[i],
            tmp_path,
            seen[i],
            algorithm,
            backend=merging[i],
            seed=i,
            joined=joined,
        )

    together(node(0), node(1))
    for each in seen:
        assert each.of(events.TaskFailed) == []
    # Two that close one round both tell of it, as happens when one of them is slow.
    closed = {event.round for each in seen for event in each.of(events.RoundCommitted)}
    records = [json.loads(path.read_bytes()) for path in sorted(tmp_path.glob("rounds/*.json"))]
    assert closed == set(range(len(records)))
    assert len(records) >= 9
    assert sum(len(record["participants"]) == 2 for record in records) >= 4
    if merging[0] is not None and merging[1] is not None:
        assert merging[0].steps + merging[1].steps >= len(records) * len(SHAPES) // 2
    fresh = [module(7, dtype), arrays(8, dtype)]
    for model in fresh:
        assert gm.align(model, mailbox=gm.FilesystemMailbox(tmp_path)) == len(records) - 1
    assert contents(fresh[0]) == contents(fresh[1])
    last = max(each.of(events.Closed)[0].rounds_seen for each in seen)
    for model, each in zip(models, seen, strict=True):
        if each.of(events.Closed)[0].rounds_seen == last == len(records) - 1:
            assert contents(model) == contents(fresh[0])


def test_arrays_are_written_in_place_and_integers_left_alone(tmp_path: Path) -> None:
    model = arrays(1)
    objects, seen = dict(model), Events()
    algorithm = gm.DiLoCo(sync_every=4, fragments=2, flush_on_close=True)
    with no_threads_left():
        life("solo", model, tmp_path, seen, algorithm)()
    assert all(model[name] is objects[name] for name in objects)
    assert model["step"].tolist() == [0, 1]
    other = arrays(2)
    gm.align(other, mailbox=gm.FilesystemMailbox(tmp_path))
    assert contents(other) == contents(model)


def test_nan_in_an_array_is_put_right(tmp_path: Path) -> None:
    model, seen = arrays(1), Events()
    with gm.Session(
        model,
        algorithm=gm.DiLoCo(sync_every=2, fragments=1, in_flight=1, overlap_steps=0),
        mailbox=gm.FilesystemMailbox(tmp_path),
        callbacks=[seen],
        **QUICK,
    ) as session:
        before = contents(model)
        model["b.bias"][1] = np.nan
        for _ in range(2):
            session.step(samples=1)
        assert contents(model) == before
    assert seen.of(events.ParametersNotFinite)[0].tensors == ("b.bias",)


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ({"w": np.zeros(3)}, ValueError, r"'w' is float64.*astype"),
        ({"w": np.zeros(3, np.float32), 4: np.zeros(2)}, TypeError, "names of arrays are strings"),
        ({"step": np.arange(3)}, ValueError, "no floating array"),
        ({}, TypeError, r"a dict of NumPy arrays, not a dict that is empty"),
    ],
    ids=["float64", "number", "integers", "empty"],
)
def test_what_is_no_model_is_refused_before_anything_is_written(
    model: object, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    box = gm.FilesystemMailbox(tmp_path)
    with no_threads_left():
        with pytest.raises(kind, match=message):
            gm.Session(model, algorithm=gm.DiLoCo(4, 1, in_flight=1), mailbox=box)
        with pytest.raises(kind, match=message):
            gm.align(model, mailbox=box)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_no_payload_can_hold_are_refused(name: str, tmp_path: Path) -> None:
    model = {name: np.zeros(3, np.float32)}
    with no_threads_left(), pytest.raises(ValueError, match="name"):
        gm.Session(
            model,
            algorithm=gm.DiLoCo(4, 1, in_flight=1),
            mailbox=gm.FilesystemMailbox(tmp_path),
        )


ALONE = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "mlx"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
import numpy as np, ml_dtypes
import gradientmail as gm

folder, dtype, *precision = sys.argv[1:]
delta_dtype, commit_dtype = (None if each == "none" else each for each in precision)

def make(seed):
    draw = np.random.default_rng(seed)
    kind = ml_dtypes.bfloat16 if dtype == "BF16" else np.float32
    shapes = {"w": (40, 30), "b": (30,)}
    return {name: draw.standard_normal(shape).astype(kind) for name, shape in shapes.items()}

model, box, committed = make(1), gm.FilesystemMailbox(folder), []
assert gm.align(model, mailbox=box) == -1

def note(event):
    if isinstance(event, gm.events.RoundCommitted):
        committed.append(event.round)
    assert not isinstance(event, gm.events.TaskFailed), event

with gm.Session(
    model,
    algorithm=gm.DiLoCo(4, 2, overlap_steps=0, delta_dtype=delta_dtype, commit_dtype=commit_dtype),
    mailbox=box,
    compression="zstd",
    poll_interval=0.02,
    callbacks=[note],
) as session:
    for step in range(24):
        model["w"] = model["w"] - (0.1 * model["w"].astype("f4")).astype(model["w"].dtype)
        model["b"] *= model["b"].dtype.type(0.9)
        session.step(samples=8)
assert committed == list(range(len(committed))) and len(committed) >= 10, committed
other = make(2)
assert gm.align(other, mailbox=box) == committed[-1]
assert all(other[name].tobytes() == model[name].tobytes() for name in model)
size = float(np.abs(model["w"].astype("f4")).mean())
print(size < 0.6, {"torch", "mlx"} & set(sys.modules))
try:
    gm.backend.TorchBackend
except gm.MissingExtra as error:
    print(error)
"""


@pytest.mark.parametrize(
    "precision", [("F32", "none", "none"), ("BF16", "none", "none"), ("F32", "F4", "F8_E4M3")]
)
def test_a_machine_without_other_frameworks_trains_closes_and_aligns(
    precision: tuple[str, ...], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE, str(tmp_path), *precision],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    install = "torch is not installed; install it with: pip install 'gradientmail[torch]'"
    assert done.stdout == f"True set()\n{install}\n"


@pytest.mark.parametrize("option", ["delta_dtype", "commit_dtype"])
def test_a_precision_that_this_machine_cannot_compute_is_refused_at_once(
    option: str, tmp_path: Path
) -> None:
    code = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np
import gradientmail as gm
algorithm = gm.DiLoCo(4, 1, in_flight=1, **{sys.argv[1]: "BF16"})
try:
    gm.Session({"w": np.ones(3, "f4")}, algorithm=algorithm, mailbox=gm.MemoryMailbox())
except gm.MissingExtra as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, option],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ml_dtypes is not installed; install it with")
