"""Who closes rounds, who takes over, and that two closers do no harm."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.node.history import check_history, check_settled, check_tidy
from tests.node.worlds import World, happened, train_until

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.events import (
    LearnerLeft,
    LearnerLost,
    RoundClaimed,
    RoundCommitted,
    RoundSuperseded,
    TookOver,
)
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call
from gradientmail.testing.faults import FaultyMailbox, Strike
from gradientmail.testing.simulated import Connection, SimulatedMailbox
from gradientmail.testing.virtual_time import VirtualClock, run_virtual
from gradientmail.testing.world import SimulatedNode, train_together

ALGORITHM = DiLoCo(sync_every=6, fragments=2, in_flight=2, quorum_size=2)


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seed", range(3))
def test_one_node_closes_and_keeps_the_role(seed: int) -> None:
    async def main() -> None:
        world = World(ALGORITHM, seed=seed)
        link = Connection(latency_seconds=0.05, jitter_seconds=0.2)
        nodes = [world.node(name, connection=link) for name in "abc"]
        await train_together(nodes, 40)
        found = check_history(world.archive)
        assert len(found) >= 12
        committed = {node.settings.learner: len(happened(node, RoundCommitted)) for node in nodes}
        # The last rounds may be closed by another when the closer has left.
        assert max(committed.values()) >= len(found) - 1
        assert sum(committed.values()) == len(found)
        assert [event for node in nodes for event in happened(node, RoundSuperseded)] == []
        first = [key for key in world.archive.ever if key.startswith("claims/00")]
        again = [key for key in first if not key.endswith("/001.json")]
        assert [key for key in again if int(key.split("/")[1]) < len(found) - 1] == []
        names = [json.loads(world.archive.ever[key][0])["learner"] for key in sorted(first)]
        assert len(set(names[: len(found) - 1])) == 1
        check_settled(world.archive, nodes[0])
        check_settled(world.archive, nodes[1])
        check_settled(world.archive, nodes[0])
        check_settled(world.archive, nodes[2])
        await check_tidy(world)
        assert world.archive.now("leases/") == []

    run_virtual(main, limit_seconds=500)


async def two_nodes(world: World, poll: float = 0.25) -> list[SimulatedNode]:
    """The first closes rounds; the other follows."""
    closer, other = world.node("a", poll=poll), world.node("b", poll=poll)
    await closer.join()
    await asyncio.sleep(1)
    await other.join()
    training = [asyncio.ensure_future(node.train(12)) for node in (closer, other)]
    await asyncio.gather(*training)
    assert {e.round for e in happened(closer, RoundCommitted)} >= {0, 1, 2}
    assert happened(other, RoundCommitted) == []
    return [closer, other]


def test_a_killed_closer_is_replaced_when_its_lease_is_stale() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        # With this poll interval the takeover timeout (30 s) is longer than the lease's (15 s).
        closer, other = await two_nodes(world, poll=1.0)
        await closer.kill()
        died, before = now(), world.archive.rounds()
        await train_until(other, lambda: world.archive.rounds() > before)
        assert now() - died <= 15 + 2.5 + 3
        (event,) = happened(other, TookOver)
        assert (event.round, event.previous, event.reason) == (before, "a", "lease")
        (lost,) = happened(other, LearnerLost)
        assert lost.learner == "a"
        await other.train(12)
        await other.close()
        check_history(world.archive)
        await check_tidy(world)

    run_virtual(main, limit_seconds=500)


def test_a_closer_that_leaves_is_replaced_at_once() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        closer, other = await two_nodes(world)
        leaving = asyncio.ensure_future(closer.close())
        left, before = now(), world.archive.rounds()
        await train_until(other, lambda: world.archive.rounds() > before + 1)
        await leaving
        # Two rounds are due within six steps; the role costs a few polls and a lease listing.
        assert now() - left <= 6 + 3
        await other.train(12)
        await other.close()
        check_history(world.archive)
        assert [event.learner for event in happened(other, LearnerLeft)] == ["a"]
        assert happened(other, LearnerLost) == []

    run_virtual(main, limit_seconds=500)


def test_a_closer_that_lives_but_is_silent_is_replaced_after_the_takeover_timeout() -> None:
    """Its beats go through and its store calls for closing hang."""

    class Stuck(FaultyMailbox):
        stuck = False

        async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
            if self.stuck and "leases/" not in call.key:
                await asyncio.Event().wait()
            return await act()

    async def main() -> None:
        world = World(ALGORITHM)

        def wrap(inner: Mailbox) -> Mailbox:
            return Stuck(inner, lambda *_: None)

        closer, other = world.node("a", wrap=wrap), world.node("b")
        await closer.join()
        await asyncio.sleep(1)
        await other.join()
        await asyncio.gather(closer.train(12), other.train(12))
        box = closer.mailbox
        assert isinstance(box, Stuck)
        box.stuck = True
        since, before = now(), world.archive.rounds()
        await train_until(other, lambda: bool(happened(other, TookOver)))
        # 30 polls, or thrice the estimates (1 + about 3 + 0); from the begin of the round.
        timeout = max(30 * 0.25, 3 * 4.0)
        assert timeout - 4 <= now() - since <= timeout + 4
        (event,) = happened(other, TookOver)
        assert (event.round, event.previous, event.reason) == (before, "a", "silence")
        assert event.after_seconds >= 7.5
        assert happened(other, LearnerLost) == []
        await closer.kill()
        await train_until(other, lambda: world.archive.rounds() > before + 4)
        await other.close()
        check_history(world.archive)
        await check_tidy(world)

    run_virtual(main, limit_seconds=500)


def test_a_stalled_closer_that_wakes_late_adopts_the_record() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        closer, other = await two_nodes(world)
        view = closer.mailbox
        assert isinstance(view, SimulatedMailbox)
        view.pause()
        before = world.archive.rounds()
        other_trains = asyncio.ensure_future(
            train_until(other, lambda: world.archive.rounds() >= before + 4)
        )
        await other_trains
        view.resume()
        await asyncio.gather(closer.train(30), other.train(30))
        await asyncio.gather(closer.close(), other.close())
        found = check_history(world.archive)
        assert len(found) > before + 6
        check_settled(world.archive, closer)
        check_settled(world.archive, other)
        await check_tidy(world)

    run_virtual(main, limit_seconds=1000)


@pytest.mark.parametrize("seed", range(4))
def test_two_closers_of_one_round_make_one_record(seed: int) -> None:
    """The closer is held up right before its commit; the other takes over; both commit."""

    async def main() -> None:
        world = World(ALGORITHM, seed=seed)
        held = asyncio.Event()
        held.set()
        waiting = asyncio.Event()

        class Late(FaultyMailbox):
            async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
                if call.operation == "put_if_absent" and call.key.startswith("rounds/"):
                    waiting.set()
                    await held.wait()
                return await act()

        closer = world.node("a", wrap=lambda inner: Late(inner, lambda *_: None))
        other = world.node("b", step_seconds=1.0 + seed / 10)
        await closer.join()
        await asyncio.sleep(1)
        await other.join()
        await asyncio.gather(closer.train(8), other.train(8))
        waiting.clear()
        held.clear()
        both = [asyncio.ensure_future(node.train(80)) for node in (closer, other)]
        await waiting.wait()
        number = world.archive.rounds()
        for _ in range(5000):
            if world.archive.rounds() > number + seed:
                break
            await asyncio.sleep(0.1)
        held.set()
        await asyncio.gather(*both)
        for node in (closer, other):  # a follower holds nothing of the rounds that others close
            assert node.node.syncer is not None
            claim, collected = node.node.syncer._claim, node.node.syncer._collectors
            assert collected.keys() <= ({claim[0], claim[0] + 1} if claim else set())
        await asyncio.gather(closer.close(), other.close())
        superseded = [e.round for e in happened(closer, RoundSuperseded)]
        committed = [e.round for e in happened(closer, RoundCommitted)]
        assert (number in superseded) != (number in committed)
        check_history(world.archive)
        check_settled(world.archive, closer)
        check_settled(world.archive, other)
        await check_tidy(world)

    run_virtual(main, limit_seconds=1000)


def test_a_commit_whose_answer_is_lost_is_recognized_as_its_own() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        lost: list[str] = []

        def decide(operation: str, key: str) -> Strike | None:
            if operation == "put_if_absent" and key not in lost:
                lost.append(key)
                return "after"
            return None

        node = world.node("a", wrap=lambda inner: FaultyMailbox(inner, decide))
        await node.join()
        await node.train(30)
        await node.close()
        found = check_history(world.archive)
        assert len(found) >= 8
        assert happened(node, RoundSuperseded) == []
        assert [e.round for e in happened(node, RoundCommitted)] == list(range(len(found)))
        assert happened(node, TookOver) == []
        assert {e.claim for e in happened(node, RoundClaimed)} == {1}

    run_virtual(main, limit_seconds=500)


def test_a_restarted_closer_finds_its_own_claim_and_goes_on_at_once() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        closer, other = await two_nodes(world)
        await closer.kill()
        died, before = now(), world.archive.rounds()
        again = world.node("a")
        await again.join()
        assert now() - died < 1
        await asyncio.gather(again.train(12), other.train(12))
        assert world.archive.rounds() >= before + 3
        assert happened(other, TookOver) == []
        assert happened(other, RoundCommitted) == []
        assert next(e.round for e in happened(again, RoundCommitted)) == before
        await asyncio.gather(again.close(), other.close())
        check_history(world.archive)

    run_virtual(main, limit_seconds=500)


@pytest.mark.parametrize("rates", [(1.0, 1.3), (0.7, 1.0), (1.5, 0.6)])
def test_clocks_that_run_at_different_rates_do_no_harm(rates: tuple[float, float]) -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        nodes = [
            world.node(name, clock=VirtualClock(rate))
            for name, rate in zip("ab", rates, strict=True)
        ]
        await train_together(nodes, 30)
        found = check_history(world.archive)
        assert len(found) >= 9
        assert [
            e for node in nodes for e in happened(node, TookOver) if e.reason == "silence"
        ] == []
        check_settled(world.archive, nodes[0])
        check_settled(world.archive, nodes[1])

    run_virtual(main, limit_seconds=1000)
