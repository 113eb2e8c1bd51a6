"""What a node asks of the store: counted in worlds under virtual time, and what it would cost.

The published version made 34–40 requests a round a node at poll 0.5 s and rounds of 2 s: 28 of them
LISTs, 5 PUTs. A quarter of what those cost is the most that a round may cost here, also where it
takes a minute. ``docs/mailboxes.md`` has the figures.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Buffer
from random import Random
from typing import Any, override

import pytest
from tests.node.worlds import Archive, World, happened, train_until

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.commands.bill import Plan, requests_of
from gradientmail.events import Event, RoundSeen, SnapshotPublished
from gradientmail.mailbox.wrapped import Operation
from gradientmail.rhythm import LONGEST_PAUSE_SECONDS, Rhythm
from gradientmail.testing.faults import CountingMailbox
from gradientmail.testing.simulated import Connection
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode

POLL = 0.5
MICRODOLLARS = {"list": 5.0, "put_if_absent": 5.0, "get": 0.4, "delete": 0.0}
QUARTER = (28 * 5.0 + 5 * 5.0 + 4 * 0.4) / 4
LINK = Connection(latency_seconds=0.02, jitter_seconds=0.01)
AS_USUAL = {"poll": POLL, "lease_every": 60.0, "lease_timeout": 120.0, "connection": LINK}


def counted(node: SimulatedNode) -> Counter[Operation]:
    """What the node has asked since the last time, which starts the next count."""
    assert isinstance(node.mailbox, CountingMailbox)
    calls, node.mailbox.calls = node.mailbox.calls, Counter()
    return calls


def cost(calls: Counter[Operation]) -> float:
    """Millionths of a dollar."""
    return sum(MICRODOLLARS[operation] * count for operation, count in calls.items())


async def all_at_once(nodes: list[SimulatedNode], steps: int) -> None:
    await asyncio.gather(*(node.train(steps) for node in nodes))


@pytest.mark.parametrize(
    ("nodes", "round_seconds", "steps"), [(2, 2.0, 80), (2, 60.0, 80), (8, 60.0, 40)]
)
def test_requests_of_a_round(nodes: int, round_seconds: float, steps: int) -> None:
    world = World(DiLoCo(sync_every=20, fragments=4, quorum_size=nodes))

    async def main() -> tuple[int, Counter[Operation]]:
        team = [
            world.node(f"n{i}", step_seconds=round_seconds / 5, wrap=CountingMailbox, **AS_USUAL)
            for i in range(nodes)
        ]
        for node in team:
            await node.join()
        await all_at_once(team, 50)
        before, total = world.archive.rounds(), Counter[Operation]()
        for node in team:
            counted(node)
        await all_at_once(team, steps)
        for node in team:
            total.update(counted(node))
            await node.kill()
        return world.archive.rounds() - before, total

    rounds, total = run_virtual(main)
    share = rounds * nodes
    print({operation: round(count / share, 2) for operation, count in total.items()})
    assert rounds in (steps // 5, steps // 5 - 1)
    assert total["list"] / share <= 2
    assert total["put_if_absent"] / share <= 5.2
    assert cost(total) / share <= QUARTER
    expected = requests_of(
        Plan(nodes, 53, sync_every=20, fragments=4, step_seconds=round_seconds / 5, poll=POLL)
    )
    print(expected)
    assert total["list"] / rounds == pytest.approx(expected.lists, rel=0.25)
    assert total["put_if_absent"] / rounds == pytest.approx(expected.puts, rel=0.25)
    assert total["get"] / rounds == pytest.approx(expected.gets, rel=0.25)


def test_a_node_that_waits_asks_little_and_still_lists_who_lives() -> None:
    """Its rounds in flight wait for another learner, alive, who takes no step for half an hour."""
    world = World(DiLoCo(sync_every=20, fragments=4, quorum_size=2))

    async def main() -> list[Counter[Operation]]:
        team = [
            world.node(name, step_seconds=0.4, wrap=CountingMailbox, **AS_USUAL) for name in "ab"
        ]
        for node in team:
            await node.join()
        await all_at_once(team, 60)
        await team[0].train(40)
        assert len(team[0].learner.in_flight()) == 2
        for node in team:
            counted(node)
        await asyncio.sleep(1800.0)
        calls = [counted(node) for node in team]
        for node in team:
            await node.kill()
        return calls

    for calls in run_virtual(main):
        print(calls)
        assert calls["put_if_absent"] <= 31  # beats
        assert 30 <= calls["list"] <= 180
        assert calls["get"] <= 2.1 * 1800 / POLL
        assert cost(calls) <= 4_000


def forge_rounds(archive: Archive, count: int) -> None:
    """Go on from the newest record of each fragment, without anybody having trained."""
    records: list[dict[str, Any]] = [
        json.loads(archive.ever[key][0]) for key in archive.now("rounds/")
    ]
    last = len(records) + count - 1
    for number in range(len(records), last + 1):
        old = records[number - 4]
        record: dict[str, Any] = {
            **old,
            "round": number,
            "version": old["version"] + 1,
            "step": number * 5,
        }
        for name in ("theta", "outer"):
            place = f"blobs/rounds/{number:010d}/"
            first = records[number % 4 + 4][name]
            record[name] = {**first, "key": place + first["key"].rpartition("/")[2]}
            if number > last - 4:
                archive.plant(record[name]["key"], archive.ever[first["key"]][0])
        records.append(record)
        text = json.dumps(record, sort_keys=True, separators=(",", ":"))
        archive.plant(f"rounds/{number:010d}.json", text.encode())


@pytest.mark.parametrize("joins", [True, False], ids=["joins", "was cut off"])
def test_a_node_a_thousand_rounds_behind_catches_up_with_few_requests(joins: bool) -> None:
    world = World(DiLoCo(sync_every=20, fragments=4))

    async def main() -> Counter[Operation]:
        first = world.node("first", **AS_USUAL)
        late = world.node("late", wrap=CountingMailbox, **AS_USUAL)
        await first.join()
        await train_until(first, lambda: world.archive.rounds() >= 8)
        if not joins:
            await late.join()
        await first.close()
        rounds = world.archive.rounds()
        if joins:
            forge_rounds(world.archive, 1000)
            await late.join()
        else:
            counted(late)
            forge_rounds(world.archive, 1000)
            watch = late.node.watch
            assert watch is not None
            while watch.next_round < rounds + 1000:
                await watch.changed.next.wait()
            await asyncio.sleep(POLL)
        calls = counted(late)
        await late.train(1)
        assert late.learner.rounds_seen == rounds + 999
        await late.kill()
        return calls

    calls = run_virtual(main)
    print(calls)
    # Twice log₂ of 1,000, the newest record and parameters of four fragments, and some polls.
    assert calls["get"] <= 50
    # The one that was cut off also takes the closer's role over, and sweeps.
    assert calls["list"] <= 10
    assert calls["put_if_absent"] <= 2
    assert cost(calls) <= 80


class TimedArchive(Archive):
    """Notes when each record was created."""

    def __init__(self) -> None:
        super().__init__()
        self.created: dict[int, float] = {}

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        created = await super().put_if_absent(key, data)
        if created and key.startswith("rounds/"):
            self.created[int(key[7:17])] = asyncio.get_running_loop().time()
        return created


class TimedEvents(list[Event]):
    """Notes when each round was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    @override
    def append(self, event: Event, /) -> None:
        super().append(event)
        if isinstance(event, RoundSeen):
            self.seen[event.round] = asyncio.get_running_loop().time()


