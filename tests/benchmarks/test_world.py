"""Many nodes in one thread: they all take part, and the store stays small."""

import pytest
from benchmarks.world import FRAGMENTS, run_world


def check(nodes: int, seconds: int) -> None:
    """Nearly everybody is in every round, one round follows the other, and little is left."""
    world = run_world(nodes, seconds)
    assert [one.round for one in world.records] == list(range(len(world.records)))
    # A round is due every 125 s; those who joined the last are waited for in the first.
    assert len(world.records) >= seconds // 125 - 2
    # Rounds close with nine in ten and a grace, in which all but a few report.
    present = [len(record.participants) for record in world.records[1:]]
    assert min(present) >= 0.9 * nodes
    assert sum(present) >= 0.98 * nodes * len(present)
    # Records, what 2·P rounds and first parameters take, and by node a lease, and a snapshot with
    # its delta in the round that was open at the end.
    assert world.objects <= len(world.records) + 2 * (2 * FRAGMENTS + 2) + 16 + 4 * nodes


def test_a_hundred_nodes() -> None:
    check(100, 1500)


@pytest.mark.soak
def test_a_thousand_nodes() -> None:
    """Ten minutes of the hour that ``benchmarks/world.py`` runs."""
    check(1000, 600)
