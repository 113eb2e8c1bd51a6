"""Which workloads the benchmark of whole exchanges runs."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        (None, list(range(7))),
        ("W", [0]),
        ("600", [5]),
        ("8 nodes", [1]),
        ("tensor", [5, 6]),
        ("nothing like it", []),
    ],
)
def test_a_part_of_a_name_chooses(
    monkeypatch: pytest.MonkeyPatch, only: str | None, chosen: list[int]
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    exchange = importlib.import_module("exchange")  # as its command does
    found = [i for i, one in enumerate(exchange.WORKLOADS) if exchange.is_chosen(one.name, only)]
    assert found == chosen
