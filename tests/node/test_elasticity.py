"""Learners that come late, leave, are slow or alone: what the run does, what its records say."""

import asyncio
from typing import Any

import pytest
from tests.node.history import check_history
from tests.node.worlds import World, happened, train_until

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.events import (
    Event,
    LearnerAppeared,
    LearnerLeft,
    LearnerLost,
    LearnerMissing,
    RoundCommitted,
)
from gradientmail.testing.simulated import Connection
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode

LINK = Connection(0.05)


def learners(record: dict[str, Any]) -> list[str]:
    return [row["learner"] for row in record["participants"]]


def rows_of(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for record in found for row in record["participants"] if row["learner"] == name]


def told_of(node: SimulatedNode, kind: type[Event], name: str) -> int:
    return sum(getattr(event, "learner", None) == name for event in happened(node, kind))


async def whole_life(node: SimulatedNode, steps: int) -> None:
    await node.join()
    await node.train(steps)
    await node.close()


@pytest.mark.parametrize("quorum_size", [1, 2])
def test_one_that_comes_late_is_in_the_rounds_that_follow(quorum_size: int) -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=8, fragments=2, quorum_size=quorum_size))
        early, late = world.node("early", connection=LINK), world.node("late", connection=LINK)
        await early.join()
        await early.train(60)
        joined_at = world.archive.rounds()
        assert joined_at >= 12
        await asyncio.gather(whole_life(late, 80), early.train(90))
        await early.close()
        found = check_history(world.archive)
        # It starts from the newest commit: nothing it sends is stale, and its steps are its own.
        assert all(learners(record) == ["early"] for record in found[:joined_at])
        both = [record for record in found[joined_at:] if learners(record) == ["early", "late"]]
        assert both[0]["round"] <= joined_at + 3
        assert len(both) >= 15
        assert [record["rejected"] for record in found if record["rejected"]] == []
        assert all(1 <= row["steps"] <= 12 for row in rows_of(found, "late"))
        assert told_of(early, LearnerAppeared, "late") == 1
        assert happened(early, LearnerMissing) == []

    run_virtual(main, limit_seconds=2000)


@pytest.mark.parametrize("quorum_size", [1, 2])
@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_after_one_has_gone_the_other_goes_on_alone(how: str, quorum_size: int) -> None:
    """Fewer live than the quorum: rounds close with all there are."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=8, fragments=2, quorum_size=quorum_size))
        stays, goes = world.node("stays", connection=LINK), world.node("goes", connection=LINK)
        await asyncio.gather(stays.join(), goes.join())
        await asyncio.gather(stays.train(40), goes.train(40))
        before = world.archive.rounds()
        await asyncio.gather(stays.train(60), goes.close() if how == "leaves" else goes.kill())
        await stays.train(40)
        await stays.close()
        found = check_history(world.archive)
        assert sum(learners(record) == ["goes", "stays"] for record in found[:before]) >= 6
        alone = [record for record in found if learners(record) == ["stays"]]
        assert found[before + 4 :] == alone[-len(found[before + 4 :]) :]
        assert len(alone) >= 12
        if how == "leaves":
            # Its last rounds in flight are in the run, with their steps.
            assert goes.learner.in_flight() == ()
            assert told_of(stays, LearnerLeft, "goes") == 1
        else:
            assert told_of(stays, LearnerLost, "goes") == 1
            # A quorum that counts it in waits for its lease, once.
            longest = max(record["quorum_seconds"] for record in found[before - 1 :])
            assert (longest > 8.0) == (quorum_size == 2)
        assert told_of(stays, LearnerMissing, "goes") <= 1

    run_virtual(main, limit_seconds=2000)


@pytest.mark.parametrize("slower", [3, 10])
@pytest.mark.parametrize("quorum_size", [1, 2])
def test_a_slow_learner_is_in_the_rounds_with_the_steps_that_it_made(
    slower: int, quorum_size: int
) -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=20, fragments=2, quorum_size=quorum_size))
        fast = world.node("fast", connection=LINK)
        slow = world.node("slow", step_seconds=float(slower), connection=LINK)
        await asyncio.gather(whole_life(fast, 600), whole_life(slow, 600 // slower))
        found = check_history(world.archive)
        # Ten of the fast one's steps a round: it is not slowed down, but where the quorum says so.
        assert len(found) >= (50 if quorum_size == 1 else 30)
        rows = rows_of(found, "slow")
        share = len(rows) / len(found)
        assert share >= {(3, 1): 0.8, (3, 2): 0.9, (10, 1): 0.3, (10, 2): 0.9}[slower, quorum_size]
        # Nothing of what it sends is lost to staleness, and it weighs as its steps do.
        assert sum(len(record["rejected"]) for record in found) <= len(found) / 20
        assert {row["weight"] / row["steps"] for row in rows} == {64.0}
        typical = sorted(row["steps"] for row in rows)[len(rows) // 2]
        assert typical <= 40 / slower
        in_log = {
            event.round
            for node in (fast, slow)
            for event in happened(node, RoundCommitted)
            if "slow" in [part.learner for part in event.contributions]
        }
        assert len(in_log) == len(rows)

    run_virtual(main, limit_seconds=6000)


def test_ten_times_slower_than_the_rest_of_many_is_not_left_out() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=20, fragments=2))
        nodes = [world.node(f"n{i}", connection=LINK) for i in range(4)]
        slow = world.node("slow", step_seconds=10.0, connection=LINK)
        await asyncio.gather(*(whole_life(node, 300) for node in nodes), whole_life(slow, 30))
        found = check_history(world.archive)
        assert len(rows_of(found, "slow")) >= len(found) / 5
        full = sum(len(record["participants"]) >= 4 for record in found)
        assert full >= len(found) * 0.8

    run_virtual(main, limit_seconds=6000)


def test_alone_it_closes_its_own_rounds_and_nobody_is_missed() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=8, fragments=2, quorum_size=3))
        node = world.node("alone", connection=LINK)
        await node.join()
        await train_until(node, lambda: world.archive.rounds() >= 12, 200)
        await node.close()
        found = check_history(world.archive)
        assert all(learners(record) == ["alone"] for record in found)
        assert all(record["cosine"] is None for record in found)
        assert max(record["quorum_seconds"] for record in found[2:]) < 8.0
        assert happened(node, LearnerMissing) == []

    run_virtual(main, limit_seconds=2000)
