"""The options: defaults, every bad value, JSON."""

import json
import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientmail.algorithm.diloco import ByBytes, DiLoCo, Rda, Strided, WeightedMean

PLAIN: dict[str, Any] = {"sync_every": 100, "fragments": 8}
DEFAULTS: dict[str, Any] = {
    "in_flight": 2,
    "overlap_steps": None,
    "mixing": 0.0,
    "quorum_size": 1,
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "merge": Rda(direct_pattern="embed"),
    "partition": ByBytes(),
    "global_batch_size": None,
    "delta_dtype": None,
    "commit_dtype": None,
    "flush_on_close": False,
}

NO_COUNTS: list[Any] = [0, -1, True, False, 1.0, 2.5, "3", math.nan, math.inf, [], 2**53 + 1]
NO_FRACTIONS: list[Any] = [
    -0.1,
    True,
    False,
    "0.5",
    None,
    math.nan,
    math.inf,
    -math.inf,
    [],
    10**400,
    1j,
]
BAD: dict[str, list[Any]] = {
    "sync_every": [*NO_COUNTS, None],
    "fragments": [*NO_COUNTS, None, 101],
    "in_flight": [*NO_COUNTS, None, 9],
    "overlap_steps": [x for x in NO_COUNTS if x is False or x != 0],
    "mixing": [*NO_FRACTIONS, 1.0, 1, 2.0],
    "quorum_size": [*NO_COUNTS, None],
    "outer_lr": [*NO_FRACTIONS, 0, 0.0, -1],
    "outer_momentum": [*NO_FRACTIONS, 1, 1.0, 1.5],
    "merge": [None, "rda", Rda, ByBytes(), {}],
    "partition": [None, "by_bytes", ByBytes, Rda(), 3],
    "global_batch_size": NO_COUNTS,
    "delta_dtype": ["f32", "F64", "", 32, True, 0, b"F4", [], math.nan],
    "commit_dtype": ["bf16", "F8_E8M0", "F8", 16, False, {}, math.inf],
    "flush_on_close": [None, 0, 1, "yes", math.nan],
}
every_bad_value = pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)


def build(**options: Any) -> DiLoCo:
    """Options that the checker knows nothing about, over a plain run's."""
    return DiLoCo(**{**PLAIN, **options})


def test_defaults_and_order() -> None:
    algorithm = DiLoCo(100, 8)
    assert algorithm == DiLoCo(sync_every=100, fragments=8, **DEFAULTS)
    assert [option.name for option in fields(DiLoCo)] == ["sync_every", "fragments", *DEFAULTS]
    assert (Strided().block_pattern, Rda().direct_pattern) == (r"\.(\d+)\.", "embed")


def test_numbers_of_numpy_become_pythons() -> None:
    counts: dict[str, Any] = {"sync_every": 100, "fragments": 8, "in_flight": 3, "quorum_size": 2}
    counts |= {"overlap_steps": 0, "global_batch_size": 64}
    fractions: dict[str, Any] = {"mixing": 0.25, "outer_lr": 0.5, "outer_momentum": 0.75}
    for kind in (np.int64, np.uint16, np.int32):
        options: dict[str, Any] = {name: kind(value) for name, value in counts.items()}
        options |= {name: np.float32(value) for name, value in fractions.items()}
        algorithm = DiLoCo(**options)
        assert algorithm == DiLoCo(**counts, **fractions)
        assert {type(getattr(algorithm, name)) for name in counts} == {int}
        assert {type(getattr(algorithm, name)) for name in fractions} == {float}
        assert DiLoCo.from_json(json.loads(json.dumps(algorithm.to_json()))) == algorithm
    for value in (np.True_, np.float64(4.0), np.int64(-1), np.array([4])):
        with pytest.raises(ValueError, match="in_flight"):
            build(in_flight=value)
    for value in (np.True_, np.float32("nan"), np.array([0.5])):
        with pytest.raises(ValueError, match="mixing"):
            build(mixing=value)


def test_every_option_has_bad_values_here() -> None:
    assert BAD.keys() == {option.name for option in fields(DiLoCo)}


@every_bad_value
def test_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        build(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "good",
    [
        {"sync_every": 1, "fragments": 1, "in_flight": 1},
        {"sync_every": 8, "fragments": 8, "in_flight": 8},
        {"sync_every": 2**53},
        {"overlap_steps": 0},
        {"mixing": 0.999},
        {"outer_lr": 1e-9},
        {"outer_lr": 30},
        {"outer_momentum": 0},
        {"global_batch_size": 1},
        {"merge": WeightedMean()},
        {"merge": Rda("")},
        {"partition": Strided(r"layer(\d+)")},
        *({"delta_dtype": dtype} for dtype in (None, "F32", "F16", "BF16", "F8_E4M3", "F4")),
    ],
    ids=str,
)
def test_good_values(good: dict[str, Any]) -> None:
    algorithm = build(**good)
    assert {name: getattr(algorithm, name) for name in good} == good


def test_one_fragment_needs_one_in_flight_and_the_error_says_so() -> None:
    with pytest.raises(ValueError, match=r"in_flight=2 .* pass in_flight=1"):
        DiLoCo(100, 1)
    assert DiLoCo(100, 1, in_flight=1).fragments == 1


def test_more_fragments_than_steps_is_an_error_that_shows_both() -> None:
    with pytest.raises(ValueError, match=r"fragments=9 .* sync_every=8"):
        DiLoCo(8, 9)


