"""Restarts, sweeping, nodes that come late, creators that race or die."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal, cast, override

import numpy as np
import pytest
import torch
from tests.node.history import check_history, check_settled, check_tidy, leftovers, manifest, newest
from tests.node.worlds import (
    MortalMailbox,
    Tiny,
    World,
    happened,
    live_and_die,
    model_of,
    mortal,
    same,
    train_until,
    values,
)

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.errors import LearnerReplaced
from gradientmail.events import LeaseLost, LeaseRenewed, RunCreated
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.testing.faults import CountingMailbox
from gradientmail.testing.simulated import Connection
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import train_together

ALGORITHM = DiLoCo(sync_every=4, fragments=2, in_flight=2)


@pytest.mark.parametrize("strike", ["before", "after"])
@pytest.mark.parametrize("at", [5, 12, 20, 28, 33, 37, 41, 45, 49])
def test_a_node_alone_that_is_killed_goes_on_when_it_restarts(
    at: int, strike: Literal["before", "after"]
) -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        first = world.node("a", wrap=mortal(at, strike))
        assert not await live_and_die(first, 30)
        done = world.archive.rounds()
        again = world.node("a")
        await again.join()
        started = asyncio.get_running_loop().time()
        await train_until(again, lambda: world.archive.rounds() > done)
        # At once: neither a lease nor a takeover timeout goes by.
        assert asyncio.get_running_loop().time() - started <= 4
        await again.train(12)
        await again.close()
        check_history(world.archive)
        check_settled(world.archive, again)
        await check_tidy(world)

    run_virtual(main, limit_seconds=500)


def test_kills_between_commit_and_sweep_never_leave_objects_behind() -> None:
    """Every closer dies right after its record; the next one is another node."""

    class AtTheRecord(MortalMailbox):
        async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
            record = call.operation == "put_if_absent" and call.key.startswith("rounds/")
            if record and await act():
                self.dead.set()
            if self.dead.is_set():
                await asyncio.Event().wait()
            return await act()

    async def main() -> None:
        world = World(ALGORITHM)
        for life in range(6):
            node = world.node(
                f"n{life}",
                wrap=lambda inner: AtTheRecord(inner, 0, "after"),
                lease_every=1,
                lease_timeout=3,
            )
            before = world.archive.rounds()
            assert not await live_and_die(node, 500)
            assert world.archive.rounds() == before + 1
        assert leftovers(world.archive) != []
        last = world.node("last", lease_every=1, lease_timeout=3)
        await last.join()
        goal = world.archive.rounds() + 6
        await train_until(last, lambda: world.archive.rounds() >= goal)
        await last.close()
        check_history(world.archive)
        await check_tidy(world)

    run_virtual(main, limit_seconds=1000)


def test_the_number_of_objects_stays_bounded() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        nodes = [world.node("a"), world.node("b")]
        counts: list[int] = []

        async def watch() -> None:
            while True:
                await asyncio.sleep(1)
                counts.append(len(world.archive.now()) - world.archive.rounds())

        watching = asyncio.ensure_future(watch())
        await train_together(nodes, 150)
        watching.cancel()
        assert world.archive.rounds() >= 70
        # manifest, its claim, 2 initial payloads; 2 payloads in each of 2P + 1 rounds; snapshots
        # with payloads of two learners in two rounds in flight; leases, claims.
        assert max(counts) <= 4 + 2 * 5 + 2 * 2 * 3 + 6
        assert max(counts[100:]) <= max(counts[:50])
        check_history(world.archive)

    run_virtual(main, limit_seconds=1000)


def test_what_is_kept_is_exactly_what_the_spec_says() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        node = world.node("a")
        await node.join()
        await node.train(21)
        await node.close()
        archive = world.archive
        last = archive.rounds() - 1
        records = check_history(archive)
        # The closer deletes blobs/rounds/{r-2P} with every round r.
        expected = {"manifest.json", "claims/manifest/001.json"}
        expected |= {ref["key"] for ref in manifest(archive)["init"]}
        expected |= {f"rounds/{r:010d}.json" for r in range(last + 1)}
        expected |= {
            r[kind]["key"] for r in records[max(last - 3, 0) :] for kind in ("theta", "outer")
        }
        expected |= {f"claims/{last + 1:010d}/001.json"}
        assert set(archive.now()) == expected

    run_virtual(main, limit_seconds=500)


def test_a_node_that_arrives_late_starts_from_the_newest_commit() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        early = world.node("early")
        await early.join()
        await early.train(21)
        late = world.node("late", model=Tiny(99))
        await late.join()
        committed = newest(world.archive)
        for name, value in values(model_of(late)).items():
            assert value.double().numpy().tolist() == committed[name].tolist()
        assert late.learner.rounds_seen == world.archive.rounds() - 1
        joined = world.archive.rounds()
        await asyncio.gather(early.train(20), late.train(20))
        await asyncio.gather(early.close(), late.close())
        found = check_history(world.archive)
        together = [r["round"] for r in found if len(r["participants"]) == 2]
        assert together
        assert min(together) <= joined + 3
        for node in (early, late):
            check_settled(world.archive, node)

    run_virtual(main, limit_seconds=500)


def test_a_node_a_thousand_rounds_behind_catches_up_with_few_requests() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        node = world.node("a")
        await node.join()
        await node.train(21)
        await node.close()
        archive = world.archive
        records = check_history(archive)
        # Continue the history by hand: records only differ in their numbers and payload keys.
        for number in range(len(records), 1000):
            record = json.loads(json.dumps(records[-2 + number % 2]))
            assert record["fragment"] == number % 2
            old = record["round"]
            record.update(round=number, version=number // 2 + 1, step=2 * number + 2)
            for kind in ("theta", "outer"):
                ref = record[kind]
                data = archive.ever[ref["key"]][0]
                ref["key"] = ref["key"].replace(f"{old:010d}", f"{number:010d}")
                if number >= 996:
                    archive.plant(ref["key"], data)
            text = json.dumps(record, sort_keys=True, separators=(",", ":"))
            archive.plant(f"rounds/{number:010d}.json", text.encode())
        late = world.node("late", wrap=CountingMailbox)
        await late.join()
        box = late.mailbox
        assert isinstance(box, CountingMailbox)
        assert late.learner.rounds_seen == 999
        # About 2·log2(1000) records, 2 fragments, and a few for lease and manifest.
        assert box.calls["get"] <= 20 + 2 * 2 + 10
        assert box.calls["list"] <= 5
        await late.train(8)
        await late.close()
        assert archive.rounds() > 1000

    run_virtual(main, limit_seconds=500)


@pytest.mark.parametrize("seed", range(3))
def test_a_node_joins_a_run_that_commits_faster_than_it_can_fetch(seed: int) -> None:
    """It downloads four fragments at a time; the payloads of the others are swept meanwhile."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(9):
                self.register_parameter(f"p{number}", torch.nn.Parameter(torch.zeros(4000)))

    async def main() -> None:
        world = World(DiLoCo(sync_every=9, fragments=9, in_flight=2), seed=seed)
        fast = world.node("fast", model=Wide(), step_seconds=0.1, poll=0.02)
        await fast.join()
        joined = asyncio.Event()
        training = asyncio.ensure_future(train_until(fast, joined.is_set))
        await asyncio.sleep(5)
        slow = world.node(
            "slow",
            model=Wide(),
            step_seconds=0.5,
            # A payload takes about as long as the 2P + 1 rounds for which it is kept.
            connection=Connection(0.01, 0.01, bytes_per_second=8000),
        )
        await slow.join()
        assert slow.learner.rounds_seen < world.archive.rounds() - 1
        behind = slow.learner.rounds_seen
        joined.set()
        await training
        await fast.close()
        slow.mailbox.connection = Connection()  # type: ignore[attr-defined]
        await slow.train(60)
        await slow.close()
        assert slow.learner.rounds_seen > behind
        check_history(world.archive)
        check_settled(world.archive, slow)

    run_virtual(main, limit_seconds=3000)


