"""A dict of NumPy arrays as the exchange reads and writes it."""

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from gradientmail.backend.numpy import NumpyBackend
from gradientmail.backend.numpy_model import NumpyParameters
from gradientmail.schema import BITS, TensorSpec

BACKEND = NumpyBackend()
RNG = np.random.default_rng(1)

type Model = dict[str, Any]


def draw(*shape: int) -> Any:
    return RNG.standard_normal(shape, dtype=np.float32)


def mixed() -> Model:
    """Every kind of array that can be trained, and what is left alone."""
    whole = draw(6, 8)
    return {
        "plain": draw(3, 5),
        "short": draw(4).astype(np.float16),
        "brain": draw(2, 3).astype(ml_dtypes.bfloat16),
        "scalar": np.array(0.5, np.float32),
        "empty": np.empty((0, 3), np.float32),
        "transposed": draw(6, 2).T,
        "fortran": np.asfortranarray(draw(3, 4)),
        "left": whole[:, ::2],
        "right": whole[::-1, 1::2],
        "reversed": draw(5)[::-1],
        "swapped": draw(4).astype(">f4"),
        "subclass": draw(2, 2).view(np.recarray),
        "step": np.arange(3),
        "mask": np.zeros(2, bool),
    }


TRAINED = sorted(set(mixed()) - {"step", "mask"})


