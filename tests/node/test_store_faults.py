"""A store that is away, slow, far, and learners that are not alike."""

import asyncio

import pytest
from tests.node.history import check_history, check_settled, check_tidy
from tests.node.worlds import World, happened

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.events import LearnerLost, StoreUnavailable, TaskFailed, TookOver
from gradientmail.testing.simulated import Connection, SimulatedMailbox
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode, train_together

ALGORITHM = DiLoCo(sync_every=6, fragments=2, in_flight=2, quorum_size=2)


def view(node: SimulatedNode) -> SimulatedMailbox:
    """A node's connection."""
    assert isinstance(node.mailbox, SimulatedMailbox)
    return node.mailbox


@pytest.mark.parametrize("away", [60.0, 3600.0])
def test_the_store_is_away_and_everything_goes_on_afterwards(away: float) -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        # Leases as patient as the longest pause between two tries, as they are by default.
        nodes = [
            world.node(name, step_seconds=5.0, lease_every=20, lease_timeout=60) for name in "abc"
        ]
        await asyncio.gather(*(node.join() for node in nodes))
        await asyncio.gather(*(node.train(12) for node in nodes))
        before = world.archive.rounds()
        for node in nodes:
            view(node).connected = False
        training = [asyncio.ensure_future(node.train(int(away / 5) + 60)) for node in nodes]
        await asyncio.sleep(away)
        assert world.archive.rounds() <= before + 1
        # Training went on: all steps but those of this moment are taken.
        assert all(node.learner.local_step >= 12 + away / 5 - 2 for node in nodes)
        for node in nodes:
            view(node).connected = True
        back = world.archive.rounds()
        await asyncio.sleep(31 + 60)  # the longest pause between two tries, and some rounds
        assert world.archive.rounds() >= back + 3
        await asyncio.gather(*training)
        await asyncio.gather(*(node.close() for node in nodes))
        for node in nodes:
            lost = happened(node, LearnerLost)
            assert lost == [], "somebody was taken for dead"
            assert [e for e in happened(node, TookOver) if e.reason == "lease"] == []
            assert happened(node, StoreUnavailable)
        found = check_history(world.archive)
        assert len(found[-4]["participants"]) == 3
        for node in nodes:
            check_settled(world.archive, node)

    run_virtual(main, limit_seconds=20_000)


def test_a_partition_of_one_node_stops_only_that_one() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        nodes = [world.node(name) for name in "abc"]
        await asyncio.gather(*(node.join() for node in nodes))
        training = [asyncio.ensure_future(node.train(120)) for node in nodes]
        await asyncio.sleep(12)
        cut = view(nodes[2])
        cut.connected = False
        before = world.archive.rounds()
        await asyncio.sleep(40)
        during = world.archive.rounds()
        assert during >= before + 6
        cut.connected = True
        await asyncio.gather(*training)
        await asyncio.gather(*(node.close() for node in nodes))
        found = check_history(world.archive)
        assert any(
            "c" in {row["learner"] for row in record["participants"]}
            for record in found[during + 3 :]
        )
        await check_tidy(world)
        for node in nodes:
            check_settled(world.archive, node)

    run_virtual(main, limit_seconds=2000)


@pytest.mark.parametrize("seed", range(4))
def test_calls_that_fail_at_random_change_nothing(seed: int) -> None:
    async def main() -> None:
        world = World(ALGORITHM, seed=seed)
        link = Connection(0.02, 0.05, failures=0.15)
        nodes = [world.node(name, connection=link) for name in "ab"]
        await train_together(nodes, 60)
        found = check_history(world.archive)
        assert len(found) >= 12
        for node in nodes:
            assert happened(node, TaskFailed) == []
            check_settled(world.archive, node)
        await check_tidy(world)

    run_virtual(main, limit_seconds=3000)


def test_a_learner_ten_times_slower_contributes() -> None:
    """It publishes when a round is about to close without it."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=20, fragments=2, in_flight=2))
        fast = world.node("fast", connection=Connection(0.05))
        slow = world.node("slow", step_seconds=10.0, samples=3, connection=Connection(0.05))
        await asyncio.gather(fast.join(), slow.join())
        await asyncio.gather(fast.train(600), slow.train(60))
        await asyncio.gather(fast.close(), slow.close())
        found = check_history(world.archive)
        assert len(found) >= 40
        rows = [
            row for record in found for row in record["participants"] if row["learner"] == "slow"
        ]
        # It takes one step a round; its own due time comes once in ten rounds.
        assert len(rows) >= len(found) / 3
        assert {row["tokens"] / row["steps"] for row in rows} == {3.0}
        for node in (fast, slow):
            check_settled(world.archive, node)

    run_virtual(main, limit_seconds=3000)


@pytest.mark.parametrize("mixing", [0.5, 0.9])
def test_mixing_in_a_world(mixing: float) -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=6, fragments=2, quorum_size=2, mixing=mixing))
        nodes = [world.node("a"), world.node("b")]
        await train_together(nodes, 60)
        found = check_history(world.archive)
        assert len(found) >= 15
        for row in found[-4]["participants"]:
            # At most what was trained since the last version, and the part that mixing keeps.
            assert 1 <= row["steps"] <= 6 / (1 - mixing) + 6
            assert row["tokens"] == pytest.approx(8 * row["steps"], abs=8)

    run_virtual(main, limit_seconds=500)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_slow_connections(in_flight: int) -> None:
    """A round trip of 2 s and 40 bytes a second: an upload takes longer than a round."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=8, fragments=2, in_flight=in_flight, quorum_size=2))
        link = Connection(1.0, 0.5, bytes_per_second=400)
        nodes = [
            world.node(name, connection=link, poll=1.0, lease_every=20, lease_timeout=120)
            for name in "ab"
        ]
        await train_together(nodes, 200)
        found = check_history(world.archive)
        assert len(found) >= 6
        for node in nodes:
            assert happened(node, LearnerLost) == []
            check_settled(world.archive, node)

    run_virtual(main, limit_seconds=5000)
