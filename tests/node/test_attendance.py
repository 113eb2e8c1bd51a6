"""Who is in the rounds, as every node tells it; what waits; and deltas that are all alike."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import override

import pytest
import torch
from tests.node.history import record, records
from tests.node.worlds import World, drift, happened

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.attendance import ALONE, Attendance, Waiting, explain_silence
from gradientmail.events import (
    DeltasParallel,
    LearnerMissing,
    ParametersStandStill,
    RoundWaits,
    SnapshotPublished,
    TrainsAlone,
)
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode, train_together


def why() -> str:
    return "mine"


def test_a_live_learner_in_none_of_three_rounds_is_told_then_ever_more_rarely() -> None:
    attendance = Attendance()
    told: list[tuple[int, LearnerMissing]] = []
    for number in range(50):
        attendance.observe(record(number, "a"), {"a", "b"})
        told += [(number, event) for event in attendance.missing({"a", "b"}, "a", why)]
    assert [number for number, _ in told] == [2, 5, 11, 23, 47]
    first = told[0][1]
    assert (first.learner, first.rounds, first.missed) == ("b", (0, 1, 2), 3)
    assert first.rejected == ()
    assert told[1][1].rounds == (3, 4, 5)
    assert "poll_interval" in first.why
    assert "session.step" in first.why


def test_one_round_with_it_starts_the_count_again() -> None:
    attendance = Attendance()
    for number in range(30):
        taken = ("a", "b") if number % 3 == 0 else ("a",)
        attendance.observe(record(number, *taken), {"a", "b"})
        assert attendance.missing({"a", "b"}, "a", why) == []


def test_who_has_left_is_not_missing() -> None:
    attendance = Attendance()
    for number in range(3):
        attendance.observe(record(number, "a"), {"a", "b"})
    assert attendance.suspects == {"b"}
    assert attendance.missing({"a"}, "a", why) == []
    attendance.observe(record(3, "a"), {"a"})
    attendance.observe(record(4, "a"), {"a", "b"})
    assert attendance.suspects == set()


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("zero_steps", "not finite"),
        ("schema", "another model"),
        ("stale", "old versions"),
        ("missing", "not in the mailbox"),
        ("corrupt", "damaged"),
        ("of_the_future", "not known"),
    ],
)
def test_why_it_was_rejected_is_said(reason: str, said: str) -> None:
    attendance = Attendance()
    for number in range(3):
        attendance.observe(record(number, "a", rejected=(("b", reason),)), {"a", "b"})
    (event,) = attendance.missing({"a", "b"}, "b", why)
    assert event.rejected == (reason,)
    assert said in event.why
    assert reason in event.why
    assert event.why in str(event)


def test_a_node_says_of_itself_what_it_knows() -> None:
    attendance = Attendance()
    for number in range(3):
        attendance.observe(record(number, "b"), {"a", "b"})
    (event,) = attendance.missing({"a", "b"}, "a", why)
    assert (event.learner, event.why) == ("a", "mine")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"late": True}, "delta_dtype"),
        ({"idle": True}, "session.step was not called"),
        ({"idle": True, "step_seconds": 0.0}, "session.step was never called here; call it after"),
        ({"late": True}, "(sync_every), lower poll_interval, or raise quorum_size"),
        ({"late": True, "poll_interval": 0.1}, "(sync_every), or raise quorum_size"),
        ({"poll_interval": 1.5}, "lower poll_interval"),
        ({}, "rounds wait for it, lower poll_interval, or raise in_flight"),
        ({"poll_interval": 0.1}, "rounds wait for it, or raise in_flight"),
    ],
)
def test_the_likely_cause(facts: dict[str, float], said: str) -> None:
    known = {"round_seconds": 2.0, "step_seconds": 5.0, "poll_interval": 0.5}
    text = explain_silence(**{**known, "late": False, "idle": False, **facts})  # type: ignore[arg-type]
    assert said in text
    assert ("a round takes 2 s" in text) == ("never" not in said)


def test_parallel_deltas_are_told_after_three_rounds_with_two_learners() -> None:
    attendance = Attendance()
    told: list[DeltasParallel] = []
    cosines = [0.995, 0.999, 0.2, 0.991, 0.992, None, 0.999, 0.999, 0.999, 0.999, 0.98, 0.999]
    for number, cosine in enumerate(cosines):
        seen = record(number, *("ab" if cosine is not None else "a"), cosine=cosine)
        attendance.observe(seen, {"a", "b"})
        event = attendance.parallel(seen)
        if event is not None:
            told.append(event)
    assert [event.rounds for event in told] == [(3, 4, 6), (7, 8, 9)]
    assert told[0].cosine == 0.991
    assert "same data" in str(told[0])
    assert "shard" in str(told[0])


def test_who_joins_a_run_that_others_have_trained_is_not_told_of_being_alone() -> None:
    """Nor who comes back: the run is there, so the address is right."""
    attendance = Attendance()
    for number in range(6, 60):
        attendance.notice_alone(record(number, "b"), {"b"}, "b")
        assert not attendance.may_be_alone


def test_that_nobody_else_has_come_is_told_once() -> None:
    attendance = Attendance()
    told = []
    for number in range(40):
        attendance.notice_alone(record(number, "a"), {"a"}, "a")
        if attendance.is_alone({"a"}, "a"):
            told.append(number)
    assert told == [ALONE - 1]


@pytest.mark.parametrize("company", ["a lease", "a contribution"])
def test_who_is_found_when_it_is_to_be_told_is_company(company: str) -> None:
    """Eight rounds may take less than the time between two listings of leases."""
    attendance = Attendance()
    for number in range(ALONE):
        attendance.notice_alone(record(number, "a"), {"a"}, "a")
    assert attendance.may_be_alone
    if company == "a contribution":
        attendance.notice_alone(record(ALONE, "a", "b"), {"a"}, "a")
    assert not attendance.is_alone({"a", "b"} if company == "a lease" else {"a"}, "a")
    assert not attendance.is_alone({"a"}, "a")


@pytest.mark.parametrize("company", ["live", "in a round"])
@pytest.mark.parametrize("when", [0, 3, ALONE - 1])
def test_who_was_not_alone_once_is_not_told_so(company: str, when: int) -> None:
    attendance = Attendance()
    for number in range(40):
        there = number == when
        took = ("a", "b") if there and company == "in a round" else ("a",)
        live = {"a", "b"} if there and company == "live" else {"a"}
        attendance.notice_alone(record(number, *took), live, "a")
        assert not attendance.may_be_alone


def test_a_round_that_waits_is_told_after_ever_longer_times() -> None:
    waiting = Waiting()
    told = [now for now in range(100) if waiting.overdue(float(now), 10.0) is not None]
    assert told == [10, 20, 40, 80]


# In a world: what the log of each node says.


def life(node: SimulatedNode, steps: int) -> "asyncio.Task[None]":
    async def run() -> None:
        await node.join()
        await node.train(steps)

    return asyncio.ensure_future(run())


def idle(node: SimulatedNode, seconds: float) -> "asyncio.Task[None]":
    async def run() -> None:
        await node.join()
        await node.clock.sleep(seconds)

    return asyncio.ensure_future(run())


def test_a_second_machine_that_does_nothing_is_told_of_within_three_rounds() -> None:
    """On both machines; a node alone is missed by nobody."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2))
        works, idles = world.node("works"), world.node("idles")
        await asyncio.gather(life(works, 40), idle(idles, 40.0))
        assert len(records(world.archive)) >= 12
        for node in (works, idles):
            events = happened(node, LearnerMissing)
            assert {event.learner for event in events} == {"idles"}
            assert events[0].missed == 3
            assert events[0].rounds[-1] <= 4
            assert len(events) <= 4
        assert "session.step" in happened(idles, LearnerMissing)[0].why
        for node in (works, idles):
            await node.kill()

    run_virtual(main, limit_seconds=500)


