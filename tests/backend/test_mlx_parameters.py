"""An MLX model as the exchange reads and writes it."""

import gc
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.utils import tree_flatten

from gradientmail.backend.mlx import MlxBackend, MlxParameters
from gradientmail.schema import BITS, TensorSpec

BACKEND = MlxBackend()


class Mixed(nn.Module):
    """Every kind of parameter that can be exchanged, and what is none."""

    def __init__(self) -> None:
        super().__init__()
        key = mx.random.key(1)

        def draw(*shape: int) -> mx.array:
            return mx.random.normal(shape, key=key)

        self.plain = draw(3, 5)
        self.short = draw(4).astype(mx.float16)
        self.brain = draw(2, 3).astype(mx.bfloat16)
        self.scalar = draw()
        self.empty = draw(0, 3)
        self.transposed = draw(6, 2).T
        self.brain_transposed = draw(3, 4).astype(mx.bfloat16).T
        self.expanded = mx.broadcast_to(draw(1, 4), (3, 4))
        self.sliced = draw(8)[::2]
        self.part = draw(4, 6)[1:3]
        self.frozen = draw(7)
        self.layers: list[Any] = [nn.Linear(2, 3), {"inner": draw(2), "sizes": [1, 2]}]
        self._hidden = draw(5)
        self.rate = 0.1
        self.freeze(recurse=False, keys=["frozen"])


def values(model: nn.Module) -> dict[str, np.ndarray]:
    """What the exchanged parameters hold now, as float32, on the thread of the model."""
    flat = tree_flatten(model.trainable_parameters())
    arrays = {name: array for name, array in flat if isinstance(array, mx.array)}
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}