@pytest.mark.parametrize("seed", range(3))
def test_creators_that_race_make_one_run(seed: int) -> None:
    async def main() -> None:
        world = World(ALGORITHM, seed=seed)
        nodes = [world.node(name) for name in "abcd"]
        await train_together(nodes, 12)
        created = [node for node in nodes if happened(node, RunCreated)]
        assert len(created) == 1
        assert manifest(world.archive)["created_by"] == created[0].settings.learner
        init = [key for key in world.archive.ever if key.startswith("blobs/init/")]
        assert sorted(init) == sorted(ref["key"] for ref in manifest(world.archive)["init"])
        check_history(world.archive)

    run_virtual(main, limit_seconds=500)


def test_two_creators_at_once_adopt_one_manifest_and_the_loser_cleans_up() -> None:
    """The claimant stalls before its manifest; another creates the run; the first wakes."""

    async def main() -> None:
        world = World(ALGORITHM)
        held, reached = asyncio.Event(), asyncio.Event()
        slow, quick = world.node("slow"), world.node("quick")
        put = slow.mailbox.put_if_absent

        async def late(key: str, data: bytes) -> bool:
            if key == "manifest.json":
                reached.set()
                await held.wait()
            return await put(key, data)

        slow.mailbox.put_if_absent = late  # type: ignore[method-assign,assignment]
        joining = asyncio.ensure_future(slow.join())
        await reached.wait()
        started = asyncio.get_running_loop().time()
        await quick.join()
        # 30 polls with an unchanged count of uploads.
        assert 7.5 <= asyncio.get_running_loop().time() - started <= 9
        assert manifest(world.archive)["created_by"] == "quick"
        held.set()
        await joining
        assert same(model_of(slow), model_of(quick))
        init = world.archive.now("blobs/init/")
        assert sorted(init) == sorted(ref["key"] for ref in manifest(world.archive)["init"])
        assert happened(slow, RunCreated) == []
        await asyncio.gather(slow.train(8), quick.train(8))
        await asyncio.gather(slow.close(), quick.close())
        check_history(world.archive)

    run_virtual(main, limit_seconds=500)