def test_whole_numbers_become_floats() -> None:
    algorithm = DiLoCo(100, 8, mixing=0, outer_lr=1, outer_momentum=0)
    values = (algorithm.mixing, algorithm.outer_lr, algorithm.outer_momentum)
    assert values == (0.0, 1.0, 0.0)
    assert all(type(value) is float for value in values)
    assert math.copysign(1.0, DiLoCo(100, 8, mixing=-0.0).mixing) == 1.0


@pytest.mark.parametrize("pattern", ["(", r"\.\d+\.", "", None, 3, b"(a)"])
def test_block_pattern_must_be_an_expression_with_a_group(pattern: Any) -> None:
    with pytest.raises(ValueError, match="block_pattern") as caught:
        Strided(pattern)
    assert repr(pattern) in str(caught.value)


@pytest.mark.parametrize("pattern", [None, 3, b"embed", True])
def test_direct_pattern_must_be_text(pattern: Any) -> None:
    with pytest.raises(ValueError, match="direct_pattern"):
        Rda(pattern)


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        DiLoCo(100, 8).__setattr__("sync_every", 5)


def test_json_is_the_wire_format() -> None:
    assert DiLoCo(100, 8).to_json() == {
        "sync_every": 100,
        "fragments": 8,
        "in_flight": 2,
        "overlap_steps": None,
        "mixing": 0.0,
        "quorum_size": 1,
        "outer_lr": 0.7,
        "outer_momentum": 0.9,
        "merge": {"kind": "rda", "direct_pattern": "embed"},
        "partition": {"kind": "by_bytes"},
        "global_batch_size": None,
        "delta_dtype": None,
        "commit_dtype": None,
        "flush_on_close": False,
    }
    other = DiLoCo(100, 8, merge=WeightedMean(), partition=Strided(r"(\d)"))
    assert other.to_json()["merge"] == {"kind": "weighted_mean"}
    assert other.to_json()["partition"] == {"kind": "strided", "block_pattern": r"(\d)"}


def options() -> st.SearchStrategy[DiLoCo]:
    def cut_into(sync_every: int, cut: tuple[float, float], rest: dict[str, Any]) -> DiLoCo:
        fragments = 1 + int(cut[0] * (sync_every - 1))
        in_flight = 1 + int(cut[1] * (fragments - 1))
        return DiLoCo(sync_every, fragments, in_flight, **rest)

    share = st.floats(0.0, 1.0, exclude_max=True)
    count = st.integers(1, 2**53)
    dtype = st.sampled_from([None, "F32", "F16", "BF16", "F8_E4M3", "F4"])
    rest = st.fixed_dictionaries(
        {
            "overlap_steps": st.none() | st.integers(0, 2**53),
            "mixing": share,
            "quorum_size": count,
            "outer_lr": st.floats(1e-300, 1e300),
            "outer_momentum": share,
            "merge": st.builds(Rda, st.text()) | st.just(WeightedMean()),
            "partition": st.just(ByBytes()) | st.just(Strided(r"h\.(\d+)")),
            "global_batch_size": st.none() | count,
            "delta_dtype": dtype,
            "commit_dtype": dtype,
            "flush_on_close": st.booleans(),
        }
    )
    return st.builds(cut_into, st.integers(1, 2**40), st.tuples(share, share), rest)


@given(options())
def test_json_round_trip(algorithm: DiLoCo) -> None:
    row = json.loads(json.dumps(algorithm.to_json()))
    assert DiLoCo.from_json(row) == algorithm
    assert DiLoCo.from_json(row | {"added_later": 1}) == algorithm
    assert algorithm.differences(DiLoCo.from_json(row)) == []


def test_absent_options_are_the_defaults() -> None:
    assert DiLoCo.from_json({"sync_every": 7, "fragments": 3}) == DiLoCo(7, 3)
    assert DiLoCo.from_json({"sync_every": 7, "fragments": 3, "merge": {"kind": "rda"}}) == DiLoCo(
        7, 3
    )


@pytest.mark.parametrize("name", ["sync_every", "fragments"])
def test_absent_sizes_are_an_error(name: str) -> None:
    row = DiLoCo(7, 3).to_json()
    del row[name]
    with pytest.raises(ValueError, match=name):
        DiLoCo.from_json(row)


@every_bad_value
def test_bad_json_value_is_a_value_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        DiLoCo.from_json(DiLoCo(100, 8).to_json() | {name: value})


@pytest.mark.parametrize("row", [None, [], "x", 3, {}])
def test_json_that_is_no_object_of_options(row: Any) -> None:
    with pytest.raises(ValueError, match="algorithm"):
        DiLoCo.from_json(row)


@pytest.mark.parametrize("kind", [None, "median", 3, [], {}])
def test_unknown_kinds_are_errors_that_list_the_known_ones(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"merge.*rda, weighted_mean"):
        DiLoCo.from_json(DiLoCo(100, 8).to_json() | {"merge": {"kind": kind}})
    with pytest.raises(ValueError, match=r"partition.*by_bytes, strided"):
        DiLoCo.from_json(DiLoCo(100, 8).to_json() | {"partition": {"kind": kind}})


def test_differences_name_each_option_with_both_values() -> None:
    ours = DiLoCo(100, 8, outer_lr=0.5, merge=WeightedMean())
    theirs = DiLoCo(50, 8, outer_lr=0.7)
    assert ours.differences(theirs) == [
        "sync_every: 100 here, 50 in the run",
        "outer_lr: 0.5 here, 0.7 in the run",
        "merge: WeightedMean() here, Rda(direct_pattern='embed') in the run",
    ]
