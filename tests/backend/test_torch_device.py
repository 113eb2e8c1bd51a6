"""Merging on a device, with a stand-in for CUDA whose device is the processor itself.

What it stands in for is when things happen: with ``LateCopies`` a result reaches host memory when
somebody waits for it, as late as a real device might. ``test_cuda_device.py`` has a real one.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.session.models import ALGORITHM, QUICK, Events, Keeping, net, train_until
from torch.overrides import TorchFunctionMode

import gradientmail as gm
from gradientmail.backend import TorchBackend, TorchDeviceBackend, torch_device
from gradientmail.backend.base import Backend
from gradientmail.events import RoundCommitted, TaskFailed
from gradientmail.testing.backend_arithmetic import BackendArithmetic
from gradientmail.testing.backend_range import BackendRange
from gradientmail.testing.backend_sums import BackendSums
from gradientmail.verification import verify


class OutOfMemoryError(RuntimeError):
    """As torch.cuda's."""


@dataclass
class FakeStream:
    queue: list[Callable[[], object]] = field(default_factory=list)


@dataclass
class Event:
    cuda: "Cuda"
    stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        assert stream is self.cuda.current
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream is not None, "was never recorded"
        assert self.cuda.device_now == "cpu:0", "would give another device a context"
        while self.stream.queue:
            self.stream.queue.pop(0)()


class Cuda:
    """What ``TorchDeviceBackend`` needs of ``torch.cuda``."""

    OutOfMemoryError = OutOfMemoryError

    def __init__(self) -> None:
        self.training = self.current = FakeStream()
        self.device_now = "cpu:7"

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def Stream(self, device: torch.device) -> FakeStream:
        assert str(device) == "cpu:0"
        return FakeStream()

    def Event(self, *, blocking: bool) -> Event:
        assert blocking, "would keep a processor busy while it waits"
        return Event(self)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.device_now = self.device_now, str(device)
        try:
            yield
        finally:
            self.device_now = before

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        assert self.device_now == "cpu:0", "would set another device when it ends"
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class LateCopies(TorchFunctionMode):
    """Copies into host memory wait in their stream; those to the device are on the own stream."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.there: set[int] = set()
        self.late = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty_like and "device" in kwargs:
            assert self.cuda.current is not self.cuda.training
            made = func(*args, **kwargs)
            self.there.add(made.data_ptr())
            return made
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            assert self.cuda.current is not self.cuda.training
            target, source = args
            if target.data_ptr() not in self.there:
                source, self.late = source.clone(), self.late + 1
                self.cuda.current.queue.append(lambda: target.copy_(source))
                return target
        return func(*args, **kwargs)


def device_backend(cuda: Cuda | None = None) -> TorchDeviceBackend:
    return TorchDeviceBackend("cpu", cuda=cuda or Cuda())


class TestArithmetic(BackendArithmetic, BackendSums, BackendRange):
    """Formats and models are ``TorchBackend``'s, without a change."""

    def make_backend(self) -> Backend:
        return device_backend()


class TestArithmeticInPieces(BackendArithmetic, BackendSums, BackendRange):
    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_device, "PIECE", 1000)

    def make_backend(self) -> Backend:
        return device_backend()


COUNT = 2500
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed)).to(dtype)


def accumulated(backend: TorchBackend, dtype: torch.dtype) -> list[torch.Tensor]:
    kept, fresh, only = draw(1), draw(1), draw(1)
    backend.accumulate(kept, draw(2, dtype), keep=0.5, scale=0.3)
    backend.accumulate(fresh, draw(2, dtype), keep=0.0, scale=-3e38)
    backend.accumulate(only, draw(2, dtype), keep=1e-39, scale=0.0)
    return [kept, fresh, only]


def combined(backend: TorchBackend, dtype: torch.dtype) -> list[torch.Tensor]:
    out, none = draw(1), draw(2)
    backend.combine([(0.3, draw(3, dtype)), (-1.7, draw(4))], out)
    backend.combine([], none)
    return [out, none]


def stepped(backend: TorchBackend, dtype: torch.dtype) -> list[torch.Tensor]:
    """With momentum and over what it uses up; without."""
    delta, momentum, first, new = draw(5), draw(6), draw(7), draw(8)
    rates = {"beta": 0.9, "lr": 0.7}
    master = draw(9, dtype)
    terms = [(0.4, delta), (0.6, draw(10, dtype))]
    moved = backend.nesterov(
        terms, momentum, master, **rates, new_momentum=momentum, new_master=delta
    )
    other = backend.nesterov(
        [(1.5, draw(11))], None, master, **rates, new_momentum=first, new_master=new
    )
    assert (moved, other) == (True, True)
    return [momentum, delta, first, new]


OPERATIONS = [accumulated, combined, stepped]
operations = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "PIECE", 1000)


def alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@operations
@dtypes
@pytest.mark.usefixtures("small_pieces")
def test_results_are_the_hosts(operation: Callable[..., Any], dtype: torch.dtype) -> None:
    """On one processor the same operations give the same bits."""
    assert alike(operation(device_backend(), dtype), operation(TorchBackend(), dtype))


@operations
@pytest.mark.usefixtures("small_pieces")
def test_what_returns_is_in_host_memory(operation: Callable[..., Any]) -> None:
    """And every copy was on the backend's own stream, with its device the current one."""
    cuda = Cuda()
    backend = device_backend(cuda)
    expected = operation(TorchBackend(), torch.float32)
    with LateCopies(cuda) as copies:
        found = operation(backend, torch.float32)
    assert copies.late >= 3 * len(found)
    assert alike(found, expected)
    assert cuda.current is cuda.training
    assert cuda.device_now == "cpu:7"


@pytest.mark.usefixtures("small_pieces")
def test_an_error_leaves_no_copy_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that it writes to may be somebody else's a moment later."""
    cuda = Cuda()
    backend = device_backend(cuda)
    out, expected = draw(1), draw(1)
    backend.accumulate(expected, draw(2), keep=0.5, scale=0.3)
    move, moved = backend._there, list[int]()

    def fail_at_last(x: torch.Tensor) -> torch.Tensor:
        moved.append(x.numel())
        if len(moved) == 5:
            raise RuntimeError("an illegal memory access was encountered")
        return move(x)

    monkeypatch.setattr(backend, "_there", fail_at_last)
    with pytest.raises(RuntimeError, match="illegal memory"), LateCopies(cuda) as copies:
        backend.accumulate(out, draw(2), keep=0.5, scale=0.3)
    assert copies.late == 2
    assert torch.equal(out[:2000], expected[:2000])
    assert torch.equal(out[2000:], draw(1)[2000:])


@operations
@dtypes
@pytest.mark.parametrize("full_at", [0, 1, 2])
@pytest.mark.usefixtures("small_pieces")
def test_what_finds_no_room_is_computed_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
    operation: Callable[..., Any],
    dtype: torch.dtype,
    full_at: int,
) -> None:
    """Whichever copy to the device fails, of every few."""
    cuda = Cuda()
    backend = device_backend(cuda)
    move, moved = backend._there, list[bool]()

    def sometimes(x: torch.Tensor) -> torch.Tensor:
        moved.append(len(moved) % 3 == full_at)
        if moved[-1]:
            raise OutOfMemoryError
        return move(x)

    monkeypatch.setattr(backend, "_there", sometimes)
    with LateCopies(cuda):
        found = operation(backend, dtype)
    assert any(moved)
    assert alike(found, operation(TorchBackend(), dtype))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.usefixtures("small_pieces")
def test_sums_are_float64(monkeypatch: pytest.MonkeyPatch, *, full: bool) -> None:
    cuda = Cuda()
    backend = device_backend(cuda)
    if full:

        def fail(x: torch.Tensor) -> torch.Tensor:
            raise OutOfMemoryError

        monkeypatch.setattr(backend, "_there", fail)
    x, y = draw(1) * 1e25, draw(2)
    xx, xy, yy = (float((a.double() * b.double()).sum()) for a, b in ((x, x), (x, y), (y, y)))
    with LateCopies(cuda):
        found = (backend.sum_of_squares(x), backend.dot(x, y), *backend.dot_squares(x, y))
        found += (backend.sum_of_products(x, y),)
    assert found == pytest.approx((xx, xy, xy, yy, xy), rel=1e-13)


def test_nesterov_says_what_is_not_finite() -> None:
    big, out = torch.full((COUNT,), 3e38), [draw(1), draw(2)]
    backend, rates = device_backend(), {"beta": 0.9, "lr": 0.7}
    finite = backend.nesterov(
        [(1.0, big)], big, big, **rates, new_momentum=out[0], new_master=out[1]
    )
    assert finite is False


def test_without_a_device_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match="cannot merge on 'cuda': PyTorch sees no CUDA device"):
        TorchDeviceBackend()


def test_a_session_closes_rounds_with_it() -> None:
    """Every commit is what its deltas and the host's arithmetic give."""
    mailbox, heard = Keeping(), Events()
    model = net()
    with gm.Session(
        model,
        algorithm=ALGORITHM,
        mailbox=mailbox,
        backend=device_backend(),
        callbacks=(heard,),
        **QUICK,
    ) as session:
        train_until(session, model, 5)
    assert heard.of(TaskFailed) == []
    assert len(heard.of(RoundCommitted)) >= 6
    report = asyncio.run(verify(mailbox, backend=TorchBackend(), swept=False))
    assert report.violations == ()
    assert report.recomputed >= 6