def test_a_creator_killed_before_the_manifest_is_replaced_after_the_stall() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        first = world.node("a", wrap=mortal(12))  # after its claim, between its uploads
        assert not await live_and_die(first, 1)
        assert world.archive.now("claims/") == ["claims/manifest/001.json"]
        assert "manifest.json" not in world.archive.ever
        started = asyncio.get_running_loop().time()
        second = world.node("b")
        await second.join()
        assert 7.5 <= asyncio.get_running_loop().time() - started <= 9
        assert world.archive.now("claims/manifest") == [
            "claims/manifest/001.json",
            "claims/manifest/002.json",
        ]
        await second.train(8)
        await second.close()
        check_history(world.archive)

    run_virtual(main, limit_seconds=500)


class SlowLine(WrappedMailbox):
    """Uploads share one line of 2 MiB/s."""

    uploads = 0

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        left = float(call.sent) if call.operation == "put_if_absent" else 0.0
        self.uploads += 1
        while left > 0:
            await asyncio.sleep(0.05)
            left -= 0.05 * 2**21 / self.uploads
        self.uploads -= 1
        return await act()


def test_a_creator_whose_line_is_slow_is_not_taken_for_dead() -> None:
    """Its fragments follow each other, so that those who wait see each one come."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=8, fragments=8))
        large = {f"w{i}": np.zeros(2**22, np.float32) for i in range(8)}  # 16 MiB, 8 seconds each
        nodes = [world.node(name, wrap=SlowLine, model=dict(large)) for name in "ab"]
        joining = asyncio.ensure_future(nodes[0].join())
        await asyncio.sleep(1)
        await nodes[1].join()
        await joining
        assert asyncio.get_running_loop().time() > 60
        assert manifest(world.archive)["created_by"] == "a"
        assert "claims/manifest/002.json" not in world.archive.ever
        for node in nodes:
            await node.kill()

    run_virtual(main, limit_seconds=900)


def test_a_restarted_creator_finds_its_own_claim_and_goes_on() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        assert not await live_and_die(world.node("a", wrap=mortal(12)), 1)
        again = world.node("a")
        await again.join()
        assert asyncio.get_running_loop().time() < 1
        assert manifest(world.archive)["created_by"] == "a"
        assert world.archive.now("claims/manifest") == ["claims/manifest/001.json"]

    run_virtual(main, limit_seconds=500)


def test_who_no_longer_finds_its_beat_in_a_listing_renews_at_once() -> None:
    """Not only when it renews, ten minutes later: until then one of both works in vain."""

    async def main() -> None:
        world = World(ALGORITHM)
        slow = {"lease_every": 600.0, "lease_timeout": 1200.0}
        old = world.node("twin", **slow)
        await old.join()
        await old.train(6)
        new = world.node("twin", **slow)
        await new.join()
        began = asyncio.get_running_loop().time()

        async def until_replaced() -> float:
            with pytest.raises(LearnerReplaced, match="'twin'"):
                await old.train(60)
            return asyncio.get_running_loop().time() - began

        noticed, _ = await asyncio.gather(until_replaced(), new.train(60))
        assert noticed < 40
        assert happened(new, LeaseLost) == []
        await new.close()
        check_history(world.archive)

    run_virtual(main, limit_seconds=500)


class Lagging(WrappedMailbox):
    """Listings of the leases are those of a second ago."""

    def __init__(self, inner: Mailbox) -> None:
        super().__init__(inner)
        self._listed: list[tuple[float, Any]] = []

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        answer = await act()
        if (call.operation, *call.keys) != ("list", "leases/"):
            return answer
        now = asyncio.get_running_loop().time()
        self._listed.append((now, answer))
        return next((old for at, old in reversed(self._listed) if at <= now - 1.0), cast("T", ()))


def test_listings_that_lag_do_not_make_a_node_renew_again_and_again() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        node = world.node("a", wrap=Lagging, lease_every=10.0, lease_timeout=30.0)
        await node.join()
        await node.train(60)
        assert 4 <= len(happened(node, LeaseRenewed)) <= 8
        await node.close()

    run_virtual(main, limit_seconds=500)


def test_the_newer_of_two_processes_with_one_id_wins() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        old = world.node("twin")
        await old.join()
        await old.train(6)
        new = world.node("twin")
        await new.join()
        await new.train(8)
        with pytest.raises(LearnerReplaced, match="'twin'"):
            await old.train(8)
        assert len(happened(old, LeaseLost)) == 1
        await old.kill()
        await new.train(20)
        before = world.archive.rounds()
        await new.train(8)
        assert world.archive.rounds() >= before + 3
        assert happened(new, LeaseLost) == []
        await new.close()
        check_history(world.archive)
        assert world.archive.now("leases/") == []

    run_virtual(main, limit_seconds=500)


def test_stray_objects_under_every_prefix_are_ignored() -> None:
    strays = [
        "rounds/notes.txt", "rounds/.DS_Store", "rounds/1.json", "rounds/0000000099.json.tmp",
        "snapshots/x", "snapshots/0000000000/UPPER.json", "snapshots/0000000001/b/c.json",
        "snapshots/notes/a.json", "claims/x", "claims/0000000000/abc.json", "leases/x",
        "leases/b/1.json", "leases/B/0000000001.json", "leases/b/notes.txt", "blobs/x",
        "blobs/init/readme", "blobs/rounds/0000000000/readme.md", "blobs/snapshots/.DS_Store",
        ".DS_Store", "notes.txt",
    ]  # fmt: skip

    async def main() -> None:
        world = World(ALGORITHM)
        for key in strays:
            world.archive.plant(key, b"not ours")
        nodes = [world.node("a"), world.node("b")]
        await train_together(nodes, 24)
        archive = world.archive
        records = [key for key in archive.now("rounds/00") if key not in strays]
        assert len(records) >= 10
        assert set(strays) <= set(archive.now())
        others = {e for node in nodes for e in node.node.watch.live}  # type: ignore[union-attr]
        assert others <= {"a", "b"}

    run_virtual(main, limit_seconds=500)


def test_bad_claims_and_beats_do_not_stop_a_node() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        world.archive.plant("claims/0000000001/001.json", b"\xff\xfe not JSON")
        world.archive.plant("claims/0000000003/001.json", b'{"learner":"NOT AN ID"}')
        world.archive.plant("leases/ghost/0000000001.json", b"[" * 10000)
        nodes = [world.node("a"), world.node("b")]
        await train_together(nodes, 40)
        assert len(check_history(world.archive)) >= 8

    run_virtual(main, limit_seconds=500)
