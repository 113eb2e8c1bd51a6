"""The order of copies to and from a CUDA device, on a device that only keeps a log.

Its streams run nothing by themselves: what is queued on a stream runs when somebody waits for it,
as late as a real device might. A copy that is not ordered by events then reads what came after.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gradientmail.backend.cuda_copies import DeviceCopies
from gradientmail.backend.torch_model import TorchParameters


class OutOfMemoryError(RuntimeError):
    """As torch.cuda's."""


@dataclass
class FakeStream:
    queue: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def wait_stream(self, other: "FakeStream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: "Event") -> None:
        self.queue.append(event.reach)


class Event:
    """As torch's, one that was never recorded is done."""

    def __init__(self, cuda: "Cuda | None" = None) -> None:
        self.cuda = cuda
        self.stream: FakeStream | None = None
        self.done = True

    def record(self, stream: FakeStream) -> None:
        self.stream = stream
        self.done = False
        stream.queue.append(self._finish)

    def _finish(self) -> None:
        self.done = True

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        assert self.cuda is not None
        assert self.cuda.device_now == DEVICE, "would give another device a context"
        self.reach()

    def reach(self) -> None:
        while not self.done:
            assert self.stream is not None
            assert self.stream.queue, "waits for an event that nothing will reach"
            self.stream.queue.pop(0)()


DEVICE = "cuda:1"
"""Not the one that a thread begins with."""


class Cuda:
    """What ``DeviceCopies`` needs of ``torch.cuda``."""

    OutOfMemoryError = OutOfMemoryError

    def __init__(self, *, full: bool = False) -> None:
        self.training = FakeStream()
        self.current = self.training
        self.device_now: object = "cuda:0"
        self.full = full
        self.streams: list[FakeStream] = []
        self.made: list[DeviceTensor] = []

    def Event(self, *, blocking: bool) -> Event:
        assert blocking, "would keep a processor busy while it waits"
        return Event(self)

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        before, self.device_now = self.device_now, str(device)
        try:
            yield
        finally:
            self.device_now = before

    def Stream(self, _device: object) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def queue_copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        def copy() -> None:
            target.copy_(source)

        self.current.queue.append(copy)

    def current_stream(self, _device: object) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        assert self.device_now == DEVICE, "would set another device when it ends"
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@dataclass(frozen=True)
class Device:
    type: str = "cuda"
    index: int = 1

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


class DeviceTensor:
    """A tensor whose operations are queued on the current stream."""

    device = Device()

    def __init__(self, cuda: Cuda, values: torch.Tensor) -> None:
        self.cuda = cuda
        self.values = values
        self.shape = values.shape
        self.dtype = values.dtype
        self.used_on: list[FakeStream] = []

    def new_empty(self, shape: torch.Size) -> "DeviceTensor":
        if self.cuda.full:
            raise OutOfMemoryError
        self.cuda.made.append(DeviceTensor(self.cuda, torch.full(shape, torch.nan)))
        return self.cuda.made[-1]

    def copy_(self, source: "DeviceTensor | HostTensor") -> "DeviceTensor":
        self.cuda.queue_copy(source.values, self.values)
        return self

    def lerp_(self, source: "DeviceTensor", weight: float) -> None:
        assert isinstance(source, DeviceTensor), "of one device alone"

        def mix() -> None:
            self.values.lerp_(source.values, weight)

        self.cuda.current.queue.append(mix)

    def to(self, _device: object) -> "DeviceTensor":
        return self

    def record_stream(self, stream: FakeStream) -> None:
        self.used_on.append(stream)


class HostTensor:
    """Pinned host memory, of which no CUDA stream takes note."""

    device = Device("cpu", 0)

    def __init__(self, cuda: Cuda, values: torch.Tensor) -> None:
        self.cuda = cuda
        self.values = values
        self.shape = values.shape
        self.dtype = values.dtype

    def copy_(self, source: DeviceTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.queue_copy(source.values, self.values)

    def to(self, _device: object, *, non_blocking: bool = False) -> DeviceTensor:
        if non_blocking and self.cuda.full:
            raise OutOfMemoryError
        found = DeviceTensor(self.cuda, torch.full(self.shape, torch.nan))
        self.cuda.queue_copy(self.values, found.values)
        return found


def train_step(cuda: Cuda, parameter: DeviceTensor) -> None:
    """Queue a write to a parameter on the training's stream."""

    def step() -> None:
        parameter.values += 1.0

    cuda.training.queue.append(step)


@pytest.mark.parametrize("full", [False, True], ids=["clones", "no memory"])
def test_download_is_of_the_moment_between_two_steps(full: bool) -> None:
    cuda = Cuda(full=full)
    copies = DeviceCopies(cuda, DEVICE)
    parameter = DeviceTensor(cuda, torch.zeros(3))
    hosts = [HostTensor(cuda, torch.full((3,), torch.nan)) for _ in range(2)]
    train_step(cuda, parameter)
    first = copies.download([parameter], hosts[:1])
    train_step(cuda, parameter)
    second = copies.download([parameter], hosts[1:])
    train_step(cuda, parameter)
    assert parameter.values.tolist() == [0.0] * 3, "nothing has waited for the device"
    cuda.training.run()
    assert parameter.values.tolist() == [3.0] * 3
    second()
    first()
    assert [host.values.tolist() for host in hosts] == [[1.0] * 3, [2.0] * 3]


def test_download_waited_for_before_the_training_runs_on() -> None:
    cuda = Cuda()
    parameter, host = DeviceTensor(cuda, torch.ones(3)), HostTensor(cuda, torch.zeros(3))
    wait = DeviceCopies(cuda, DEVICE).download([parameter], [host])
    train_step(cuda, parameter)
    wait()
    wait()
    assert host.values.tolist() == [1.0] * 3


def test_host_memory_is_held_until_its_copy_is_done() -> None:
    cuda = Cuda()
    copies = DeviceCopies(cuda, DEVICE)
    parameter = DeviceTensor(cuda, torch.ones(3))

    def held() -> int:
        return len(copies._under_way)

    hosts = [HostTensor(cuda, torch.zeros(3)) for _ in range(3)]
    waits = [copies.download([parameter], [host]) for host in hosts]
    assert held() == 3
    waits[1]()
    assert held() == 2, "what is complete is let go of at once, by who waited for it"
    copies.download([parameter], [HostTensor(cuda, torch.zeros(3))])
    assert held() == 2, "and by the next copy, where nobody did"


class Interrupting(HostTensor):
    """Ctrl-C comes when its copy begins."""

    def copy_(self, source: DeviceTensor, *, non_blocking: bool) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_between_two_copies_lets_go_of_nothing_that_is_copied() -> None:
    cuda = Cuda()
    copies = DeviceCopies(cuda, DEVICE)
    parameters = [DeviceTensor(cuda, torch.ones(3)) for _ in range(2)]
    hosts = [HostTensor(cuda, torch.zeros(3)), Interrupting(cuda, torch.zeros(3))]
    with pytest.raises(KeyboardInterrupt):
        copies.download(parameters, hosts)
    assert cuda.current is cuda.training
    assert [clone.used_on for clone in cuda.made] == [[cuda.streams[0]]] * 2
    host = HostTensor(cuda, torch.zeros(3))
    wait = copies.download(parameters[:1], [host])
    assert list(copies._under_way.values()) == [hosts, [host]]
    wait()
    copies.download(parameters[:1], [host])
    assert list(copies._under_way.values()) == [[host]]


def test_upload_is_complete_and_on_its_own_stream() -> None:
    cuda = Cuda()
    copies = DeviceCopies(cuda, DEVICE)
    train_step(cuda, DeviceTensor(cuda, torch.zeros(3)))
    staged = copies.upload([HostTensor(cuda, torch.full((3,), 5.0))])
    assert staged[0].values.tolist() == [5.0] * 3
    assert len(cuda.training.queue) == 1, "the training's stream was left alone"
    copies.use(staged)
    assert staged[0].used_on == [cuda.training]


class Torch:
    """What ``TorchParameters`` needs of torch, for the device above."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def _foreach_copy_(self, targets: list[Any], sources: list[Any]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


class CudaParameter(DeviceTensor):
    """A parameter on the device; its data is itself."""

    layout = torch.strided
    requires_grad = True

    @property
    def data(self) -> "CudaParameter":
        return self

    def stride(self) -> tuple[int, ...]:
        return self.values.stride()

    def is_neg(self) -> bool:
        return self.values.is_neg()


def test_parameters_on_a_device_go_through_the_side_streams() -> None:
    cuda = Cuda()
    parameter = CudaParameter(cuda, torch.full((4,), 2.0))
    parameters = TorchParameters(Torch(cuda), {"w": parameter})
    host = HostTensor(cuda, torch.zeros(4))
    wait = parameters.capture({"w": host})
    train_step(cuda, parameter)
    cuda.training.run()
    wait()
    assert host.values.tolist() == [2.0] * 4
    staged = parameters.stage({"w": HostTensor(cuda, torch.full((4,), 9.0))})
    train_step(cuda, parameter)
    parameters.apply(staged)
    assert parameter.values.tolist() == [3.0] * 4, "apply does not wait for the device"
    cuda.training.run()
    assert parameter.values.tolist() == [9.0] * 4
    assert staged["w"].used_on == [cuda.training]


@pytest.mark.parametrize("mixing", [0.0, 0.25])
def test_a_model_moved_to_a_device_after_a_commit_was_staged_is_written(mixing: float) -> None:
    cuda = Cuda()
    parameter = CudaParameter(cuda, torch.full((4,), 4.0))
    parameters = TorchParameters(Torch(cuda), {"w": parameter})
    parameters.apply({"w": HostTensor(cuda, torch.full((4,), 8.0))}, mixing=mixing)
    cuda.training.run()
    assert parameter.values.tolist() == [8.0 - 4.0 * mixing] * 4


@pytest.mark.parametrize("mixing", [0.0, 0.25])
def test_a_commit_reaches_a_device_that_has_no_room_for_it_beside_the_model(mixing: float) -> None:
    cuda = Cuda(full=True)
    parameter = CudaParameter(cuda, torch.full((4,), 4.0))
    parameters = TorchParameters(Torch(cuda), {"w": parameter})
    parameters.apply(
        parameters.stage({"w": HostTensor(cuda, torch.full((4,), 8.0))}), mixing=mixing
    )
    cuda.training.run()
    assert parameter.values.tolist() == [8.0 - 4.0 * mixing] * 4


class Elsewhere(CudaParameter):
    """On a device that has no streams here, and that host tensors do not mix with: MPS, say."""

    device = Device("mps", 0)


@pytest.mark.parametrize("mixing", [0.0, 0.25])
def test_a_model_on_another_device_than_cuda_is_written(mixing: float) -> None:
    cuda = Cuda()
    parameter = Elsewhere(cuda, torch.full((4,), 4.0))
    parameters = TorchParameters(Torch(cuda), {"w": parameter})
    parameters.apply(
        parameters.stage({"w": HostTensor(cuda, torch.full((4,), 8.0))}), mixing=mixing
    )
    cuda.training.run()
    assert parameter.values.tolist() == [8.0 - 4.0 * mixing] * 4
    assert cuda.streams == []
