"""A PyTorch model as the exchange reads and writes it."""

import math
import warnings
from collections.abc import Mapping

import pytest
import torch
from tests.backend.arrays import assert_near
from torch import nn

from gradientmail.backend.torch import TorchBackend
from gradientmail.backend.torch_model import TorchParameters
from gradientmail.schema import BITS, TensorSpec

BACKEND = TorchBackend()


class Mixed(nn.Module):
    """Every kind of parameter that can be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng)

        self.plain = nn.Parameter(draw(3, 5))
        self.short = nn.Parameter(draw(4).half())
        self.brain = nn.Parameter(draw(2, 3).bfloat16())
        self.scalar = nn.Parameter(draw())
        self.empty = nn.Parameter(draw(0, 3))
        self.transposed = nn.Parameter(draw(6, 2).t())
        self.channels_last = nn.Parameter(draw(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.expanded = nn.Parameter(draw(1, 4).expand(3, 4))
        self.sliced = nn.Parameter(draw(8)[::2])
        self.frozen = nn.Parameter(draw(7), requires_grad=False)
        self.register_buffer("statistics", draw(7))


def host_arrays(parameters: TorchParameters) -> dict[str, torch.Tensor]:
    """Arrays for all parameters, with old content."""
    arrays = {}
    for spec in parameters.schema:
        memory = memoryview(bytearray(b"\xff" * (spec.count * BITS[spec.dtype] // 8)))
        arrays[spec.name] = BACKEND.array(memory, spec.dtype, spec.shape)
    return arrays


def captured(parameters: TorchParameters) -> dict[str, torch.Tensor]:
    arrays = host_arrays(parameters)
    parameters.capture(arrays)()
    return arrays


def moved(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other values, equal along the dimension that ``Mixed.expanded`` repeats."""
    return {name: (x.float() * -0.5 + 1.0).to(x.dtype) for name, x in arrays.items()}


def test_schema_holds_the_trainable_parameters_sorted() -> None:
    assert BACKEND.bind(Mixed()).schema == (
        TensorSpec("brain", "BF16", (2, 3)),
        TensorSpec("channels_last", "F32", (2, 3, 4, 4)),
        TensorSpec("empty", "F32", (0, 3)),
        TensorSpec("expanded", "F32", (3, 4)),
        TensorSpec("plain", "F32", (3, 5)),
        TensorSpec("scalar", "F32", ()),
        TensorSpec("short", "F16", (4,)),
        TensorSpec("sliced", "F32", (4,)),
        TensorSpec("transposed", "F32", (2, 6)),
    )


def test_capture_copies_in_logical_order() -> None:
    model = Mixed()
    arrays = captured(BACKEND.bind(model))
    for name, array in arrays.items():
        assert array.is_contiguous()
        assert not array.requires_grad
        assert torch.equal(array, model.get_parameter(name).detach())


def test_capture_is_of_that_moment() -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arrays = host_arrays(parameters)
    wait = parameters.capture(arrays)
    with torch.no_grad():
        model.plain.mul_(3.0)
        model.transposed.zero_()
    wait()
    wait()
    for name, array in arrays.items():
        assert torch.equal(array, before[name])


def test_capture_of_some_parameters() -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    arrays = {name: array for name, array in host_arrays(parameters).items() if name == "short"}
    parameters.capture(arrays)()
    assert torch.equal(arrays["short"], model.short.detach())
    parameters.capture({})()