def test_a_poll_interval_longer_than_a_round_is_told_where_it_is_the_cause() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=200, fragments=20, in_flight=2))
        quick = world.node("quick", step_seconds=0.01, poll=0.01)
        slow = world.node("slow", step_seconds=0.1, poll=5.0)
        await asyncio.gather(life(quick, 2000), life(slow, 200))
        missed = [e for e in happened(slow, LearnerMissing) if e.learner == "slow"]
        assert missed
        assert any("lower poll_interval" in event.why for event in missed)
        for node in (quick, slow):
            await node.kill()

    run_virtual(main, limit_seconds=500)


class SlowUploads(WrappedMailbox):
    """Deltas take longer to their place than rounds to the next one."""

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if call.operation == "put_if_absent" and call.key.startswith("blobs/snapshots/"):
            await asyncio.sleep(6.0)
        return await act()


def test_uploads_slower_than_rounds_are_told_where_they_are_the_cause() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2))
        quick = world.node("quick")
        far = world.node("far", wrap=SlowUploads)
        await asyncio.gather(life(quick, 100), life(far, 100))
        missed = [e for e in happened(far, LearnerMissing) if e.learner == "far"]
        assert "uploads smaller" in missed[0].why
        for node in (quick, far):
            await node.kill()

    run_virtual(main, limit_seconds=1000)


def sick(model: object, local_step: int) -> None:
    assert isinstance(model, torch.nn.Module)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))


def test_a_learner_whose_snapshots_are_all_rejected_is_told_of() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=2))
        nodes = [world.node("well"), world.node("sick", change=sick)]
        await asyncio.gather(*(life(node, 40) for node in nodes))
        for node in nodes:
            events = happened(node, LearnerMissing)
            assert {event.learner for event in events} == {"sick"}
            assert events[0].rejected == ("zero_steps",)
            assert events[0].rounds[-1] <= 4
        for node in nodes:
            await node.kill()

    run_virtual(main, limit_seconds=500)


