"""Objects that are damaged or odd in one place of a run, and calls that fail once: rounds go on."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast, override

import pytest
from tests.node.history import check_history, records
from tests.node.worlds import World, delta_payload, happened, plant_snapshot

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.courier import REPLACEMENTS, TRIES
from gradientmail.errors import ProtocolError
from gradientmail.events import LearnerLost, TaskFailed
from gradientmail.exchange.layout import snapshot_key
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.testing.virtual_time import run_virtual

ALGORITHM = DiLoCo(sync_every=4, fragments=2, in_flight=2)


@pytest.mark.parametrize("damage", ["missing", "corrupt", "stale"])
def test_a_learner_replaces_a_snapshot_of_its_former_life_that_cannot_be_merged(
    damage: str,
) -> None:
    """Else nobody ever contributes to the round, and the run of one node stands still."""

    async def main() -> None:
        world = World(ALGORITHM)
        first = world.node("a")
        await first.join()
        await first.train(9)
        await first.close()
        number, archive = world.archive.rounds(), world.archive
        payload = delta_payload(archive, number % 2)
        changes: dict[str, Any] = {}
        match damage:
            case "missing":
                changes["stored"] = None
            case "corrupt":
                changes["stored"] = payload[:-1] + b"\x7f"
            case "stale":
                changes["base_version"] = 0
        plant_snapshot(archive, number, "a", payload, **changes)
        again = world.node("a")
        await again.join()
        await again.train(30)
        assert archive.rounds() >= number + 8
        await again.close()

    run_virtual(main, limit_seconds=900)


class Retaining(WrappedMailbox):
    """Keeps every snapshot, whoever deletes it, and tells which ones were to be made."""

    @override
    def __init__(self, inner: Mailbox) -> None:
        super().__init__(inner)
        self.made: list[str] = []

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if call.operation == "put_if_absent":
            self.made.append(call.key)
        if call.operation == "delete" and call.key.startswith("snapshots/"):
            return cast(T, None)
        return await act()


def test_a_snapshot_that_cannot_be_replaced_is_given_up() -> None:
    """A store may keep what it is told to delete: the learner goes on with the next round."""

    async def main() -> None:
        world, boxes = World(ALGORITHM), list[Retaining]()

        def retaining(inner: Mailbox) -> Mailbox:
            boxes.append(Retaining(inner))
            return boxes[-1]

        first = world.node("a", wrap=retaining)
        await first.join()
        await first.train(9)
        await first.close()
        number, archive = world.archive.rounds(), world.archive
        plant_snapshot(archive, number, "a", delta_payload(archive, number % 2), base_version=0)
        nodes = [world.node("b", wrap=retaining), world.node("a", wrap=retaining)]
        for node in nodes:
            await node.join()
        await asyncio.gather(*(node.train(30) for node in nodes))
        assert boxes[2].made.count(snapshot_key(number, "a")) == REPLACEMENTS
        learners = [[p["learner"] for p in record["participants"]] for record in records(archive)]
        assert learners[number] == ["b"]
        assert learners[number + 1 :].count(["a", "b"]) >= 5
        for node in nodes:
            await node.kill()

    run_virtual(main, limit_seconds=900)


class Damaging(WrappedMailbox):
    """Whoever reads the payloads of one round gets other bytes."""

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        answer: Any = await act()
        if call.operation == "get" and call.key.startswith("blobs/rounds/0000000005/") and answer:
            answer = self.instead(bytes(answer))
        return answer

    def instead(self, answer: bytes) -> bytes | None:
        return answer[:-1] + b"\x7f"


class Losing(Damaging):
    """They are gone."""

    @override
    def instead(self, answer: bytes) -> None:
        del answer


@pytest.mark.parametrize("box", [Damaging, Losing])
@pytest.mark.parametrize("quorum_size", [1, 2])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_commit_that_nobody_can_read_costs_rounds_and_not_the_run(
    box: Callable[[Mailbox], Damaging], quorum_size: int, in_flight: int
) -> None:
    """Its closer goes on with what it holds, and waits for the others while they live."""

    async def main() -> None:
        algorithm = DiLoCo(sync_every=8, fragments=4, in_flight=in_flight, quorum_size=quorum_size)
        world = World(algorithm)
        nodes = [world.node("a", wrap=box), world.node("b", wrap=box)]
        for node in nodes:
            await node.join()
        await asyncio.gather(*(node.train(100) for node in nodes))
        failed = [one for node in nodes for one in happened(node, TaskFailed)]
        assert 1 <= sum(event.task == "fetch" for event in failed) <= TRIES
        assert all("blobs/rounds/0000000005/" in one.error for one in failed if one.task == "fetch")
        found = check_history(world.archive)
        assert len(found) >= 30
        for node in ("a", "b"):  # both contribute again
            assert sum(p["learner"] == node for r in found[12:] for p in r["participants"]) >= 8
        for node in nodes:
            await node.kill()

    run_virtual(main, limit_seconds=900)


def test_times_at_the_end_of_the_range_do_not_stop_the_closer() -> None:
    """Their sum is infinite, and no record can hold that."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=3))
        node = world.node("a")
        await node.join()
        for learner in ("x", "y"):
            payload = delta_payload(world.archive, 0)
            plant_snapshot(world.archive, 0, learner, payload, step_seconds=1.7e308)
        await node.train(40)
        assert len(records(world.archive)) >= 1
        await node.kill()

    run_virtual(main, limit_seconds=900)