def host_arrays(parameters: MlxParameters) -> dict[str, Any]:
    """Arrays for all parameters, with old content."""
    arrays = {}
    for spec in parameters.schema:
        memory = memoryview(bytearray(b"\xff" * (spec.count * BITS[spec.dtype] // 8)))
        arrays[spec.name] = BACKEND.array(memory, spec.dtype, spec.shape)
    return arrays


def captured(parameters: MlxParameters) -> dict[str, Any]:
    arrays = host_arrays(parameters)
    parameters.capture(arrays)()
    return arrays


def moved(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Other values of the same dtypes and shapes."""
    return {name: (x.astype(np.float32) * -0.5 + 1.0).astype(x.dtype) for name, x in arrays.items()}


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        np.array_equal(np.asarray(found[name]).astype(np.float32), x.astype(np.float32))
        for name, x in expected.items()
    )


def on_a_thread[T](work: Callable[[], T]) -> T:
    """What ``work`` returns on another thread."""
    results: list[T] = []
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def test_schema_holds_the_trainable_parameters_sorted() -> None:
    assert BACKEND.bind(Mixed()).schema == (
        TensorSpec("brain", "BF16", (2, 3)),
        TensorSpec("brain_transposed", "BF16", (4, 3)),
        TensorSpec("empty", "F32", (0, 3)),
        TensorSpec("expanded", "F32", (3, 4)),
        TensorSpec("layers.0.bias", "F32", (3,)),
        TensorSpec("layers.0.weight", "F32", (3, 2)),
        TensorSpec("layers.1.inner", "F32", (2,)),
        TensorSpec("part", "F32", (2, 6)),
        TensorSpec("plain", "F32", (3, 5)),
        TensorSpec("scalar", "F32", ()),
        TensorSpec("short", "F16", (4,)),
        TensorSpec("sliced", "F32", (4,)),
        TensorSpec("transposed", "F32", (2, 6)),
    )


def test_capture_copies_in_logical_order_whatever_lies_in_memory() -> None:
    model = Mixed()
    assert same(captured(BACKEND.bind(model)), values(model))


def change_in_place(model: Mixed) -> None:
    model.plain[0] = 7.0
    model.plain += 3.0
    model.part *= 2.0


def change_by_update(model: Mixed) -> None:
    model.update({"plain": model.plain * 2.0, "layers": [{"weight": mx.zeros((3, 2))}]})


def change_by_training(model: Mixed) -> None:
    def loss(model: Mixed) -> mx.array:
        flat: Any = tree_flatten(model.trainable_parameters())
        return sum((x.astype(mx.float32).square().sum() for _, x in flat), mx.array(0.0))

    model.layers[1].pop("sizes")  # MLX's optimizers want arrays alone
    optimizer = optimizers.SGD(learning_rate=0.1)
    for _ in range(3):
        _, gradients = nn.value_and_grad(model, loss)(model)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)


@pytest.mark.parametrize("change", [change_in_place, change_by_update, change_by_training])
@pytest.mark.parametrize("evaluated", [False, True])
def test_capture_is_of_that_moment(change: Callable[[Mixed], None], evaluated: bool) -> None:
    """The copy runs on another thread, as the session has it, and finds no later value."""
    model = Mixed()
    parameters = BACKEND.bind(model)
    before = values(model)
    if evaluated:
        mx.eval(model.parameters())
    arrays = host_arrays(parameters)
    wait = parameters.capture(arrays)
    change(model)
    mx.eval(model.parameters())
    assert not same(before, values(model))
    on_a_thread(wait)
    wait()
    assert same(arrays, before)


def test_a_copy_that_failed_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    parameters = BACKEND.bind(model)
    arrays = host_arrays(parameters)
    wait = parameters.capture(arrays)

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "copyto", full)
    with pytest.raises(MemoryError):
        wait()
    monkeypatch.undo()
    wait()
    assert same(arrays, values(model))


def test_a_snapshot_holds_its_memory_until_it_is_copied_and_no_longer() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    parameters = BACKEND.bind(model)
    arrays = host_arrays(parameters)
    wait = parameters.capture(arrays)
    gc.collect()
    model.weight = mx.zeros((1000, 1000))
    mx.eval(model.weight)
    before = mx.get_active_memory()
    wait()
    assert before - mx.get_active_memory() == 4_000_000


def test_capture_of_some_parameters() -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    arrays = {name: array for name, array in host_arrays(parameters).items() if name == "short"}
    parameters.capture(arrays)()
    assert same(arrays, {"short": values(model)["short"]})
    parameters.capture({})()


def test_apply_changes_the_trainable_arrays_alone() -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    frozen, hidden, layer = np.array(model.frozen), np.array(model._hidden), model.layers[0]
    target = moved(captured(parameters))
    parameters.apply(parameters.stage(target))
    assert same(values(model), target)
    assert model.layers[0] is layer
    assert model.brain.dtype == mx.bfloat16
    assert model.layers[1]["sizes"] == [1, 2]
    assert np.array_equal(np.array(model.frozen), frozen)
    assert np.array_equal(np.array(model._hidden), hidden)
    assert BACKEND.bind(model).schema == parameters.schema


@pytest.mark.parametrize("mixing", [0.25, 0.5, 0.75])
def test_apply_mixes_and_rounds_once(mixing: float) -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    before = captured(parameters)
    target = moved(before)
    parameters.apply(parameters.stage(target), mixing=mixing)
    after = captured(parameters)
    for name, x in before.items():
        theta, committed = x.astype(np.float64), target[name].astype(np.float64)
        expected = mixing * theta + (1.0 - mixing) * committed
        if x.dtype != np.float32:
            rounded = expected.astype(np.float32).astype(x.dtype)
            assert np.array_equal(after[name].astype(np.float32), rounded.astype(np.float32))
        else:
            assert np.allclose(after[name], expected, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("mixing", [0.1, 0.3, 0.7])
def test_mixing_leaves_what_is_equal_alone_and_the_largest_values_finite(mixing: float) -> None:
    model = nn.Linear(50, 50)
    model.bias = mx.array([3.4e38, -3.4e38] * 25)
    parameters = BACKEND.bind(model)
    before = captured(parameters)
    parameters.apply(parameters.stage(before), mixing=mixing)
    assert same(values(model), before)
    parameters.apply(parameters.stage({"bias": -before["bias"]}), mixing=mixing)
    assert parameters.not_finite() == []


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_read_only_arrays_can_be_applied(mixing: float) -> None:
    for dtype, width in (("F32", 4), ("F16", 2), ("BF16", 2)):
        model = nn.Linear(4, 4, bias=False)
        model.set_dtype({"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}[dtype])
        parameters = BACKEND.bind(model)
        array = BACKEND.array(memoryview(bytes(16 * width)), dtype, (4, 4))
        before = values(model)["weight"]
        parameters.apply(parameters.stage({"weight": array}), mixing=mixing)
        assert np.array_equal(values(model)["weight"], before * np.float32(mixing))


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_after_an_alignment_every_thread_can_read_the_model(mixing: float) -> None:
    """MLX refuses to evaluate on one thread what another has left unevaluated."""
    model = Mixed()
    parameters = BACKEND.bind(model)
    arrays = captured(parameters)
    staged = on_a_thread(lambda: parameters.stage(moved(arrays)))
    parameters.apply(staged, mixing=mixing)
    seen = on_a_thread(lambda: captured(parameters))
    assert mixing or same(seen, moved(arrays))


def test_staged_arrays_are_copies() -> None:
    model = nn.Linear(2, 2, bias=False)
    parameters = BACKEND.bind(model)
    arrays = captured(parameters)
    staged, before = parameters.stage(arrays), values(model)
    arrays["weight"][:] = 9.0
    parameters.apply(staged)
    assert same(values(model), before)


def training(model: nn.Module, optimizer: optimizers.Optimizer) -> Callable[[mx.array], mx.array]:
    """One step, not compiled."""

    def loss(x: mx.array) -> mx.array:
        return (model(x) - x.sum(1, keepdims=True)).square().mean()

    gradients = nn.value_and_grad(model, loss)

    def step(x: mx.array) -> mx.array:
        found, by = gradients(x)
        optimizer.update(model, by)
        return found

    return step


@pytest.mark.parametrize("compiled", [False, True])
def test_optimizer_state_survives_and_the_training_goes_on_from_what_was_aligned(
    compiled: bool,
) -> None:
    """Compiled or not: what comes out is what comes out where the values were there before."""

    def run(aligned: bool) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        mx.random.seed(3)
        model, optimizer = nn.Linear(3, 3), optimizers.SGD(learning_rate=0.1, momentum=0.9)
        step = training(model, optimizer)
        if compiled:
            state = [model.state, optimizer.state]
            step = partial(mx.compile, inputs=state, outputs=state)(step)
        x = mx.random.normal((4, 3), key=mx.random.key(5))
        for _ in range(3):
            mx.eval(step(x), model.parameters(), optimizer.state)
        parameters = BACKEND.bind(model)
        target = moved(captured(parameters))
        if aligned:
            parameters.apply(parameters.stage(target))
        else:
            model.update({name: mx.array(array) for name, array in target.items()})
        for _ in range(3):
            mx.eval(step(x), model.parameters(), optimizer.state)
        velocity = [np.array(v) for _, v in tree_flatten(optimizer.state)]
        return values(model), velocity

    found, momentum = run(aligned=True)
    expected, other = run(aligned=False)
    assert same(found, expected)
    assert len(momentum) == len(other) > 2
    assert all(np.array_equal(a, b) for a, b in zip(momentum, other, strict=True))


def test_a_model_whose_arrays_were_replaced_is_still_the_one_exchanged() -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    model.layers = [nn.Linear(2, 3), {"inner": mx.ones(2)}]
    assert same(captured(parameters), values(model))
    target = moved(captured(parameters))
    parameters.apply(parameters.stage(target))
    assert same(values(model), target)


def test_freezing_later_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parameters = BACKEND.bind(model)
    before = values(model)
    model.freeze()
    assert same(captured(parameters), before)


def test_a_model_of_another_kind_since_is_an_error() -> None:
    model = nn.Linear(3, 3)
    parameters = BACKEND.bind(model)
    arrays = host_arrays(parameters)
    staged = parameters.stage(captured(parameters))
    model.set_dtype(mx.bfloat16)
    before = values(model)
    for refused in (partial(parameters.capture, arrays), partial(parameters.apply, staged)):
        with pytest.raises(ValueError, match=r"'(weight|bias)' was .*F32.* is mlx.core.bfloat16"):
            refused()
    assert same(values(model), before)
    del model["weight"]
    with pytest.raises(ValueError, match=r"'weight' was .* is gone"):
        parameters.not_finite()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_names_the_parameters(bad: float) -> None:
    model = Mixed()
    parameters = BACKEND.bind(model)
    assert parameters.not_finite() == []
    model.frozen[0] = bad
    model.scalar = mx.array(bad)
    model.brain[1, 2] = bad
    model.short[0] = bad
    model.layers[1]["inner"][1] = bad
    assert parameters.not_finite() == ["brain", "layers.1.inner", "scalar", "short"]


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [(mx.float32, 3.4028234e38), (mx.float16, 65504.0), (mx.bfloat16, 3.38e38)],
)
def test_largest_values_are_finite(dtype: mx.Dtype, largest: float) -> None:
    model = nn.Linear(50, 50)
    model.set_dtype(dtype)
    model.weight = mx.full((50, 50), largest, dtype)
    assert BACKEND.bind(model).not_finite() == []


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.bool_, mx.complex64])
def test_other_dtypes_are_errors_that_name_the_parameter(dtype: mx.Dtype) -> None:
    odd = nn.Linear(2, 2)
    odd.weight = mx.zeros((2, 2), dtype)
    model = nn.Sequential(nn.Linear(2, 2), odd)
    with pytest.raises(ValueError, match=rf"'layers\.1\.weight' is {dtype}.*freeze"):
        BACKEND.bind(model)
    odd.freeze()
    assert [spec.name for spec in BACKEND.bind(model).schema] == [
        "layers.0.bias",
        "layers.0.weight",
    ]


class Tied(nn.Module):
    """An embedding that is the output layer, too, in one of the two wrong ways."""

    def __init__(self, *, module: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = self.embed if module else nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("module", [False, True], ids=["one array", "one module"])
def test_tied_arrays_are_refused_in_words_that_say_what_to_do(module: bool) -> None:
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' .*as_linear") as caught:
        BACKEND.bind(Tied(module=module))
    assert "underscore" in str(caught.value)


def test_what_the_refusal_of_ties_says_is_so() -> None:
    model = Tied(module=False)
    gradients = nn.value_and_grad(model, lambda: model.head(model.embed(mx.array([1, 2]))).sum())
    optimizer = optimizers.SGD(learning_rate=0.1)
    optimizer.update(model, gradients()[1])
    assert not mx.array_equal(model.embed.weight, model.head.weight)
    mended = Tied(module=False)
    mended._head = mended.head
    del mended["head"]
    assert [spec.name for spec in BACKEND.bind(mended).schema] == ["embed.weight"]


def test_names_that_collide_are_refused() -> None:
    model = nn.Module()
    model.a = {"b.c": mx.ones(2), "b": {"c": mx.ones(2)}}
    with pytest.raises(ValueError, match=r"both called 'a\.b\.c'"):
        BACKEND.bind(model)


def test_a_model_without_trainable_parameters_is_an_error() -> None:
    model = nn.Linear(2, 2)
    model.freeze()
    for nothing in (model, nn.ReLU()):
        with pytest.raises(ValueError, match=r"no trainable parameter: .*frozen"):
            BACKEND.bind(nothing)


@pytest.mark.parametrize("thing", [None, 3, [mx.ones(2)], {"w": mx.ones(2)}, mx.ones(2)])
def test_what_is_no_module_is_a_type_error(thing: object) -> None:
    with pytest.raises(TypeError, match=r"an mlx\.nn\.Module, not a"):
        BACKEND.bind(thing)


def test_parameters_that_another_thread_has_not_evaluated_are_an_error_that_says_so() -> None:
    def make() -> nn.Linear:
        model = nn.Linear(3, 3)
        model.weight = model.weight * 2.0
        return model

    parameters = BACKEND.bind(on_a_thread(make))
    arrays = host_arrays(parameters)
    for work in (partial(parameters.capture, arrays), parameters.not_finite):
        with pytest.raises(RuntimeError) as caught:
            work()
        assert "mx.eval(model.parameters())" in "".join(caught.value.__notes__)
