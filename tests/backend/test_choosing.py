"""Choosing a backend, and what importing one costs everybody else."""

import subprocess
import sys
from collections import OrderedDict, UserDict
from types import MappingProxyType

import ml_dtypes
import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
import torch
from torch import nn

import gradientmail.backend
from gradientmail.backend import backend_for
from gradientmail.backend.cuda_copies import pinned_memory
from gradientmail.backend.mlx import MlxBackend
from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.torch import TorchBackend


class Own(nn.Sequential):
    """A user's class, defined anywhere."""


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Own()], ids=["torch's", "own"])
def test_a_torch_module_is_torchs(model: object) -> None:
    assert isinstance(backend_for(model), TorchBackend)
    assert backend_for(model).name == "torch"


class OwnMlx(mlx.nn.Linear):
    """Another one."""


@pytest.mark.parametrize("model", [mlx.nn.Linear(2, 2), OwnMlx(2, 2)], ids=["MLX's", "own"])
def test_an_mlx_module_is_mlxs(model: object) -> None:
    assert isinstance(backend_for(model), MlxBackend)
    assert backend_for(model).name == "mlx"


@pytest.mark.parametrize(
    "model",
    [
        {"w": np.zeros(3)},
        OrderedDict(a=np.zeros(()), b=None),
        MappingProxyType({"w": np.zeros(2, bool)}),
        UserDict(w=np.zeros((2, 0), ml_dtypes.bfloat16)),
        {"w": np.ma.zeros(3)},
        {"w": np.float32(1.0)},
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_mapping_with_an_array_is_numpys(model: object) -> None:
    """What of it cannot be trained, its backend says in better words."""
    assert isinstance(backend_for(model), NumpyBackend)
    assert backend_for(model).name == "numpy"


@pytest.mark.parametrize("thing", [None, 3, "model", object(), {"w": 1}, dict, [np.zeros(3)]])
def test_anything_else_is_a_type_error_that_says_what_is_accepted(thing: object) -> None:
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module.* NumPy arrays, not a .*") as caught:
        backend_for(thing)
    assert type(thing).__qualname__ in str(caught.value)


@pytest.mark.parametrize(
    ("mapping", "held"),
    [
        ({}, "that is empty"),
        ({"w": torch.zeros(2)}, r"of torch\.Tensor"),
        ({"w": mx.zeros(2)}, r"of mlx\.core\.array"),
        ({"w": [1.0], "b": 2.0}, r"of float, list"),
    ],
)
def test_a_mapping_of_something_else_says_of_what(mapping: object, held: str) -> None:
    with pytest.raises(TypeError, match=rf"not a dict {held}"):
        backend_for(mapping)


@pytest.mark.parametrize("name", ["MlxBackend", "NumpyBackend", "TorchBackend"])
def test_backends_are_found_by_name(name: str) -> None:
    assert name in gradientmail.backend.__all__
    kind = getattr(gradientmail.backend, name)
    assert isinstance(kind(), gradientmail.backend.Backend)
    assert kind is getattr(gradientmail.backend, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="JaxBackend"):
        getattr(gradientmail.backend, "JaxBackend")  # noqa: B009


def test_pinned_memory_lives_as_long_as_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model on CUDA; here the memory is ordinary, and all else the same."""
    asked: list[tuple[int, bool]] = []
    empty = torch.empty

    def pinned(size: int, *, pin_memory: bool, dtype: torch.dtype, device: str) -> torch.Tensor:
        asked.append((size, pin_memory))
        return empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", pinned)
    views = [pinned_memory(torch, 5_000_000)[10:30] for _ in range(4)]
    for index, view in enumerate(views):
        view[:] = bytes([index]) * 20
    assert [bytes(view) for view in views] == [bytes([index]) * 20 for index in range(4)]
    assert (views[0].format, views[0].readonly) == ("B", False)
    assert asked == [(5_000_000, True)] * 4
    assert pinned_memory(torch, 0).nbytes == 1


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_refusing_an_object_loads_no_framework() -> None:
    code = """
import sys
from gradientmail.backend import backend_for
import gradientmail.algorithm.merge, gradientmail.algorithm.outer
for thing in ({}, {"w": [1.0]}, 3):
    try:
        backend_for(thing)
    except TypeError:
        print({"torch", "numpy", "mlx"} & set(sys.modules))
"""
    assert run_python(code) == "set()\n" * 3


def test_a_dict_of_arrays_loads_no_other_framework() -> None:
    code = """
import sys
import numpy
from gradientmail.backend import NumpyBackend, backend_for
assert type(backend_for({"w": numpy.zeros(3, "float32")})) is NumpyBackend
print({"torch", "mlx", "ml_dtypes"} & set(sys.modules))
"""
    assert run_python(code) == "set()\n"


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("torch", "TorchBackend", "torch"),
        ("numpy", "NumpyBackend", "numpy"),
        ("mlx", "MlxBackend", "mlx"),
    ],
)
def test_a_missing_framework_names_the_extra(package: str, name: str, extra: str) -> None:
    code = f"""
import sys
sys.modules["{package}"] = None
from gradientmail.errors import MissingExtra
try:
    from gradientmail.backend import {name}
except MissingExtra as error:
    print(error)
"""
    assert run_python(code) == (
        f"{package} is not installed; install it with: pip install 'gradientmail[{extra}]'\n"
    )


def test_an_mlx_module_needs_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
import asyncio, mlx.core as mx, mlx.nn
import gradientmail as gm
model, box = mlx.nn.Linear(3, 2), gm.MemoryMailbox()
with gm.Session(
    model, algorithm=gm.DiLoCo(2, 1, in_flight=1, overlap_steps=0), mailbox=box, poll_interval=0.01
) as session:
    for _ in range(4):
        model.weight -= 1.0
        session.step(samples=1)
fresh = mlx.nn.Linear(3, 2)
print(gm.align(fresh, mailbox=box), bool((fresh.weight == model.weight).all()))
"""
    assert run_python(code) == "1 True\n"


def test_bfloat16_alone_needs_ml_dtypes() -> None:
    code = """
import sys
sys.modules["ml_dtypes"] = None
import numpy
from gradientmail.backend import NumpyBackend
from gradientmail.errors import MissingExtra
backend = NumpyBackend()
for dtype in ("F32", "F16", "F8_E4M3", "F8_E8M0", "F4"):
    backend.array(memoryview(bytearray(4)), dtype, (8,) if dtype == "F4" else (1,))\
        if dtype in ("F32", "F4") else backend.array(memoryview(b""), dtype, (0,))
x = numpy.ones((3, 32), "float32")
backend.encode(x, "F4", numpy.empty(48, "uint8"), numpy.empty(3, "uint8"))
backend.encode(x, "F8_E4M3", numpy.empty((3, 32), "uint8"), numpy.empty((), "float32"))
try:
    backend.array(memoryview(b""), "BF16", (0,))
except MissingExtra as error:
    print(error)
"""
    assert run_python(code) == (
        "ml_dtypes is not installed; install it with: pip install 'gradientmail[numpy]'\n"
    )


def test_numpy_is_not_needed_and_read_only_buffers_do_not_warn() -> None:
    code = """
import sys
sys.modules["numpy"] = None
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own about the missing numpy
    import torch
from gradientmail.backend import backend_for
model = torch.nn.Linear(4, 4)
backend = backend_for(model)
parameters = backend.bind(model)
blank = lambda spec: backend.array(backend.pool().take(spec.nbytes), spec.dtype, spec.shape)
arrays = {spec.name: blank(spec) for spec in parameters.schema}
parameters.capture(arrays)()
parameters.apply(parameters.stage(arrays))
read_only = backend.array(memoryview(bytes(64)), "F32", (4, 4))
data = backend.array(memoryview(bytearray(16)), "F4", (32,))
scale = backend.array(memoryview(bytearray(1)), "F8_E8M0", (1,))
backend.encode(read_only, "F4", data, scale)
backend.decode(data, "F4", scale, arrays["weight"])
print(backend.sum_of_squares(read_only), parameters.not_finite())
"""
    assert run_python(code) == "0.0 []\n"


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_arithmetic_starts_no_thread() -> None:
    """PyTorch makes its threads the first time that it wants them; these calls never do."""
    code = """
import os, torch
from gradientmail.backend.torch import TorchBackend
torch.set_num_threads(1)
backend, blocks = TorchBackend(), 2**16 + 1
count = 32 * blocks - 5
x, y, out, other = (torch.ones(count) for _ in range(4))
half, huge = x.bfloat16(), torch.full((count,), 1e30)
data, scale = (torch.zeros(size * blocks, dtype=torch.uint8) for size in (16, 1))
fp8, one = torch.zeros(count).to(torch.float8_e4m3fn), torch.ones(())
torch.set_num_threads(2)
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
backend.subtract(x, y, out)
backend.add(half, x, half)
backend.sum_of_squares(x), backend.sum_of_squares(half), backend.sum_of_squares(huge)
backend.dot(x, y), backend.dot(x, half)
backend.accumulate(out, x, keep=0.5, scale=2.0)
backend.combine([(0.5, x), (0.5, half)], out)
backend.nesterov([(1.0, x)], y, half, beta=0.9, lr=0.7, new_momentum=out, new_master=other)
backend.encode(x, "BF16", half, None), backend.decode(half, "BF16", None, out)
backend.encode(x, "F4", data, scale), backend.decode(data, "F4", scale, out)
backend.encode(x, "F8_E4M3", fp8, one), backend.decode(fp8, "F8_E4M3", one, out)
after = threads()
torch.add(x, y)
print(after - before, threads() > before, torch.get_num_threads())
"""
    assert run_python(code) == "0 True 2\n"