def host_arrays(parameters: NumpyParameters) -> Model:
    """Arrays for all parameters, with old content."""
    arrays = {}
    for spec in parameters.schema:
        memory = memoryview(bytearray(b"\xff" * (spec.count * BITS[spec.dtype] // 8)))
        arrays[spec.name] = BACKEND.array(memory, spec.dtype, spec.shape)
    return arrays


def captured(parameters: NumpyParameters) -> Model:
    arrays = host_arrays(parameters)
    parameters.capture(arrays)()
    return arrays


def moved(arrays: Mapping[str, Any]) -> Model:
    return {n: (x.astype(np.float32) * -0.5 + 1.0).astype(x.dtype) for n, x in arrays.items()}


def same(found: Any, expected: Any) -> bool:
    """Values, whatever the layout and the byte order."""
    return found.shape == expected.shape and bool((np.asarray(found) == expected).all())


def test_schema_holds_the_floating_arrays_sorted() -> None:
    schema = BACKEND.bind(mixed()).schema
    assert [spec.name for spec in schema] == TRAINED
    assert {spec.name: (spec.dtype, spec.shape) for spec in schema if len(spec.shape) != 2} == {
        "reversed": ("F32", (5,)),
        "scalar": ("F32", ()),
        "short": ("F16", (4,)),
        "swapped": ("F32", (4,)),
    }
    assert TensorSpec("brain", "BF16", (2, 3)) in schema


def test_any_layout_is_captured_in_logical_order() -> None:
    model = mixed()
    arrays = captured(BACKEND.bind(model))
    for name, array in arrays.items():
        assert array.flags.c_contiguous
        assert array.dtype.isnative
        assert same(model[name], array), name


@pytest.mark.parametrize("mixing", [0.0, 0.25, 0.5, 0.75])
def test_any_layout_is_written_in_place(mixing: float) -> None:
    model = mixed()
    parameters = BACKEND.bind(model)
    objects = dict(model)
    before, step = captured(parameters), model["step"].copy()
    target = moved(before)
    parameters.apply(parameters.stage(target), mixing=mixing)
    for name in TRAINED:
        assert model[name] is objects[name]
        x, y = before[name].astype(np.float64), target[name].astype(np.float64)
        bound = {"float16": 1e-3, "bfloat16": 8e-3}.get(model[name].dtype.name, 1e-6)
        found = np.asarray(model[name]).astype(np.float64)
        error = np.abs(found - (mixing * x + (1.0 - mixing) * y))
        assert (error <= (bound if mixing else 0.0)).all(), name
    assert same(model["step"], step)


@pytest.mark.parametrize("mixing", [0.1, 0.5, 0.9])
def test_equal_values_stay_equal_whatever_the_mixing(mixing: float) -> None:
    model = {"w": draw(1000), "s": draw(1000).astype(np.float16)}
    parameters = BACKEND.bind(model)
    before = captured(parameters)
    parameters.apply(before, mixing=mixing)
    assert all(same(model[name], x) for name, x in before.items())


def test_opposite_ends_of_the_range_mix_without_an_infinity() -> None:
    model = {"w": np.array([3e38, -3e38, 3e38], np.float32)}
    BACKEND.bind(model).apply({"w": np.array([-3e38, 3e38, 3e38], np.float32)}, mixing=0.5)
    assert model["w"].tolist() == [0.0, 0.0, float(np.float32(3e38))]


def test_large_arrays_of_odd_layout_in_pieces() -> None:
    """More than fits into one buffer of the iterator, forwards and back."""
    model = {"w": draw(300, 400).T[::-1], "h": draw(70_000).astype(np.float16)[::-1]}
    parameters = BACKEND.bind(model)
    before = captured(parameters)
    target = moved(before)
    parameters.apply(target, mixing=0.5)
    for name, x in before.items():
        expected = 0.5 * x.astype(np.float64) + 0.5 * target[name].astype(np.float64)
        assert np.abs(model[name] - expected).max() <= 1e-3
    model["w"][7, 250] = np.nan
    assert parameters.not_finite() == ["w"]


def test_an_array_that_was_replaced_is_the_one_trained() -> None:
    """``model["w"] = model["w"] - gradient`` is as good as ``-=``."""
    model = {"w": draw(4), "b": draw(2)}
    parameters, first = BACKEND.bind(model), model["w"]
    kept = first.copy()
    model["w"] = model["w"] - np.float32(1.0)
    arrays = captured(parameters)
    assert same(arrays["w"], kept - np.float32(1.0))
    parameters.apply(moved(arrays))
    assert same(model["w"], moved(arrays)["w"])
    assert same(first, kept)


def test_arithmetic_on_an_array_without_dimensions_gives_a_scalar_that_is_trained_on() -> None:
    """NumPy makes a scalar of it, which cannot be written in place: it becomes an array again."""
    model: Model = {"s": np.array(0.5, np.float32), "b": np.array(2.0, ml_dtypes.bfloat16)}
    parameters = BACKEND.bind(model)
    model["s"] = model["s"] - np.float32(0.25)
    model["b"] = (model["b"] * np.float32(2.0)).astype(ml_dtypes.bfloat16)
    arrays = captured(parameters)
    assert (float(arrays["s"]), float(arrays["b"])) == (0.25, 4.0)
    model["s"] = model["s"] - np.float32(1.0)
    assert parameters.not_finite() == []
    parameters.apply(arrays)
    assert (float(model["s"]), float(model["b"])) == (0.25, 4.0)
    model["s"] = np.float64(1.0)
    with pytest.raises(ValueError, match=r"'s' was F32\[\] .* and is float64 \[\]"):
        parameters.capture(arrays)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (np.zeros(4), r"'w' was F32\[4\] when the session began and is float64 \[4\]"),
        (np.zeros((2, 2), np.float32), r"is float32 \[2, 2\]"),
        (np.zeros(4, np.float16), r"is float16 \[4\]"),
        ([0.0] * 4, "is a list"),
        (None, "is gone"),
    ],
    ids=["float64", "shape", "half", "list", "none"],
)
def test_an_array_of_another_kind_since_is_an_error(other: object, message: str) -> None:
    model: Model = {"a": draw(2), "w": draw(4)}
    parameters = BACKEND.bind(model)
    arrays, before = captured(parameters), model["a"].copy()
    model["w"] = other
    for call in (parameters.capture, parameters.apply):
        with pytest.raises(ValueError, match=message):
            call(moved(arrays))
    with pytest.raises(ValueError, match=message):
        parameters.not_finite()
    assert same(model["a"], before)  # nothing is written when something cannot be


def test_an_array_that_has_gone_is_an_error() -> None:
    model = {"a": draw(2), "w": draw(4)}
    parameters = BACKEND.bind(model)
    arrays = captured(parameters)
    del model["w"]
    with pytest.raises(ValueError, match=r"'w' .* is gone"):
        parameters.capture(arrays)


def test_an_array_that_was_locked_since_is_an_error_and_nothing_is_written() -> None:
    model = {"a": draw(2), "w": draw(4)}
    parameters = BACKEND.bind(model)
    arrays, before = captured(parameters), model["a"].copy()
    model["w"].flags.writeable = False
    parameters.capture(arrays)
    with pytest.raises(ValueError, match=r"'w' is read-only.*\.copy\(\)"):
        parameters.apply(moved(arrays))
    assert same(model["a"], before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_looks_at_any_layout(bad: float) -> None:
    model = mixed()
    parameters = BACKEND.bind(model)
    assert parameters.not_finite() == []
    spoiled = ["brain", "fortran", "left", "scalar", "short", "swapped"]
    for name in spoiled:
        model[name][(-1,) * model[name].ndim] = bad
    assert parameters.not_finite() == spoiled


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "float64": (np.zeros(3), ValueError, r"'w' is float64; .*float16 or bfloat16.*astype"),
    "complex": (np.zeros(3, np.complex64), ValueError, r"'w' is complex64"),
    "text": (np.array(["a"]), ValueError, r"'w' is str"),
    "object": (np.array([None]), ValueError, r"'w' is object"),
    "records": (np.zeros(2, [("a", "f4")]), ValueError, r"'w' is void"),
    "fp8": (np.zeros(2, ml_dtypes.float8_e4m3fn), ValueError, r"'w' is float8_e4m3fn"),
    "scalar": (np.float32(1.0), TypeError, r"'w' is a float32.*np\.array\(model\['w'\]\)"),
    "number": (1.0, TypeError, r"'w' is a builtins\.float.*outside"),
    "list": ([1.0], TypeError, r"'w' is a builtins\.list"),
    "none": (None, TypeError, r"'w' is a builtins\.NoneType"),
    "nested": ({"v": np.zeros(2, np.float32)}, TypeError, r"'w' is a dict.*'block\.weight'"),
    "masked": (np.ma.zeros(3, np.float32), TypeError, r"'w' is a numpy\.ma.*MaskedArray"),
    "read-only": (np.frombuffer(bytes(8), np.float32), ValueError, r"'w' is read-only.*copy"),
    "broadcast": (
        as_strided(np.zeros(1, np.float32), (3,), (0,)),
        ValueError,
        r"one place in memory.*copy",
    ),
    "sliding": (
        as_strided(np.zeros(9, np.float32), (3, 4), (4, 8)),
        ValueError,
        r"one place in memory.*copy",
    ),
}


@pytest.mark.parametrize(("value", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_an_error(
    value: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        BACKEND.bind({"b": np.zeros(2, np.float32), "w": value})


@pytest.mark.parametrize("name", [3, None, b"w", ("a", "b")])
def test_names_are_strings(name: Any) -> None:
    with pytest.raises(TypeError, match="names of arrays are strings") as caught:
        BACKEND.bind({"b": draw(2), name: draw(2)})
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("model", [{}, {"step": np.arange(3)}], ids=["empty", "integers"])
def test_a_model_without_a_floating_array_is_an_error(model: Model) -> None:
    with pytest.raises(ValueError, match="no floating array"):
        BACKEND.bind(model)


def test_two_names_over_one_memory_are_an_error_that_names_both() -> None:
    whole, other = draw(6, 4), draw(4, 4)
    pairs: dict[str, tuple[Any, Any]] = {
        "one array": (whole, whole),
        "views of one": (whole[:], whole[:]),
        "transposed": (whole, whole.T),
        "a part": (whole, whole[2:3]),
        "rows that meet": (whole[:4], whole[3:]),
        "a row and a column": (whole[2], whole[:, 1]),
        "other elements, other dtype": (whole, whole.view(np.float16)[:, 1]),
        "a diagonal": (other, as_strided(other, (4,), (20,))),
    }
    for x, y in pairs.values():
        for model in ({"x": x, "other": other * 2, "y": y}, {"y": y, "x": x}):
            with pytest.raises(ValueError, match=r"'x' and 'y' share memory.*copy"):
                BACKEND.bind(model)
        BACKEND.bind({"x": x, "y": y.copy()})


def test_views_that_do_not_meet_are_fine() -> None:
    """Also between each other's elements, as in one flat vector of all parameters."""
    flat = draw(40)
    model = {
        "w": flat[:12].reshape(3, 4),
        "b": flat[12:16],
        "even": flat[16:30:2],
        "odd": flat[17:30:2],
        "empty": flat[20:20],
        "rest": flat[30:][::-1],
    }
    parameters = BACKEND.bind(model)
    target = moved(captured(parameters))
    parameters.apply(target)
    for name, x in target.items():
        assert same(model[name], x), name


def test_many_arrays_are_checked_quickly() -> None:
    """Comparing each with each would take minutes."""
    flat = np.zeros(200_000, np.float32)
    model = {f"block.{i}": flat[10 * i : 10 * i + 10] for i in range(20_000)}
    assert len(BACKEND.bind(model).schema) == 20_000


def test_what_is_loaded_anew_each_time_is_an_error(tmp_path: Any) -> None:
    """A ``NpzFile`` is a mapping, and what is written into its arrays is lost."""
    np.savez(tmp_path / "model.npz", w=draw(3))
    with np.load(tmp_path / "model.npz") as stored:
        with pytest.raises(TypeError, match=r"another array 'w' each time.*pass a dict"):
            BACKEND.bind(stored)
        assert len(BACKEND.bind(dict(stored)).schema) == 1


def test_a_file_in_memory_is_written_through(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "w.bin", np.float32, "w+", shape=(4, 4))
    parameters = BACKEND.bind({"w": mapped})
    parameters.apply({"w": np.ones((4, 4), np.float32)})
    mapped.flush()
    assert (np.fromfile(tmp_path / "w.bin", np.float32) == 1.0).all()
    with pytest.raises(ValueError, match="read-only"):
        BACKEND.bind({"w": np.memmap(tmp_path / "w.bin", np.float32, "r", shape=(4, 4))})