class FailingOnce(WrappedMailbox):
    """The second beat is refused, once."""

    def __init__(self, inner: Mailbox) -> None:
        super().__init__(inner)
        self.failed = False

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if call.key == "leases/a/0000000002.json" and not self.failed:
            self.failed = True
            raise OSError(28, "No space left on device")
        return await act()


def test_a_renewal_that_fails_once_is_repeated_in_time() -> None:
    """Not one beat later: the others would take a node for dead that trains on."""

    async def main() -> None:
        world = World(ALGORITHM)
        times = {"lease_every": 5.0, "lease_timeout": 8.0}
        first, second = world.node("a", wrap=FailingOnce, **times), world.node("b", **times)
        for node in (first, second):
            await node.join()
        await asyncio.gather(first.train(30), second.train(30))
        assert [event.task for event in happened(first, TaskFailed)] == ["lease"]
        assert happened(second, LearnerLost) == []
        for node in (first, second):
            await node.kill()

    run_virtual(main, limit_seconds=900)


class Generous(WrappedMailbox):
    """Lists under a round's payloads what does not belong there, a folder marker among it."""

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        answer: Any = await act()
        if call.operation == "list" and call.key.startswith("blobs/rounds/"):
            extra: Sequence[str] = ("manifest.json", "rounds/0000000000.json", call.key, "a/../b")
            answer = [*extra, *answer]
        return answer


def test_sweeping_deletes_nothing_that_is_not_a_payload() -> None:
    async def main() -> None:
        world = World(ALGORITHM)
        first = world.node("a")
        await first.join()
        await first.train(30)
        await first.kill()
        late = world.node("b", wrap=Generous)
        await late.join()
        await late.train(40)
        assert happened(late, TaskFailed) == []
        assert "manifest.json" not in world.archive.deleted
        assert "rounds/0000000000.json" not in world.archive.deleted
        await late.close()

    run_virtual(main, limit_seconds=900)


def test_a_manifest_whose_plan_cannot_be_scheduled_is_a_protocol_error() -> None:
    """Three fragments in two steps: no version writes that, so the bytes are damaged or hostile."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=3, fragments=3, in_flight=1))
        first = world.node("a")
        await first.join()
        await first.train(1)
        await first.kill()
        data = world.archive.ever["manifest.json"][0]
        await world.archive.delete(["manifest.json"])
        world.archive.plant(
            "manifest.json",
            data.replace(b'"fragments":3', b'"fragments":2').replace(
                b'"sync_every":3', b'"sync_every":2'
            ),
        )
        second = world.node("b")
        with pytest.raises(ProtocolError, match="between 1 and sync_every=2"):
            await second.join()
        await second.kill()

    run_virtual(main, limit_seconds=900)
