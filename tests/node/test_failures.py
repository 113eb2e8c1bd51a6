"""What fails again and again: seldom tried, seldom told, and gone on with once it works."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from functools import partial
from typing import override

import pytest
from tests.node.worlds import World, happened

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.errors import MailboxRefused
from gradientmail.event import Event
from gradientmail.events import TaskFailed
from gradientmail.failures import Failures
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.testing.simulated import SimulatedMailbox
from gradientmail.testing.virtual_time import run_virtual

FULL = OSError(errno.ENOSPC, "No space left on device")


def test_the_same_failure_is_told_the_first_second_fourth_time() -> None:
    told: list[Event] = []
    failures = Failures(told.append)
    for number in range(200):
        failures.failed("publish", FULL, number)
    events = [event for event in told if isinstance(event, TaskFailed)]
    assert [event.times for event in events] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [event.round for event in events][:4] == [0, 1, 3, 7]
    assert str(events[2]) == (
        "round 3: publish failed 4 times in a row and is tried again: "
        "OSError: [Errno 28] No space left on device"
    )


def test_another_failure_is_told_at_once_and_success_begins_again() -> None:
    told: list[Event] = []
    failures = Failures(told.append)
    for error in (FULL, FULL, FULL, MailboxRefused("not yours"), MemoryError()):
        failures.failed("lease", error)
    failures.failed("publish", FULL)
    failures.worked("lease")
    failures.failed("lease", FULL)
    found = [(e.task, e.times, e.error) for e in told if isinstance(e, TaskFailed)]
    full = "OSError: [Errno 28] No space left on device"
    assert found == [
        ("lease", 1, full),
        ("lease", 2, full),
        ("lease", 4, "MailboxRefused: not yours"),
        ("lease", 5, "MemoryError()"),
        ("publish", 1, full),
        ("lease", 1, full),
    ]


def test_that_no_thread_starts_when_the_interpreter_exits_is_no_failure() -> None:
    told: list[Event] = []
    failures = Failures(told.append)
    failures.failed("publish", RuntimeError("can't create new thread at interpreter shutdown"))
    assert told == []
    failures.failed("publish", RuntimeError("can't start new thread"))
    assert [str(event) for event in told] == [
        "publish failed and is tried again: RuntimeError: can't start new thread"
    ]


class Disk(WrappedMailbox):
    """A store that may be full."""

    def __init__(self, inner: Mailbox) -> None:
        super().__init__(inner)
        self.full = False
        self.refused = 0

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if self.full and call.operation == "put_if_absent":
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return await act()


def test_a_full_disk_fills_no_log_and_the_run_goes_on_when_there_is_space() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=6, fragments=2, in_flight=2, quorum_size=1))
        node = world.node("a", wrap=Disk, poll=1.0, lease_every=60, lease_timeout=120)
        await node.join()
        await node.train(12)
        assert isinstance(node.mailbox, Disk)
        node.mailbox.full = True
        training = asyncio.ensure_future(node.train(1000))
        await asyncio.sleep(600)
        told = happened(node, TaskFailed)
        node.mailbox.full, before = False, world.archive.rounds()
        assert {event.task for event in told} >= {"publish", "lease"}
        assert len(told) <= 40 < node.mailbox.refused  # of some thousand failures, once
        await asyncio.sleep(10)
        assert world.archive.rounds() > before
        assert len(happened(node, TaskFailed)) == len(told)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await node.kill()

    run_virtual(main, limit_seconds=5000)


def test_who_cannot_delete_its_lease_says_what_becomes_of_it() -> None:
    async def main() -> None:
        world = World(DiLoCo(sync_every=6, fragments=2))
        node = world.node("a")
        await node.join()
        assert isinstance(node.mailbox, SimulatedMailbox)
        node.mailbox.connected = False
        await node.node.leave(patience=3.0, finish=False)
        assert str(happened(node, TaskFailed)[-1]) == (
            "leaves without deleting its lease, which runs out by itself: "
            "the mailbox has not answered for 3 s"
        )

    run_virtual(main)


class Once(WrappedMailbox):
    """Fails one put of a key, before or after the store has it; tells when."""

    def __init__(self, inner: Mailbox, key: str, *, lands: bool) -> None:
        super().__init__(inner)
        self.key, self.lands = key, lands
        self.failed_at: float | None = None

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if self.failed_at is None and call.operation == "put_if_absent" and call.key == self.key:
            if self.lands:
                await act()
            self.failed_at = asyncio.get_running_loop().time()
            raise OSError(errno.EIO, "Input/output error")
        return await act()


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("key", ["claims/0000000003/001.json", "rounds/0000000002.json"])
def test_a_closer_whose_claim_failed_tries_again_a_poll_later(key: str, *, lands: bool) -> None:
    """Nobody else has a claim on the round: it need not wait for its own silence."""

    async def main() -> None:
        world = World(DiLoCo(sync_every=4, fragments=2, in_flight=2))
        node = world.node("a", wrap=partial(Once, key=key, lands=lands), poll=1.0)
        await node.join()
        training = asyncio.ensure_future(node.train(100))
        assert isinstance(node.mailbox, Once)
        for _ in range(30):
            await asyncio.sleep(1.0)
            rounds = world.archive.rounds()
            if node.mailbox.failed_at is not None and rounds >= 4:
                break
        # A poll after the error, one to find that there is no claim, and the round itself.
        assert rounds >= 4
        assert node.mailbox.failed_at is not None
        assert asyncio.get_running_loop().time() - node.mailbox.failed_at <= 6.0
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await node.kill()

    run_virtual(main, limit_seconds=500)
