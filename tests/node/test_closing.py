"""When a round closes, with whom, and what is not merged."""

import asyncio
import json

import pytest
from tests.node.history import check_history, records
from tests.node.worlds import (
    World,
    delta_payload,
    happened,
    plant_snapshot,
    snapshot_record,
    train_until,
)

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.collecting import judge
from gradientmail.estimates import grace_seconds, moving_average, outlived
from gradientmail.events import SnapshotRejected
from gradientmail.exchange.records import Estimates, SnapshotRecord
from gradientmail.syncer import may_close
from gradientmail.testing.simulated import Connection, SimulatedMailbox
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode, train_together

UNKNOWN = Estimates(None, None, None)


@pytest.mark.parametrize(
    ("estimates", "gap", "in_flight", "overlap", "expected"),
    [
        (UNKNOWN, 10, 2, None, 0.0),
        (Estimates(1.0, 2.0, None), 10, 2, None, 0.0),
        (Estimates(None, 2.0, 1.0), 10, 2, None, 0.0),
        (Estimates(1.0, None, 1.0), 10, 2, None, 0.0),
        # ½ · max(2·10·1 − (2 + 1), 0) = 8.5, at most 10·1.
        (Estimates(1.0, 2.0, 1.0), 10, 2, None, 8.5),
        # ½ · (4·10 − 3) = 18.5, at most the gap.
        (Estimates(1.0, 2.0, 1.0), 10, 4, None, 10.0),
        # overlap_steps is less than in_flight gaps: ½ · (8 − 3).
        (Estimates(1.0, 2.0, 1.0), 10, 2, 8, 2.5),
        # … and counts only when it is.
        (Estimates(1.0, 2.0, 1.0), 10, 2, 50, 8.5),
        (Estimates(1.0, 2.0, 1.0), 10, 2, 0, 0.0),
        # Closing takes longer than the learners can wait.
        (Estimates(1.0, 15.0, 6.0), 10, 2, None, 0.0),
        (Estimates(0.25, 1.0, 0.5), 4, 2, None, 0.25),
    ],
)
def test_grace(
    estimates: Estimates, gap: int, in_flight: int, overlap: int | None, expected: float
) -> None:
    found = grace_seconds(estimates, gap=gap, in_flight=in_flight, overlap=overlap)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("accepted", "quorum", "everyone", "expected"),
    [
        (0, 1, False, False),
        (0, 1, True, False),
        (1, 1, False, True),
        (1, 2, False, False),
        (1, 2, True, True),
        (2, 2, False, True),
        (3, 2, False, True),
    ],
)
def test_may_close(accepted: int, quorum: int, everyone: bool, expected: bool) -> None:
    assert may_close(accepted, quorum, everyone=everyone) is expected


@pytest.mark.parametrize(
    ("old", "value", "expected"),
    [(None, None, None), (None, 4.0, 4.0), (4.0, None, 4.0), (4.0, 14.0, 5.0), (0.0, 1.0, 0.1)],
)
def test_moving_average(old: float | None, value: float | None, expected: float | None) -> None:
    assert moving_average(old, value) == expected


# In a world

ALONE = DiLoCo(sync_every=6, fragments=2, in_flight=2, quorum_size=1)


