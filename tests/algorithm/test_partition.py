"""The partition: a function of the schema, balanced, the same on every node."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientmail.algorithm.diloco import ByBytes, Strided
from gradientmail.algorithm.partition import Plan, partition
from gradientmail.schema import TensorSpec

HOWS = (ByBytes(), Strided())


def spec(name: str, count: int, dtype: str = "F32") -> TensorSpec:
    return TensorSpec(name, dtype, (count,))


@st.composite
def schemas(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(
        st.lists(
            st.from_regex(r"(h\.[0-9]{1,2}\.)?[a-c]{1,3}", fullmatch=True),
            min_size=1,
            max_size=30,
            unique=True,
        )
    )
    dtypes = st.sampled_from(["F32", "BF16", "F16"])
    return [spec(name, draw(st.integers(0, 50)), draw(dtypes)) for name in names]


def by_definition(schema: list[TensorSpec], fragments: int) -> Plan:
    """``ByBytes`` as the specification words it."""
    parts: list[list[TensorSpec]] = [[] for _ in range(min(fragments, len(schema)))]
    for item in sorted(schema, key=lambda s: (-s.nbytes, s.name)):
        min(parts, key=lambda part: sum(s.nbytes for s in part)).append(item)
    return tuple(tuple(sorted(s.name for s in part)) for part in parts if part)


def test_largest_first_into_the_lightest() -> None:
    schema = [spec("a", 3), spec("b", 7), spec("c", 5), spec("d", 4), spec("e", 1)]
    assert partition(schema, ByBytes(), 2) == (("a", "b"), ("c", "d", "e"))


def test_bytes_count_not_elements() -> None:
    schema = [spec("a", 8, "BF16"), spec("b", 6), spec("c", 2)]
    assert partition(schema, ByBytes(), 2) == (("b",), ("a", "c"))


def test_ties_go_by_name_then_to_the_lowest_index() -> None:
    schema = [spec(name, 1) for name in "dbca"]
    assert partition(schema, ByBytes(), 3) == (("a", "d"), ("b",), ("c",))


def test_blocks_take_turns_and_the_rest_balances() -> None:
    schema = [spec(f"h.{block}.w", 10) for block in range(5)]
    schema += [spec("embed", 12), spec("norm", 3)]
    assert partition(schema, Strided(), 2) == (
        ("h.0.w", "h.2.w", "h.4.w", "norm"),
        ("embed", "h.1.w", "h.3.w"),
    )


def test_block_numbers_are_numbers() -> None:
    schema = [spec(f"h.{block}.w", 1) for block in (10, 9, 2, 100)]
    assert partition(schema, Strided(), 4) == (("h.2.w",), ("h.9.w",), ("h.10.w",), ("h.100.w",))


def test_a_block_stays_whole_and_leading_zeros_do_not_matter() -> None:
    schema = [spec("h.3.a", 9), spec("h.03.b", 1), spec("h.4.a", 1)]
    assert partition(schema, Strided(), 2) == (("h.03.b", "h.3.a"), ("h.4.a",))


def test_first_group_of_the_pattern_is_the_block() -> None:
    schema = [spec("stage1.layer7", 1), spec("stage2.layer6", 1), spec("head", 1)]
    how = Strided(r"layer(\d+)")
    assert partition(schema, how, 2) == (("head", "stage2.layer6"), ("stage1.layer7",))


def test_more_parts_than_blocks_leaves_room_for_the_rest() -> None:
    schema = [spec("h.0.w", 5), spec("x", 1), spec("y", 1)]
    assert partition(schema, Strided(), 3) == (("h.0.w",), ("x",), ("y",))


def test_empty_parts_are_dropped() -> None:
    schema = [spec("h.0.a", 1), spec("h.0.b", 1), spec("h.0.c", 1)]
    assert partition(schema, Strided(), 3) == (("h.0.a", "h.0.b", "h.0.c"),)
    assert partition([spec("a", 0), spec("b", 0)], ByBytes(), 2) == (("a", "b"),)


def test_a_group_that_is_no_number_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"'layers\.first\.w'"):
        partition([spec("layers.first.w", 1)], Strided(r"layers\.(\w+)\."), 1)


def test_no_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match="no parameter"):
        partition([], ByBytes(), 3)


@given(schemas(), st.integers(1, 12))
def test_by_bytes_is_its_definition(schema: list[TensorSpec], fragments: int) -> None:
    assert partition(schema, ByBytes(), fragments) == by_definition(schema, fragments)


@given(schemas(), st.integers(1, 12), st.sampled_from(HOWS), st.randoms(use_true_random=False))
def test_every_name_once_sorted_and_whatever_the_order(
    schema: list[TensorSpec], fragments: int, how: ByBytes | Strided, rng: random.Random
) -> None:
    plan = partition(schema, how, fragments)
    assert 1 <= len(plan) <= min(fragments, len(schema))
    assert all(names and list(names) == sorted(names) for names in plan)
    assert sorted(name for names in plan for name in names) == sorted(s.name for s in schema)
    shuffled = schema[:]
    rng.shuffle(shuffled)
    assert partition(shuffled, how, fragments) == plan


def test_ten_thousand_tensors() -> None:
    schema = [spec(f"h.{index % 200}.w{index}", 1 + index % 97) for index in range(10_000)]
    for how in HOWS:
        plan = partition(schema, how, 100)
        assert sum(map(len, plan)) == 10_000
        assert len(plan) == 100
