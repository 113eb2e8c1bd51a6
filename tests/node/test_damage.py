"""A commit that is damaged in the store, as a closer that is new in the role finds it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast, override

import pytest
from tests.node.history import check_history
from tests.node.worlds import Archive, World, happened, model_of, train_until, values

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.errors import GradientMailError, PayloadCorrupt
from gradientmail.events import MomentumLost, RoundCommitted, SnapshotRejected, TaskFailed
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.testing.simulated import Connection, SimulatedMailbox
from gradientmail.testing.virtual_time import run_virtual

ALGORITHM = DiLoCo(sync_every=4, fragments=2, in_flight=2)


def newest_ref(archive: Archive, kind: str, fragment: int) -> tuple[int, str]:
    """Round and key of a fragment's newest payload."""
    number = next(n for n in range(archive.rounds() - 1, -1, -1) if n % 2 == fragment)
    record = json.loads(archive.ever[f"rounds/{number:010d}.json"][0])
    return number, record[kind]["key"]


async def damage(archive: Archive, key: str, how: str) -> None:
    data = archive.ever[key][0]
    await archive.delete([key])
    if how == "corrupt":
        archive.plant(key, data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("how", ["missing", "corrupt"])
def test_a_closer_that_cannot_read_the_outer_state_goes_on_without_momentum(how: str) -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        first = world.node("a")
        await first.join()
        await first.train(13)
        await first.kill()
        fragment = world.archive.rounds() % 2
        damaged, key = newest_ref(world.archive, "outer", fragment)
        await damage(world.archive, key, how)
        again = world.node("a")
        await again.join()
        goal = damaged + 6
        await train_until(again, lambda: world.archive.rounds() >= goal, 200)
        (event,) = happened(again, MomentumLost)
        assert event.fragment == fragment
        assert event.round == damaged + 2
        assert key in event.error
        (failed,) = happened(again, TaskFailed)
        assert key in failed.error
        assert "docs/damaged-mailbox.md" in failed.error
        assert len(happened(again, RoundCommitted)) >= 3
        assert all(value.isfinite().all() for value in values(model_of(again)).values())
        await again.kill()

    run_virtual(main, limit_seconds=900)


class Behind(WrappedMailbox):
    """A connection whose reads of records can be held up."""

    def __init__(self, inner: Mailbox) -> None:
        super().__init__(inner)
        self.released = asyncio.Event()
        self.released.set()

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if call.operation == "get" and call.key.startswith("rounds/"):
            await self.released.wait()
        return await act()


def test_what_was_swept_because_the_run_went_on_is_not_taken_for_damage() -> None:
    """A node that takes over while it is behind finds no payloads of old commits."""

    async def main() -> None:
        world = World(ALGORITHM)
        ahead, behind = world.node("ahead"), world.node("behind", wrap=Behind)
        await asyncio.gather(ahead.join(), behind.join())
        await asyncio.gather(ahead.train(8), behind.train(8))
        assert isinstance(behind.mailbox, Behind)
        behind.mailbox.released.clear()
        await asyncio.gather(ahead.train(60), behind.train(60))
        behind.mailbox.released.set()
        await asyncio.gather(ahead.train(20), behind.train(20))
        assert happened(behind, MomentumLost) == []
        failed = [event for event in happened(behind, TaskFailed) if "blobs/" in event.error]
        assert failed == []
        check_history(world.archive)
        for node in (ahead, behind):
            await node.kill()

    run_virtual(main, limit_seconds=900)


@pytest.mark.parametrize("what", ["record", "theta"])
@pytest.mark.parametrize("back", [0, 1])
def test_going_back_as_the_page_says(what: str, back: int) -> None:
    """docs/damaged-mailbox.md: delete the damaged round's record and every later one.

    And the snapshots: one of an open round was made from the version that is taken back.
    """

    async def main() -> None:
        world = World(ALGORITHM)
        archive = world.archive
        first = world.node("a")
        await first.join()
        await first.train(21)
        await first.kill()
        number = archive.rounds() - 1 - back
        record = f"rounds/{number:010d}.json"
        key = record
        if what == "theta":
            key = json.loads(archive.ever[record][0])["theta"]["key"]
        await damage(archive, key, "corrupt")
        second = world.node("b")
        if what == "record" and back == 0:  # it may be one that somebody put there before its time
            await second.join()
            await second.train(5)
            failed = {event.task for event in happened(second, TaskFailed) if key in event.error}
            assert failed >= {"poll"}
        else:
            with pytest.raises(GradientMailError, match=key) as caught:
                await second.join()
            assert what == "record" or isinstance(caught.value, PayloadCorrupt)
        await second.kill()
        await archive.delete([f"rounds/{n:010d}.json" for n in range(number, number + back + 1)])
        await archive.delete(archive.now("snapshots/"))
        before: dict[str, Any] = {k: v for k, v in archive.ever.items() if k < record}
        third = world.node("c")
        await third.join()
        assert third.node.rounds_seen == number - 1
        await train_until(third, lambda: archive.rounds() >= number + 6, 300)
        assert happened(third, TaskFailed) == []
        assert {k: v for k, v in archive.ever.items() if k < record and k in before} == before
        await third.kill()

    run_virtual(main, limit_seconds=900)


class DamagedOnce(WrappedMailbox):
    """A connection that turns over one bit of the first commit's parameters read when armed."""

    armed, key = False, ""

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        found = await act()
        wanted = call.operation == "get" and call.key.startswith("blobs/rounds/")
        if wanted and self.armed and isinstance(found, bytes):
            self.armed, self.key = False, call.key
            return cast("T", found[:-1] + bytes([found[-1] ^ 1]))
        return found


@pytest.mark.parametrize("away_seconds", [2.6, 3.2])
def test_one_damaged_read_lets_no_later_commit_pass_the_one_before_it(away_seconds: float) -> None:
    """The learner would publish from the version before it, and that would be stale."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2))
        options: dict[str, Any] = {"step_seconds": 0.2, "poll": 1.0, "connection": Connection(0.01)}
        ahead, behind = world.node("a", **options), world.node("b", wrap=DamagedOnce, **options)
        await asyncio.gather(ahead.join(), behind.join())
        box = behind.mailbox
        assert isinstance(box, DamagedOnce)
        view = box.inner
        assert isinstance(view, SimulatedMailbox)
        training = [asyncio.ensure_future(node.train(2000)) for node in (ahead, behind)]
        await asyncio.sleep(20)
        view.connected = False
        await asyncio.sleep(away_seconds)
        training[0].cancel()
        await ahead.kill()
        rounds = world.archive.rounds()
        box.armed = view.connected = True
        await asyncio.sleep(300)
        training[1].cancel()
        assert box.key
        stale = [e for e in happened(behind, SnapshotRejected) if e.reason == "stale"]
        assert stale == []
        assert world.archive.rounds() > rounds + 50
        check_history(world.archive)
        await behind.kill()

    run_virtual(main, limit_seconds=900)