def test_hand_written_snapshots_are_judged_by_the_rules() -> None:
    """One for each reason, one good, in a round whose only live learner is another."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=6, fragments=2, in_flight=2, quorum_size=2))
        node = world.node("a")
        await node.join()
        archive = world.archive
        good = delta_payload(archive, 0)
        wrong_fragment = delta_payload(archive, 1)
        nan = delta_payload(archive, 0, float("nan"))
        plant_snapshot(archive, 0, "z-good", good)
        plant_snapshot(archive, 0, "no-steps", good, steps=0)
        plant_snapshot(archive, 0, "no-tokens", good, tokens=0)
        plant_snapshot(archive, 0, "few-tokens", good, tokens=-5)
        plant_snapshot(archive, 0, "odd-schema", good, schema_digest="other")
        plant_snapshot(archive, 0, "before-all", good, base_version=-1)
        plant_snapshot(archive, 0, "other-schema", good, schema_digest="0" * 64)
        plant_snapshot(archive, 0, "old", good, base_version=3)
        plant_snapshot(archive, 0, "gone", good, stored=None)
        plant_snapshot(archive, 0, "cut", good, stored=good[:-1])
        plant_snapshot(archive, 0, "flipped", good, stored=good[:-1] + b"\x01")
        plant_snapshot(archive, 0, "fragment-1", wrong_fragment)
        plant_snapshot(archive, 0, "not-finite", nan)
        plant_snapshot(archive, 0, "hostile-payload", b"\xff" * 200)
        archive.plant("snapshots/0000000000/no-json.json", b"{" * 5000)
        archive.plant("snapshots/0000000000/empty.json", b"")
        await node.train(4)
        await node.close()
        found = check_history(archive)
        assert [row["learner"] for row in found[0]["participants"]] == ["a", "z-good"]
        assert found[0]["rejected"] == [
            ["before-all", "stale"],
            ["cut", "corrupt"],
            ["empty", "corrupt"],
            ["few-tokens", "zero_steps"],
            ["flipped", "corrupt"],
            ["fragment-1", "corrupt"],
            ["gone", "missing"],
            ["hostile-payload", "corrupt"],
            ["no-json", "corrupt"],
            ["no-steps", "zero_steps"],
            ["no-tokens", "zero_steps"],
            ["not-finite", "corrupt"],
            ["odd-schema", "schema"],
            ["old", "stale"],
            ["other-schema", "schema"],
        ]
        reported = sorted((e.learner, e.reason) for e in happened(node, SnapshotRejected))
        assert [list(row) for row in reported] == found[0]["rejected"]
        weights = {row["learner"]: row["weight"] for row in found[0]["participants"]}
        assert weights == {"a": 24 * 24 / 3, "z-good": 24 * 24 / 3}

    run_virtual(main, limit_seconds=200)


def test_a_snapshot_recorded_under_another_name_is_corrupt() -> None:
    async def main() -> None:
        world = World(ALONE)
        node = world.node("a")
        await node.join()
        archive = world.archive
        record = snapshot_record(archive, 0, "b", delta_payload(archive, 0))
        archive.plant(record["payload"]["key"], delta_payload(archive, 0))
        archive.plant("snapshots/0000000000/c.json", json.dumps(record).encode())
        await node.train(4)
        await node.close()
        found = check_history(archive)
        assert [row["learner"] for row in found[0]["participants"]] == ["a"]
        assert found[0]["rejected"] == [["c", "corrupt"]]

    run_virtual(main, limit_seconds=200)


def test_judging_needs_nothing_but_the_record() -> None:
    digest = "a" * 64
    ref = {"key": f"blobs/snapshots/0000000004/b/{digest}.safetensors", "sha256": digest, "size": 9}

    def record(**changes: object) -> SnapshotRecord:
        row = {
            "learner": "b",
            "round": 4,
            "local_step": 9,
            "steps": 3,
            "tokens": 5,
            "base_version": 2,
            "rounds_seen": 3,
            "step_seconds": 0.5,
            "schema_digest": digest,
            "final": False,
            "payload": ref,
            **changes,
        }
        return SnapshotRecord.from_bytes(json.dumps(row).encode())

    def reason(**changes: object) -> str | None:
        verdict = judge(record(**changes), digest=digest, base_version=2)
        return None if verdict is None else verdict[0]

    assert reason() is None
    assert reason(final=True) is None
    assert reason(steps=0) == "zero_steps"
    assert reason(steps=-1) == "zero_steps"
    assert reason(tokens=0) == "zero_steps"
    assert reason(tokens=-(2**63)) == "zero_steps"
    assert reason(schema_digest="b" * 64) == "schema"
    assert reason(schema_digest="other") == "schema"
    assert reason(base_version=-1) == "stale"
    assert reason(base_version=1) == "stale"
    assert reason(base_version=3) == "stale"


def test_a_round_closes_at_its_quorum_and_not_before() -> None:
    """Three live learners, a quorum of two: the third is far behind."""

    async def main() -> None:
        algorithm = DiLoCo(sync_every=8, fragments=2, quorum_size=2)
        world = World(algorithm)
        nodes = [world.node("a"), world.node("b"), world.node("slow", step_seconds=50.0)]
        await asyncio.gather(*(node.join() for node in nodes))
        await nodes[0].train(10)
        assert world.archive.rounds() == 0  # one accepted is not two
        await nodes[1].train(4)
        await asyncio.sleep(2)
        for node in nodes:
            await node.kill()
        found = check_history(world.archive)
        assert found
        for record in found:
            assert [row["learner"] for row in record["participants"]] == ["a", "b"]

    run_virtual(main, limit_seconds=500)


def test_a_round_closes_when_every_live_learner_has_reported_though_the_quorum_is_larger() -> None:
    async def main() -> None:
        algorithm = DiLoCo(sync_every=8, fragments=2, quorum_size=5)
        world = World(algorithm)
        nodes = [world.node("a"), world.node("b")]
        await train_together(nodes, 24)
        found = check_history(world.archive)
        assert len(found) == 6
        both = [["a", "b"]] * 6
        assert [[row["learner"] for row in r["participants"]] for r in found] == both

    run_virtual(main, limit_seconds=500)


def test_a_crashed_learner_is_waited_for_until_its_lease_is_stale() -> None:
    async def main() -> None:
        algorithm = DiLoCo(sync_every=8, fragments=2, quorum_size=2)
        world = World(algorithm)
        a, b = world.node("a"), world.node("b")
        await a.join()
        await b.join()
        await asyncio.gather(a.train(9), b.train(9))
        before = world.archive.rounds()
        assert before == 2
        await b.kill()
        died = asyncio.get_running_loop().time()
        await train_until(a, lambda: world.archive.rounds() > before)
        # Its last beat is at most 5 s old; stale 15 s after it was seen to change, and leases are
        # listed every 2.5 s at least.
        waited = asyncio.get_running_loop().time() - died
        assert 9 <= waited <= 19
        await a.train(20)
        await a.close()
        found = check_history(world.archive)
        assert [row["learner"] for row in found[-1]["participants"]] == ["a"]

    run_virtual(main, limit_seconds=500)


def test_a_learner_within_the_grace_is_counted_and_ends_it_early() -> None:
    async def main() -> None:
        algorithm = DiLoCo(sync_every=20, fragments=2, in_flight=2, quorum_size=1)
        world = World(algorithm)
        link = Connection(latency_seconds=0.05)
        fast = world.node("fast", connection=link)
        slow = world.node("slow", step_seconds=1.15, connection=link)
        await train_together([fast, slow], 100)
        found = check_history(world.archive)
        assert len(found) >= 9
        gaps: list[float] = []
        waited: list[float] = []
        for record in found[2:-2]:
            learners = [row["learner"] for row in record["participants"]]
            assert learners == ["fast", "slow"], record["round"]
            estimates = record["estimates"]
            ahead = 2 * 10 * estimates["step"]
            full = max(ahead - estimates["quorum"] - estimates["sync"], 0) / 2
            gaps.append(min(full, 10 * estimates["step"]))
            waited.append(record["grace_seconds"])
        # Each waited for the slow one, and not longer than that.
        assert all(0 < short < full for short, full in zip(waited, gaps, strict=True)), waited

    run_virtual(main, limit_seconds=1000)


def test_a_snapshot_after_the_close_is_not_counted_and_does_not_stay() -> None:
    async def main() -> None:
        world = World(ALONE)
        node = world.node("a")
        await node.join()
        await train_until(node, lambda: world.archive.rounds() == 1)
        await asyncio.sleep(1)
        plant_snapshot(world.archive, 0, "late", delta_payload(world.archive, 0))
        await train_until(node, lambda: world.archive.rounds() == 6)
        await node.close()
        found = check_history(world.archive)
        assert all(row["learner"] == "a" for r in found for row in r["participants"])
        assert all(r["rejected"] == [] for r in found)
        assert [key for key in world.archive.now() if "late" in key] == []

    run_virtual(main, limit_seconds=500)


def test_the_record_says_when_and_what() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=7, fragments=3, in_flight=2))
        node = world.node("a")
        await node.join()
        await node.train(30)
        await node.close()
        found = check_history(world.archive)
        # (r div P)·H + ⌊((r mod P)+1)·H/P⌋ with H = 7, P = 3.
        assert [r["step"] for r in found[:7]] == [2, 4, 7, 9, 11, 14, 16]
        assert [r["fragment"] for r in found[:4]] == [0, 1, 2, 0]
        assert [r["version"] for r in found[:7]] == [1, 1, 1, 2, 2, 2, 3]
        assert all(r["cosine"] is None for r in found)
        assert all(r["update"] is None for r in found)
        assert [p["local_step"] for r in found[:7] for p in r["participants"]] == [
            2, 4, 7, 9, 11, 14, 16,
        ]  # fmt: skip

    run_virtual(main, limit_seconds=500)


@pytest.mark.parametrize("cut_at", [None, 30.5], ids=["first round", "later"])
def test_one_slow_round_leaves_nobody_out_of_those_after_it(cut_at: float | None) -> None:
    """The average of the time to a quorum says for dozens of rounds that it is long.

    20 s before the first step, as imports and compiling take; or the store stands still for 20 s.
    """

    async def main() -> None:
        world = World(DiLoCo(sync_every=40, fragments=2))
        nodes = [
            world.node(name, step_seconds=0.05, poll=0.3, connection=Connection(0.01))
            for name in "ab"
        ]

        async def life(node: SimulatedNode, late_by: float) -> None:
            await asyncio.sleep(late_by)
            await node.train(1600)

        def connect(*, connected: bool) -> None:
            for node in nodes:
                assert isinstance(node.mailbox, SimulatedMailbox)
                node.mailbox.connected = connected

        for node in nodes:
            await node.join()
        late = (20.0, 20.6) if cut_at is None else (0.0, 0.4)
        training = asyncio.gather(*map(life, nodes, late))
        await asyncio.sleep(cut_at or 0.0)
        connect(connected=cut_at is None)
        await asyncio.sleep(20)
        connect(connected=True)
        slow = world.archive.rounds()
        await training
        found = records(world.archive)
        assert max(record["quorum_seconds"] for record in found) > 4
        together = [len(record["participants"]) == 2 for record in found[slow + 4 : slow + 44]]
        print(f"{sum(together)} of {len(together)} rounds have both")
        assert len(together) >= 20
        assert sum(together) >= 0.9 * len(together)
        for node in nodes:
            await node.kill()

    run_virtual(main, limit_seconds=2000)


@pytest.mark.parametrize(
    ("average", "recent", "expected"),
    [
        (None, [1.0, 1.0, 1.0], None),
        (18.0, [], 18.0),
        (18.0, [1.0, 1.1], 18.0),
        (18.0, [20.0, 1.0, 1.1], 18.0),
        (18.0, [1.0, 1.2, 1.1], 1.2),
        (1.0, [0.2, 1.8, 0.2], 1.0),
    ],
)
def test_an_average_is_outlived_when_no_recent_value_comes_near_it(
    average: float | None, recent: list[float], expected: float | None
) -> None:
    assert outlived(average, recent) == expected