def test_a_round_held_up_by_one_that_does_nothing_is_told_of() -> None:
    """With a quorum of two no round closes at all, so that no record can tell."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=2))
        idles, works = world.node("idles"), world.node("works")
        await asyncio.gather(idle(idles, 80.0), life(works, 80))
        assert records(world.archive) == []
        told = [event for node in (works, idles) for event in happened(node, RoundWaits)]
        assert told
        assert told[0].round == 0
        assert told[0].accepted == ("works",)
        assert told[0].missing == ("idles",)
        assert told[0].seconds >= 30 * 0.25
        assert "idles" in str(told[0])
        for node in (works, idles):
            await node.kill()

    run_virtual(main, limit_seconds=500)


def test_a_node_alone_whose_snapshots_cannot_count_is_told_of() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2))
        node = world.node("a", change=sick)
        await asyncio.gather(life(node, 60))
        assert records(world.archive) == []
        event = happened(node, RoundWaits)[0]
        assert (event.accepted, event.rejected, event.missing) == ((), ("a",), ())
        await node.kill()

    run_virtual(main, limit_seconds=500)


@pytest.mark.parametrize("alike", [True, False])
def test_learners_on_the_same_data_are_told_of(alike: bool) -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=2))
        nodes = [world.node(f"n{i}", change=drift(0 if alike else i)) for i in range(2)]
        await asyncio.gather(*(life(node, 30) for node in nodes))
        for node in nodes:
            told = happened(node, DeltasParallel)
            assert bool(told) == alike
            if alike:
                assert told[0].rounds[-1] <= 5
        for node in nodes:
            await node.kill()

    run_virtual(main, limit_seconds=500)


@pytest.mark.parametrize("others", [0, 1])
def test_a_node_that_nobody_joins_is_told_so(others: int) -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=2))
        nodes = [world.node(f"n{i}", change=drift(i)) for i in range(1 + others)]
        await asyncio.gather(*(life(node, 60) for node in nodes))
        assert len(records(world.archive)) > ALONE
        for node in nodes:
            told = [(event.learner, event.rounds) for event in happened(node, TrainsAlone)]
            assert told == ([] if others else [("n0", ALONE)])
            await node.kill()

    run_virtual(main, limit_seconds=500)


def test_whoever_has_joined_is_company_before_its_first_step() -> None:
    """Eight rounds take less here than the time between two listings of leases."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=4))
        nodes = [
            world.node(name, change=drift(0), poll=4.0, step_seconds=0.02)
            for name in ("quick", "slow")
        ]
        for node in nodes:
            await node.join()
        await nodes[0].train(60)
        assert len(records(world.archive)) > ALONE
        assert happened(nodes[0], TrainsAlone) == []
        for node in nodes:
            await node.kill()

    run_virtual(main, limit_seconds=500)


def stay(_model: object, _local_step: int) -> None:
    """As where the optimizer has the parameters of another model."""


@pytest.mark.parametrize("delta_dtype", [None, "BF16", "F8_E4M3", "F4"])
@pytest.mark.parametrize("others", [0, 1])
def test_a_model_that_nobody_trains_is_told_of(others: int, delta_dtype: str | None) -> None:
    """By its own node alone, after all fragments and three rounds, then twice as many."""

    async def main() -> None:
        algorithm = DiLoCo(sync_every=8, fragments=4, quorum_size=1 + others)
        world = World(replace(algorithm, delta_dtype=delta_dtype))
        nodes = [world.node("still", change=stay)]
        nodes += [world.node("well") for _ in range(others)]
        await train_together(nodes, 50)
        told = happened(nodes[0], ParametersStandStill)
        assert [event.rounds for event in told[:3]] == [4, 8, 16]
        assert {event.learner for event in told} == {"still"}
        assert all(happened(node, ParametersStandStill) == [] for node in nodes[1:])

    run_virtual(main, limit_seconds=2000)


def test_a_model_that_moves_evenly_or_is_frozen_in_part_is_none() -> None:
    def shift(model: object, _local_step: int) -> None:
        """The same delta in each round, and one tensor, which is a fragment, that stays."""
        assert isinstance(model, torch.nn.Module)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name != "embed.weight":
                    parameter.add_(0.5)

    async def main() -> None:
        world = World(DiLoCo(sync_every=8, fragments=4, outer_lr=1.0, outer_momentum=0.0))
        node = world.node("even", change=shift)
        await train_together([node], 60)
        assert len(happened(node, SnapshotPublished)) > 20
        assert happened(node, ParametersStandStill) == []

    run_virtual(main, limit_seconds=2000)