@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_a_commit_is_seen_half_a_poll_later_on_average(spread: float) -> None:
    """Rounds of about a minute, by one learner alone; the one who looks publishes nothing.

    ``spread`` is by how much of itself a step may be shorter or longer.
    """
    world = World(DiLoCo(sync_every=20, fragments=4), seed=7)
    world.archive = archive = TimedArchive()
    world.store.mailbox = archive
    random, events = Random(7), TimedEvents()

    async def main() -> None:
        alone = world.node("alone", step_seconds=0.0, **AS_USUAL)
        looks = world.node("looks", wrap=CountingMailbox, **AS_USUAL)
        looks.events = events
        await alone.join()
        await looks.join()
        while archive.rounds() < 32:
            await asyncio.sleep(12.0 * random.uniform(1 - spread, 1 + spread))
            await alone.train(1)
        await alone.kill()
        await looks.kill()
        assert happened(looks, SnapshotPublished) == []

    run_virtual(main)
    delays = [events.seen[number] - archive.created[number] for number in range(8, 31)]
    mean = sum(delays) / len(delays)
    print(f"mean {mean:.3f} s, longest {max(delays):.3f} s")
    on_the_way = 2 * (LINK.latency_seconds + LINK.jitter_seconds)
    assert mean <= POLL / 2 + on_the_way + (0.05 if spread < 0.5 else 0.5)
    assert max(delays) <= 60 / 8 + on_the_way


def test_rhythm() -> None:
    rhythm = Rhythm(0.5, now=100.0)
    assert (rhythm.due_in(150.0), rhythm.pause(150.0), rhythm.waited(150.0)) == (0.0, 0.5, 50.0)
    rhythm.advance(160.0)
    assert (rhythm.due_in(161.0), rhythm.pause(161.0), rhythm.waited(161.0)) == (0.0, 0.5, 1.0)
    rhythm.advance(220.0)  # one length is known: due after 60 s, give or take 4 × 7.5
    assert (rhythm.round_seconds, rhythm.due_in(220.0), rhythm.pause(220.0)) == (60.0, 30.0, 7.5)
    assert (rhythm.due_in(245.0), rhythm.pause(245.0)) == (5.0, 5.0)
    assert (rhythm.due_in(249.9), rhythm.pause(249.9)) == (pytest.approx(0.1), 0.5)
    assert (rhythm.due_in(251.0), rhythm.pause(251.0)) == (0.0, 0.5)
    for number in range(1, 40):
        rhythm.advance(220.0 + 60.0 * number)
    assert rhythm.due_in(2560.0) == pytest.approx(59.0, abs=0.01)  # two polls before the minute
    rhythm.advance(3000.0)  # one that took long is not forgotten at once
    assert rhythm.due_in(3000.0) == 0.0


def test_commits_that_are_read_at_one_moment_tell_nothing_of_how_long_rounds_take() -> None:
    """As whoever joins reads them, or comes back from an outage."""
    rhythm = Rhythm(1.0, now=0.0)
    for _ in range(4):
        rhythm.advance(10.0)
    assert rhythm.round_seconds is None
    rhythm.advance(70.0)
    rhythm.advance(70.0)
    assert rhythm.round_seconds == 60.0
    rhythm.advance(130.0)
    assert (rhythm.round_seconds, rhythm.late_at) == (60.0, 130.0 + 60.0 + 4 * 0.7 * 7.5)


def test_long_rounds_are_looked_at_all_the_same() -> None:
    rhythm = Rhythm(1.0, now=0.0)
    rhythm.advance(0.0)
    rhythm.advance(36_000.0)
    assert rhythm.pause(36_001.0) == LONGEST_PAUSE_SECONDS
