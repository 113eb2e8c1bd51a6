"""A model on a real CUDA device, the last one there is; skipped where there is none.

``test_cuda_copies.py`` shows the order of events without one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradientmail.backend.base import Backend
from gradientmail.backend.torch import TorchBackend
from gradientmail.backend.torch_device import TorchDeviceBackend
from gradientmail.testing.backend_arithmetic import BackendArithmetic
from gradientmail.testing.backend_parameters import BackendParameters, Tensors
from gradientmail.testing.backend_range import BackendRange
from gradientmail.testing.backend_sums import BackendSums
from gradientmail.testing.backend_values import Floats

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", max(torch.cuda.device_count() - 1, 0))
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CYCLES = 2**31
"""A second or so of a GPU's time."""


class TestTorchParametersOnCuda(BackendParameters):
    def make_backend(self) -> Backend:
        return TorchBackend()

    def make_model(self, tensors: Tensors) -> Any:
        model = nn.Module()
        for name, (dtype, values) in tensors.items():
            tensor = torch.from_numpy(values.copy()).to(DEVICE, DTYPES[dtype])
            model.register_parameter(name, nn.Parameter(tensor))
        return model

    def read_model(self, model: Any) -> Mapping[str, Floats]:
        return {
            name: p.detach().float().cpu().numpy().astype(np.float32, copy=True)
            for name, p in model.named_parameters()
        }


class TestMergingOnCuda(BackendArithmetic, BackendSums, BackendRange):
    def make_backend(self) -> Backend:
        return TorchDeviceBackend(DEVICE)


def test_merging_does_not_wait_for_the_training() -> None:
    """Whose kernels are in the way of nothing, on the default stream and on any other."""
    backend = TorchDeviceBackend(DEVICE)
    x, y, momentum, master = (torch.randn(5_000_000) for _ in range(4))
    expected = torch.dot(x.double(), y.double()).item()

    def merge() -> float:
        backend.accumulate(y, x, keep=1.0, scale=0.0)
        backend.nesterov(
            [(0.5, x)], momentum, master, beta=0.9, lr=0.7, new_momentum=momentum, new_master=master
        )
        return backend.dot(x, y)

    merge()  # the allocator has what the next one asks for
    for training in (torch.cuda.default_stream(DEVICE), torch.cuda.Stream(DEVICE)):
        with torch.cuda.device(DEVICE), torch.cuda.stream(training):
            torch.cuda._sleep(CYCLES)
            busy = training.record_event()
            found = merge()
            assert not busy.query()
        training.synchronize()
        assert found == pytest.approx(expected, rel=1e-12)


class Layouts(nn.Module):
    """Parameters in any order of their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(300, 5, device=DEVICE))
        self.transposed = nn.Parameter(torch.randn(6, 200, device=DEVICE).t())
        self.sliced = nn.Parameter(torch.randn(800, device=DEVICE)[::2])
        self.expanded = nn.Parameter(torch.randn(1, 4, device=DEVICE).expand(3, 4))
        self.empty = nn.Parameter(torch.randn(0, 3, device=DEVICE))


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_a_busy_device_is_not_waited_for(mixing: float) -> None:
    """Neither by the snapshot nor by the commit, on whatever stream the training is."""
    model, backend = Layouts(), TorchBackend()
    parameters = backend.bind(model)
    arrays, target = (
        {
            spec.name: backend.array(backend.pool().take(spec.nbytes), spec.dtype, spec.shape)
            for spec in parameters.schema
        }
        for _ in range(2)
    )
    for array in target.values():
        array.fill_(3.0)
    training = torch.cuda.Stream(DEVICE)
    training.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.device(DEVICE), torch.cuda.stream(training):
        parameters.capture(arrays)()  # the allocator has what the next one asks for
        parameters.apply(parameters.stage(arrays), mixing=mixing)
        staged = parameters.stage(target)
        expected = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
        torch.cuda._sleep(CYCLES)
        with torch.no_grad():
            model.plain.add_(1.0)
        busy = training.record_event()
        torch.cuda.set_sync_debug_mode("error")
        try:
            wait = parameters.capture(arrays)
            parameters.apply(staged, mixing=mixing)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not busy.query()
    wait()
    expected["plain"] += 1.0
    training.synchronize()
    for name, before in expected.items():
        assert torch.equal(arrays[name], before), name
        after = model.get_parameter(name).detach().cpu()
        torch.testing.assert_close(after, mixing * before + (1.0 - mixing) * target[name])
