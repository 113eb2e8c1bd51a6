"""Names are the model's own, whatever it is wrapped in."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as checkpointing
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gradientmail.backend.torch_names import places


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 1)
    )


PLAIN = ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias"]


def names(module: nn.Module) -> list[str]:
    return [place.name for place in places(module, "parameter")]


def wrapped_by_ddp(module: nn.Module) -> nn.Module:
    """As its constructor leaves it, without the process group that it asks for."""
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = module
    return wrapper


def compiled(module: nn.Module) -> nn.Module:
    """Wrapped for compilation; nothing is compiled before it runs."""
    wrapper = torch.compile(module)
    assert isinstance(wrapper, nn.Module)
    return wrapper


def inside(_: nn.Module) -> nn.Module:
    """One submodule compiled with a checkpointed one in it, another the other way round."""
    first, middle, last = model().children()
    assert isinstance(middle, nn.Sequential)
    checkpointed = checkpointing.checkpoint_wrapper(middle[0])
    whole = nn.Sequential(checkpointed, middle[1])
    return nn.Sequential(first, compiled(whole), checkpointing.checkpoint_wrapper(compiled(last)))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": compiled,
    "data parallel": DataParallel,
    "distributed": wrapped_by_ddp,
    "checkpoint": checkpointing.checkpoint_wrapper,
    "compiled distributed": lambda module: compiled(wrapped_by_ddp(module)),
    "distributed compiled": lambda module: wrapped_by_ddp(compiled(module)),
    "inside": inside,
}


def test_plain_names_are_torchs_own() -> None:
    assert names(model()) == PLAIN == [name for name, _ in model().named_parameters()]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_leave_no_trace(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(model())
    assert names(wrapped) == PLAIN
    assert {id(place.tensor) for place in places(wrapped, "parameter")} == {
        id(p) for p in wrapped.parameters()
    }


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_checkpoint_wrapped_module"])
def test_a_users_own_attribute_is_left_alone(name: str) -> None:
    outer = nn.Module()
    outer.add_module(name, nn.Linear(2, 2))
    assert names(outer) == [f"{name}.weight", f"{name}.bias"]
    assert names(compiled(outer)) == [f"{name}.weight", f"{name}.bias"]


def test_shared_modules_and_parameters_come_once_under_their_first_name() -> None:
    shared = nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = shared.weight
    outer = nn.ModuleDict({"b": shared, "a": shared, "c": tied})
    assert names(outer) == ["b.weight", "b.bias", "c.bias"]
    assert names(outer) == [name for name, _ in outer.named_parameters()]


def test_parametrized_parameters_have_torchs_names() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert names(layer) == [name for name, _ in layer.named_parameters()]
    assert "parametrizations.weight.original0" in names(layer)


def test_names_that_collide_without_the_wrapper_are_an_error() -> None:
    wrapper = wrapped_by_ddp(nn.Linear(2, 2))
    wrapper.register_parameter("weight", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match="'weight'"):
        names(wrapper)
