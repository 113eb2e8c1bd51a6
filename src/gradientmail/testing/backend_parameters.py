"""The part of the backend contract about models: how parameters are read and written."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from gradientmail.backend.base import Backend, Parameters
from gradientmail.schema import TensorSpec
from gradientmail.testing.backend_arithmetic import DTYPES, assert_near, wide
from gradientmail.testing.backend_values import (
    Floats,
    Placed,
    blank,
    draw,
    put,
    put_bytes,
    raw,
)

type Tensors = Mapping[str, tuple[str, Floats]]
"""Dtype (F32, F16 or BF16) and values of each parameter, by name; names have no dots."""

SPECS = (
    TensorSpec("brain", "BF16", (2, 3)),
    TensorSpec("empty", "F32", (0, 3)),
    TensorSpec("plain", "F32", (33, 5)),
    TensorSpec("scalar", "F32", ()),
    TensorSpec("short", "F16", (4,)),
)
ROUNDING = {"F32": 1e-6, "F16": 1e-3, "BF16": 8e-3}
mixings = pytest.mark.parametrize("mixing", [0.0, 0.25, 0.5, 0.75])


def drawn(seed: int) -> dict[str, tuple[str, Floats]]:
    """Random values for all of ``SPECS``, not in the order of their names."""
    return {s.name: (s.dtype, draw(s.shape, seed, s.dtype)) for s in reversed(SPECS)}


class BackendParameters(ABC):
    """``bind`` and what it returns."""

    @abstractmethod
    def make_backend(self) -> Backend:
        """The backend under test."""

    @abstractmethod
    def make_model(self, tensors: Tensors) -> Any:
        """A model of the framework with exactly these trainable parameters."""

    @abstractmethod
    def read_model(self, model: Any) -> Mapping[str, Floats]:
        """The values of its parameters, by name, as fp32; a copy."""

    def bound(self, tensors: Tensors) -> tuple[Any, Parameters]:
        """A model and its parameters."""
        model = self.make_model(tensors)
        return model, self.make_backend().bind(model)

    def placed(self, tensors: Tensors) -> dict[str, Placed]:
        """These tensors as arrays of the backend."""
        return {n: put(self.make_backend(), values, d) for n, (d, values) in tensors.items()}

    def blanks(self) -> dict[str, Placed]:
        """Arrays for all parameters, with old content."""
        return {s.name: blank(self.make_backend(), s.dtype, s.shape) for s in SPECS}

    def check_model(self, model: Any, tensors: Tensors) -> None:
        """Every parameter has exactly these values."""
        found = self.read_model(model)
        assert found.keys() == tensors.keys()
        for name, (dtype, values) in tensors.items():
            assert found[name].shape == values.shape, name
            assert raw(found[name], dtype) == raw(values, dtype), name

    def test_schema_is_sorted_by_name(self) -> None:
        """With dtypes and shapes; 0-d and empty parameters are ordinary ones."""
        _, parameters = self.bound(drawn(1))
        assert parameters.schema == SPECS

    def test_capture_copies(self) -> None:
        """All of them, some of them, none."""
        tensors = drawn(2)
        model, parameters = self.bound(tensors)
        out = self.blanks()
        parameters.capture({name: each.array for name, each in out.items()})()
        for name, (dtype, values) in tensors.items():
            assert out[name].bytes() == raw(values, dtype), name
        some = self.blanks()
        parameters.capture({"short": some["short"].array})()
        assert some["short"].bytes() == raw(tensors["short"][1], "F16")
        assert some["plain"].bytes() == b"\xff" * len(some["plain"].bytes())
        parameters.capture({})()
        self.check_model(model, tensors)

    def test_capture_is_of_that_moment(self) -> None:
        """What is applied before the copy is waited for, on another thread, is not in it."""
        before, after = drawn(3), drawn(4)
        model, parameters = self.bound(before)
        out = self.blanks()
        wait = parameters.capture({name: each.array for name, each in out.items()})
        self._apply(parameters, after)
        on_another_thread(wait)
        wait()
        for name, (dtype, values) in before.items():
            assert out[name].bytes() == raw(values, dtype), name
        self.check_model(model, after)

    def test_apply_sets_the_parameters(self) -> None:
        """All of them, then some of them; the others stay."""
        first, second = drawn(5), drawn(6)
        model, parameters = self.bound(drawn(7))
        self._apply(parameters, first)
        self.check_model(model, first)
        self._apply(parameters, {"brain": second["brain"], "empty": second["empty"]})
        self.check_model(model, {**first, "brain": second["brain"]})

    def test_staged_on_another_thread(self) -> None:
        """As the courier does it, while the training goes on."""
        tensors = drawn(8)
        model, parameters = self.bound(drawn(9))
        arrays = {name: each.array for name, each in self.placed(tensors).items()}
        parameters.apply(on_another_thread(lambda: parameters.stage(arrays)))
        self.check_model(model, tensors)

    @mixings
    def test_apply_mixes(self, mixing: float) -> None:
        """``mixing·θ + (1−mixing)·Θ``, in every dtype."""
        before, target = drawn(10), drawn(11)
        model, parameters = self.bound(before)
        self._apply(parameters, target, mixing=mixing)
        found = self.read_model(model)
        for name, (dtype, values) in before.items():
            expected = mixing * wide(values) + (1.0 - mixing) * wide(target[name][1])
            bound = ROUNDING[dtype]
            assert_near(found[name], expected, rtol=bound, atol=bound)

    @mixings
    def test_the_largest_values_mix_to_themselves(self, mixing: float) -> None:
        """Without an infinity on the way."""
        most = {"F32": np.finfo(np.float32).max, "F16": 65504.0, "BF16": 2.0**127 * (2 - 2.0**-7)}
        tensors = {d.lower(): (d, np.full(70, most[d], np.float32)) for d in DTYPES}
        model, parameters = self.bound(tensors)
        self._apply(parameters, tensors, mixing=mixing)
        assert parameters.not_finite() == []
        for name, values in self.read_model(model).items():
            expected = wide(tensors[name][1])
            assert_near(values, expected, rtol=ROUNDING[name.upper()], atol=0.0)

    @mixings
    def test_read_only_arrays_can_be_applied(self, mixing: float) -> None:
        """The memory of a fetched payload."""
        before, target = drawn(12), drawn(13)
        model, parameters = self.bound(before)
        arrays = {
            name: put_bytes(self.make_backend(), raw(values, dtype), dtype, values.shape).array
            for name, (dtype, values) in target.items()
        }
        parameters.apply(parameters.stage(arrays), mixing=mixing)
        if mixing == 0.0:
            self.check_model(model, target)

    @mixings
    def test_buffers_are_the_callers_again(self, mixing: float) -> None:
        """What is written into arrays after a capture or an apply never reaches the model."""
        before, target = drawn(14), drawn(15)
        model, parameters = self.bound(before)
        out, placed = self.blanks(), self.placed(target)
        parameters.capture({name: each.array for name, each in out.items()})()
        staged = parameters.stage({name: each.array for name, each in placed.items()})
        parameters.apply(staged, mixing=mixing)
        self.read_model(model)  # whatever is lazy has happened
        expected = {n: (target[n][0], x) for n, x in self.read_model(model).items()}
        for each in (*out.values(), *placed.values()):
            each.memory[:] = b"\x42" * each.memory.nbytes
        self.check_model(model, expected)
        again = self.blanks()
        parameters.capture({name: each.array for name, each in again.items()})()
        for name, (dtype, values) in expected.items():
            assert again[name].bytes() == raw(values, dtype), name

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_not_finite_names_the_parameters(self, bad: float) -> None:
        """Sorted; also after the model was put right."""
        clean = drawn(16)
        spoiled = {name: (dtype, values.copy()) for name, (dtype, values) in clean.items()}
        for name in ("scalar", "short", "brain"):
            spoiled[name][1].reshape(-1)[-1] = bad
        model, parameters = self.bound(spoiled)
        assert parameters.not_finite() == ["brain", "scalar", "short"]
        self._apply(parameters, clean)
        assert parameters.not_finite() == []
        self.check_model(model, clean)

    @pytest.mark.parametrize("thing", [None, 3, "model", object(), [1.0], 2.5])
    def test_what_is_no_model_is_a_type_error(self, thing: object) -> None:
        """That says what a model is."""
        with pytest.raises(TypeError, match=r"a model is .*, not a"):
            self.make_backend().bind(thing)

    def test_arrays_are_views_of_their_buffer(self) -> None:
        """And keep it alive; F4 has two elements a byte."""
        backend = self.make_backend()
        for dtype in ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "F4"):
            for shape in ((64,), (2, 32), (0,), (0, 64)):
                assert blank(backend, dtype, shape).array is not None
        zeros = {d: put(backend, np.zeros((3, 5), np.float32), d) for d in DTYPES}
        for dtype in DTYPES:
            out = blank(backend, dtype, (3, 5))
            backend.add(zeros[dtype].array, zeros["F32"].array, out.array)
            assert out.bytes() == bytes(len(out.bytes()))
        ones = np.ones(1000, np.float32)
        arrays = [put(backend, ones).array for _ in range(50)]
        assert [backend.sum_of_squares(array) for array in arrays] == [1000.0] * 50

    @pytest.mark.parametrize("nbytes", [1, 4096, 100_001])
    def test_allocated_memory_is_writable_and_of_that_size(self, nbytes: int) -> None:
        """``pool().take``; bytes, whatever they hold."""
        memory = self.make_backend().pool().take(nbytes)
        memory[:] = b"\x7f" * nbytes
        assert (memory.nbytes, memory.format, memory.readonly) == (nbytes, "B", False)

    def _apply(self, parameters: Parameters, tensors: Tensors, mixing: float = 0.0) -> None:
        arrays = {name: each.array for name, each in self.placed(tensors).items()}
        parameters.apply(parameters.stage(arrays), mixing=mixing)


def on_another_thread[T](call: Callable[[], T]) -> T:
    """What ``call`` returns when another thread makes it."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    assert found, "the call failed on another thread"
    return found[0]