def test_apply_writes_in_place() -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    objects = {name: (p, p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    frozen, statistics = model.frozen.detach().clone(), model.statistics.clone()
    target = moved(captured(parameters))
    parameters.apply(parameters.stage(target))
    for name, p in model.named_parameters():
        assert objects[name] == (p, p.data_ptr(), p.stride())
        if name != "frozen":
            assert p.requires_grad
            assert torch.equal(p.detach(), target[name]), name
    assert torch.equal(model.frozen.detach(), frozen)
    assert torch.equal(model.statistics, statistics)


@pytest.mark.parametrize("mixing", [0.25, 0.5, 0.75])
def test_apply_mixes(mixing: float) -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    before = captured(parameters)
    target = moved(before)
    parameters.apply(parameters.stage(target), mixing=mixing)
    for name, x in before.items():
        expected = mixing * x.double() + (1.0 - mixing) * target[name].double()
        bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[x.dtype]
        assert_near(model.get_parameter(name).detach(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_read_only_arrays_can_be_applied(mixing: float) -> None:
    model = nn.Linear(4, 4, bias=False)
    parameters = BACKEND.bind(model)
    array = BACKEND.array(memoryview(bytes(64)), "F32", (4, 4))
    before = model.weight.detach().clone()
    parameters.apply(parameters.stage({"weight": array}), mixing=mixing)
    assert torch.equal(model.weight.detach(), before * mixing)


def test_arrays_made_in_inference_mode_are_written_outside() -> None:
    """Of a search without gradients, whose snapshot becomes a delta on another thread."""
    model = nn.Linear(4, 4)
    parameters = BACKEND.bind(model)
    with torch.inference_mode():
        arrays = captured(parameters)
        parameters.apply(parameters.stage(arrays), mixing=0.5)
    BACKEND.subtract(arrays["weight"], arrays["weight"], arrays["weight"])
    assert arrays["weight"].count_nonzero() == 0


def test_ties_and_optimizer_state_survive() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    parameters = BACKEND.bind(model)
    assert [spec.name for spec in parameters.schema] == ["0.bias", "0.weight", "1.bias"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state[first.weight]["momentum_buffer"].clone()
    parameters.apply(moved(captured(parameters)))
    assert first.weight is second.weight
    assert torch.equal(optimizer.state[first.weight]["momentum_buffer"], state)
    optimizer.step()


def test_autograd_does_not_notice() -> None:
    """A graph made before an exchange still runs backward after it, and so does a new one."""
    model = nn.Linear(3, 3)
    parameters = BACKEND.bind(model)
    versions = [p._version for p in model.parameters()]
    inputs = torch.ones(2, 3, requires_grad=True)
    loss = model(inputs).square().sum()
    arrays = captured(parameters)
    parameters.apply(moved(arrays))
    assert [p._version for p in model.parameters()] == versions
    loss.backward()
    assert all(p.grad is not None and p.grad_fn is None for p in model.parameters())
    model(inputs).sum().backward()


def test_a_model_that_was_moved_is_still_the_one_exchanged() -> None:
    """``Module.to`` puts other storage under the parameters."""
    model = nn.Linear(3, 3)
    parameters = BACKEND.bind(model)
    for p in model.parameters():
        p.data = p.data.clone().add_(1.0)
    arrays = captured(parameters)
    assert torch.equal(arrays["weight"], model.weight.detach())
    parameters.apply(moved(arrays))
    assert torch.equal(model.weight.detach(), moved(arrays)["weight"])


def test_a_model_of_another_dtype_since_is_an_error() -> None:
    model = nn.Linear(3, 3)
    parameters = BACKEND.bind(model)
    arrays = host_arrays(parameters)
    model.bfloat16()
    with pytest.raises(ValueError, match=r"'bias' is torch\.bfloat16 .* torch\.float32"):
        parameters.capture(arrays)
    with pytest.raises(ValueError, match=r"'bias' is torch\.bfloat16"):
        parameters.apply(arrays)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_names_the_parameters(bad: float) -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    assert parameters.not_finite() == []
    with torch.no_grad():
        model.frozen[0] = bad
        model.scalar.fill_(bad)
        model.brain[1, 2] = bad
        model.short[0] = bad
        model.transposed[1, 3] = bad
    assert parameters.not_finite() == ["brain", "scalar", "short", "transposed"]


def test_largest_values_are_finite() -> None:
    model = nn.Linear(50, 50)
    with torch.no_grad():
        model.weight.fill_(torch.finfo(torch.float32).max)
    assert BACKEND.bind(model).not_finite() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_are_errors_that_name_the_parameter(dtype: torch.dtype) -> None:
    odd = nn.Linear(2, 2)
    odd.weight = nn.Parameter(torch.zeros(2, 2, dtype=dtype))
    model = nn.Sequential(nn.Linear(2, 2), odd)
    with pytest.raises(ValueError, match=rf"'1\.weight' is {dtype}.*requires_grad=False"):
        BACKEND.bind(model)
    odd.weight.requires_grad = False
    assert len(BACKEND.bind(model).schema) == 3


def test_parameters_without_memory_are_errors() -> None:
    with pytest.raises(ValueError, match=r"'bias' .*meta"):
        BACKEND.bind(nn.Linear(2, 2, device="meta"))
    sparse = nn.Module()
    sparse.register_parameter("weight", nn.Parameter(torch.eye(3).to_sparse()))
    with pytest.raises(ValueError, match=r"'weight' .*sparse"):
        BACKEND.bind(sparse)


def test_parameters_that_negate_their_memory_are_errors_that_say_what_to_do() -> None:
    """PyTorch cannot copy into several of them at once, and says so in words of its own."""
    model = nn.Module()
    values = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    model.register_parameter("weight", nn.Parameter(values))
    with pytest.raises(ValueError, match=r"'weight' .*negates.*resolve_neg"):
        BACKEND.bind(model)
    model.register_parameter("weight", nn.Parameter(values.resolve_neg()))
    assert [spec.name for spec in BACKEND.bind(model).schema] == ["weight"]


def test_parameters_without_a_shape_are_errors_that_say_what_to_do() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions say that lazy modules may change
        model = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="'bias' has no shape yet; run the model once"):
        BACKEND.bind(model)


def test_a_model_without_trainable_parameters_is_an_error() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        BACKEND.bind(nn.Linear(2, 2).requires_grad_(requires_grad=False))
    with pytest.raises(ValueError, match="no trainable parameter"):
        BACKEND.bind(nn.ReLU())


@pytest.mark.parametrize("thing", [None, 3, [torch.ones(2)], {"w": torch.ones(2)}, torch.ones(2)])
def test_what_is_no_module_is_a_type_error(thing: object) -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        BACKEND.bind(thing)
