"""Choosing a backend, and what importing one costs everybody else."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from gradientmail.backend import backend_for
from gradientmail.backend.cuda_copies import pinned_memory
from gradientmail.backend.torch import TorchBackend


class Own(nn.Sequential):
    """A user's class, defined anywhere."""


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Own()], ids=["torch's", "own"])
def test_a_torch_module_is_torchs(model: object) -> None:
    assert isinstance(backend_for(model), TorchBackend)
    assert backend_for(model).name == "torch"


@pytest.mark.parametrize("thing", [None, 3, "model", object(), {"w": 1}, dict])
def test_anything_else_is_a_type_error_that_says_what_is_accepted(thing: object) -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not a .*") as caught:
        backend_for(thing)
    assert type(thing).__qualname__ in str(caught.value)


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
try:
    backend_for({})
except TypeError:
    print({"torch", "numpy", "mlx"} & set(sys.modules))
"""
    assert run_python(code) == "set()\n"


def test_missing_torch_names_the_extra() -> None:
    code = """
import sys
sys.modules["torch"] = None
from gradientmail.errors import MissingExtra
try:
    import gradientmail.backend.torch
except MissingExtra as error:
    print(error)
"""
    assert run_python(code) == (
        "torch is not installed; install it with: pip install 'gradientmail[torch]'\n"
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
