"""Parameters of one memory: each commit would write one over the other, unless they are apart."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pytest
import torch
from tests.session.models import QUICK, train_until
from torch import nn

import gradientmail as gm
from gradientmail.backend.torch import TorchBackend
from gradientmail.backend.torch_memory import check_memory

type Pair = tuple[torch.Tensor, torch.Tensor]


class Two(nn.Module):
    """A model of two parameters, made of two tensors that may share memory."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sum(1, keepdim=True) * self.a.sum()) + self.b.sum()


def tied() -> Pair:
    x = torch.ones(6, 6)
    return x, x.view(36)


def transposed() -> Pair:
    x = torch.ones(6, 5)
    return x, x.t()


def overlapping() -> Pair:
    x = torch.ones(40)
    return x[:25], x[24:]


def one_row_of_columns() -> Pair:
    x = torch.ones(6, 8)
    return x[:, :5], x[5, 4:]


def of_two_dtypes() -> Pair:
    x = torch.ones(8)
    return x[:4], x.view(torch.bfloat16)[7:]


def expanded() -> Pair:
    x = torch.ones(3)
    return x[:1].expand(5), x


def of_two_storages() -> Pair:
    """Over one NumPy array, each with a storage object of its own."""
    x = np.ones(12, dtype=np.float32)
    return torch.from_numpy(x), torch.from_numpy(x[4:8])


def of_one_buffer() -> Pair:
    x = bytearray(48)
    return torch.frombuffer(x, dtype=torch.float32), torch.frombuffer(
        x, dtype=torch.bfloat16, offset=20
    )


def storages_apart() -> Pair:
    x = np.ones(12, dtype=np.float32)
    return torch.from_numpy(x[:6]), torch.from_numpy(x[6:])


def apart() -> Pair:
    x = torch.ones(40)
    return x[:25], x[25:]


def columns() -> Pair:
    x = torch.ones(6, 8)
    return x[:, :5], x[:, 5:]


def dtypes_apart() -> Pair:
    x = torch.ones(8)
    return x[:4], x.view(torch.bfloat16)[8:]


def empty() -> Pair:
    x = torch.ones(4)
    return x, x[2:2]


def expanded_apart() -> Pair:
    x = torch.ones(4)
    return x[:1].expand(5), x[1:]


@pytest.mark.parametrize(
    "make",
    [
        tied,
        transposed,
        overlapping,
        one_row_of_columns,
        of_two_dtypes,
        expanded,
        of_two_storages,
        of_one_buffer,
    ],
)
def test_what_shares_memory_is_refused_by_name(make: Callable[[], Pair]) -> None:
    model = Two(*make())
    with pytest.raises(ValueError, match="'a' and 'b' share memory"):
        TorchBackend().bind(model)
    with pytest.raises(ValueError, match=r"without \.data"):
        gm.Session(
            model, algorithm=gm.DiLoCo(sync_every=2, fragments=2), mailbox=gm.MemoryMailbox()
        )


@pytest.mark.parametrize(
    "make", [apart, columns, dtypes_apart, empty, expanded_apart, storages_apart]
)
def test_views_beside_each_other_are_two_parameters(make: Callable[[], Pair]) -> None:
    assert [spec.name for spec in TorchBackend().bind(Two(*make())).schema] == ["a", "b"]


def test_the_two_that_share_are_named_among_many() -> None:
    x = torch.ones(10, 10)
    model = nn.ParameterDict({f"p{i}": nn.Parameter(x[:, i]) for i in range(8)})
    model["q"] = nn.Parameter(x[3, 5:])
    with pytest.raises(ValueError, match="'p5' and 'q' share memory"):
        TorchBackend().bind(model)


def test_a_buffer_that_is_averaged_must_not_lie_in_a_parameter() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("mean", model.weight.detach()[0])
    assert len(TorchBackend().bind(model).schema) == 2
    with pytest.raises(ValueError, match="'mean' and 'weight' share memory"):
        TorchBackend().bind_with_buffers(model)


def test_columns_of_one_matrix_train_to_what_was_committed() -> None:
    model, mailbox = Two(*columns()), gm.MemoryMailbox()
    algorithm = gm.DiLoCo(sync_every=2, fragments=2)
    with gm.Session(model, algorithm=algorithm, mailbox=mailbox, callbacks=(), **QUICK) as session:
        train_until(session, model, 6)
    other = Two(torch.zeros(6, 5), torch.zeros(6, 3))
    gm.align(other, mailbox=mailbox)
    assert torch.equal(model.a, other.a)
    assert torch.equal(model.b, other.b)


class Scaled(nn.Parameter):
    """A class of one's own over ordinary memory."""


def test_parameters_of_a_subclass_are_looked_at() -> None:
    model, x = nn.Module(), torch.ones(8)
    model.a, model.b = Scaled(x), Scaled(x[4:])
    with pytest.raises(ValueError, match="'a' and 'b' share memory"):
        TorchBackend().bind(model)


class NoMemory(torch.Tensor):
    """A tensor whose elements lie nowhere."""

    def __new__(cls) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError


def test_tensors_without_memory_share_none() -> None:
    check_memory({"a": NoMemory(), "b": NoMemory(), "c": torch.ones(4)})


def test_parameters_put_over_one_memory_later_are_refused_at_the_next_snapshot() -> None:
    model, backend = Two(torch.ones(4), torch.ones(4)), TorchBackend()
    parameters = backend.bind(model)
    arrays = {
        spec.name: backend.array(backend.pool().take(spec.nbytes), spec.dtype, spec.shape)
        for spec in parameters.schema
    }
    parameters.capture(arrays)()
    model.b.data = model.b.data.clone()  # elsewhere, and by itself
    parameters.capture(arrays)()
    model.b.data = model.a.data
    for _ in range(2):
        with pytest.raises(ValueError, match="'a' and 'b' share memory"):
            parameters.capture(arrays)


class Elsewhere:
    """A tensor of a device whose ``data_ptr`` stands for a storage and is no address."""

    device = torch.device("mps")

    def __init__(self, handle: int, offset: int) -> None:
        self.handle, self.offset = handle, offset
        self.shape, self.tensor = torch.Size((100,)), torch.ones(100)

    def data_ptr(self) -> int:
        return self.handle + 4 * self.offset

    def untyped_storage(self) -> "Elsewhere":
        return Elsewhere(self.handle, 0)

    def storage_offset(self) -> int:
        return self.offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def test_handles_are_not_taken_for_addresses() -> None:
    """Of two storages they may lie closer together than their tensors are long."""
    check_memory({"a": Elsewhere(1000, 0), "b": Elsewhere(1256, 0)})  # type: ignore[dict-item]
    check_memory({"a": Elsewhere(1000, 0), "b": Elsewhere(1000, 100)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'a' and 'b' share memory"):
        check_memory({"a": Elsewhere(1000, 0), "b": Elsewhere(1000, 99)})  # type: ignore[dict-item]
