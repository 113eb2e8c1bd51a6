"""Which tensors payloads hold, and that they survive the way there and back."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithm.tensors import arrays, blank, take
from tests.backend.arrays import put

from gradientmail.algorithm.precision import (
    decode_tensors,
    delta_specs,
    encode_difference,
    encode_tensors,
    fp32_array,
    outer_specs,
    update_specs,
)
from gradientmail.backend.base import Backend
from gradientmail.schema import TensorSpec

SPECS = (
    TensorSpec("bias", "F32", ()),
    TensorSpec("empty", "BF16", (0, 4)),
    TensorSpec("w", "BF16", (3, 25)),
)
DTYPES = (None, "F32", "F16", "BF16", "F8_E4M3", "F4")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_plain_formats_keep_shapes(dtype: str) -> None:
    expected = tuple(TensorSpec(spec.name, dtype, spec.shape) for spec in SPECS)
    assert delta_specs(SPECS, dtype) == expected


def test_none_is_each_parameters_own_dtype() -> None:
    assert delta_specs(SPECS, None) == SPECS


def test_quantized_formats_carry_scales() -> None:
    assert delta_specs(SPECS, "F8_E4M3") == (
        TensorSpec("bias", "F8_E4M3", ()),
        TensorSpec("bias.scale", "F32", ()),
        TensorSpec("empty", "F8_E4M3", (0, 4)),
        TensorSpec("empty.scale", "F32", ()),
        TensorSpec("w", "F8_E4M3", (3, 25)),
        TensorSpec("w.scale", "F32", ()),
    )
    assert delta_specs(SPECS, "F4") == (
        TensorSpec("bias", "F4", (32,)),
        TensorSpec("bias.scale", "F8_E8M0", (1,)),
        TensorSpec("empty", "F4", (0,)),
        TensorSpec("empty.scale", "F8_E8M0", (0,)),
        TensorSpec("w", "F4", (96,)),
        TensorSpec("w.scale", "F8_E8M0", (3,)),
    )


def test_commits_carry_an_update_only_when_asked() -> None:
    assert update_specs(SPECS, None) == ()
    for dtype in DTYPES[1:]:
        assert update_specs(SPECS, dtype) == delta_specs(SPECS, dtype)


def test_master_is_kept_where_theta_is_not_it() -> None:
    assert outer_specs(SPECS[::2], commit_dtype=None) == (
        TensorSpec("momentum.bias", "F32", ()),
        TensorSpec("momentum.w", "F32", (3, 25)),
        TensorSpec("master.w", "F32", (3, 25)),
    )
    for dtype in DTYPES[1:]:
        assert outer_specs(SPECS[:1], commit_dtype=dtype) == (
            TensorSpec("momentum.bias", "F32", ()),
            TensorSpec("master.bias", "F32", ()),
        )


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])
def test_a_parameter_called_like_anothers_scales_is_an_error(dtype: str) -> None:
    specs = [TensorSpec("x", "F32", (2,)), TensorSpec("x.scale", "F32", (2,))]
    with pytest.raises(ValueError, match=r"'x\.scale'"):
        delta_specs(specs, dtype)
    with pytest.raises(ValueError, match=r"'x\.scale'"):
        update_specs(specs, dtype)
    assert len(delta_specs(specs, "F16")) == 2


@given(
    st.lists(st.floats(-60000.0, 60000.0, width=32), max_size=70),
    st.sampled_from(DTYPES),
    st.sampled_from(["F32", "BF16", "F16"]),
)
def test_there_and_back(backend: Backend, values: list[float], dtype: str | None, own: str) -> None:
    spec = TensorSpec("x", own, (len(values),))
    x = torch.tensor(values, dtype=torch.float32)
    blanks = partial(fp32_array, backend, take=take)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        payload = arrays(blank(backend, delta_specs([spec], dtype)))
        encode_tensors(backend, {"x": put(backend, x).array}, [spec], dtype, payload)
        found = decode_tensors(backend, payload, dtype, [spec], blanks)["x"]
        assert (found is payload["x"]) == (dtype not in ("F8_E4M3", "F4"))
        out = blank(backend, [TensorSpec("x", "F32", spec.shape)])["x"]
        backend.combine([(1.0, found)], out.array)
        return out.tensor()

    found = there_and_back(x)
    assert found.shape == x.shape
    format_ = dtype or own
    most = float(x.abs().max()) if values else 0.0
    bound = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "F8_E4M3": 2**-4, "F4": 0.25}[format_]
    least = 2**-25 if format_ == "F16" else 1e-8  # half of the smallest that F16 has
    assert ((found.double() - x.double()).abs() <= bound * most + least).all()
    assert torch.equal(there_and_back(found), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_difference_is_the_encoded_difference(backend: Backend, dtype: str | None) -> None:
    rng = torch.Generator().manual_seed(3)
    left = {spec.name: torch.randn(spec.shape, generator=rng) for spec in SPECS}
    right = {
        spec.name: torch.randn(spec.shape, generator=rng).to(
            torch.bfloat16 if spec.dtype == "BF16" else torch.float32
        )
        for spec in SPECS
    }
    payload, expected = (blank(backend, delta_specs(SPECS, dtype)) for _ in range(2))
    x, y, exact = (
        {name: put(backend, tensor).array for name, tensor in tensors.items()}
        for tensors in (left, right, {n: x - right[n].float() for n, x in left.items()})
    )
    encode_difference(backend, x, y, SPECS, dtype, arrays(payload), take)
    encode_tensors(backend, exact, SPECS, dtype, arrays(expected))
    assert all(payload[name].bytes() == array.bytes() for name, array in expected.items())


def test_difference_may_be_written_over_what_is_subtracted(backend: Backend) -> None:
    spec = TensorSpec("x", "BF16", (100,))
    anchor, theta = torch.randn(100).bfloat16(), torch.randn(100).bfloat16()
    x, y = put(backend, anchor).array, put(backend, theta)
    encode_difference(backend, {"x": x}, {"x": y.array}, [spec], None, {"x": y.array}, take)
    assert torch.equal(y.tensor(), anchor - theta)
