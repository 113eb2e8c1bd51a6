"""Waiting for a store that is away, under virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox import MemoryMailbox, RetryingMailbox
from gradientmail.mailbox.base import Mailbox
from gradientmail.testing.faults import CountingMailbox, FaultyMailbox, PartitionedMailbox, fail_nth
from gradientmail.testing.mailbox_contract import MailboxContract
from gradientmail.testing.mailbox_races import OpenMailbox
from gradientmail.testing.virtual_time import VirtualClock, run_virtual

SEED = 5


def retrying(mailbox: Mailbox, delays: list[float] | None = None) -> RetryingMailbox:
    print("seed", SEED)

    def note(_operation: str, _error: MailboxUnavailable, delay: float) -> None:
        if delays is not None:
            delays.append(delay)

    return RetryingMailbox(mailbox, clock=VirtualClock(), random=Random(SEED), on_unavailable=note)


class TestRetryingMailbox(MailboxContract):
    """It keeps the contract of what it wraps."""

    @pytest.fixture
    def open_mailbox(self) -> OpenMailbox:
        mailbox = MemoryMailbox()
        return lambda: retrying(mailbox)


def now() -> float:
    return asyncio.get_running_loop().time()


OPERATIONS: dict[str, Callable[[Mailbox], Coroutine[Any, Any, Any]]] = {
    "put_if_absent": lambda mailbox: mailbox.put_if_absent("new", b"x"),
    "get": lambda mailbox: mailbox.get("key"),
    "list": lambda mailbox: mailbox.list("", after="a"),
    "delete": lambda mailbox: mailbox.delete(iter(["key", "other"])),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_is_repeated_until_it_succeeds(operation: str) -> None:
    """Away for an hour; each delay is in the upper half of its step, 30 s at most."""
    delays: list[float] = []

    async def main() -> tuple[float, Any, list[str]]:
        store = MemoryMailbox()
        await store.put_if_absent("key", b"data")
        link = PartitionedMailbox(store, connected=False)
        asyncio.get_running_loop().call_later(3600, setattr, link, "connected", True)
        result = await OPERATIONS[operation](retrying(link, delays))
        return now(), result, list(await store.list(""))

    ended, result, keys = run_virtual(main)
    steps = [min(0.5 * 2**n, 30.0) for n in range(len(delays))]
    assert all(step / 2 <= delay <= step for step, delay in zip(steps, delays, strict=True))
    assert len(set(delays)) == len(delays)
    assert ended == pytest.approx(sum(delays))
    assert 3600 <= ended <= 3630
    expected = {"put_if_absent": True, "get": b"data", "list": ("key",), "delete": None}
    assert result == expected[operation]
    after: dict[str, list[str]] = {"put_if_absent": ["key", "new"], "delete": []}
    assert keys == after.get(operation, ["key"])


def test_the_next_call_begins_with_short_delays_again() -> None:
    delays: list[float] = []

    async def main() -> None:
        link = PartitionedMailbox(MemoryMailbox(), connected=False)
        mailbox = retrying(link, delays)
        for _ in range(2):
            link.connected = False
            asyncio.get_running_loop().call_later(60, setattr, link, "connected", True)
            await mailbox.get("key")

    run_virtual(main)
    first = [n for n, delay in enumerate(delays) if delay <= 0.5]
    assert len(first) == 2
    assert delays[first[1] - 1] > 10


def test_callback_gets_operation_and_error() -> None:
    heard: list[tuple[str, str]] = []

    async def main() -> None:
        faulty = FaultyMailbox(MemoryMailbox(), fail_nth(1, "before"))
        mailbox = RetryingMailbox(
            faulty,
            clock=VirtualClock(),
            random=Random(SEED),
            on_unavailable=lambda operation, error, _delay: heard.append((operation, str(error))),
        )
        await mailbox.get("the/key")

    run_virtual(main)
    assert heard == [("get", "injected: get 'the/key' failed before acting")]


def test_lost_answer_to_a_put_reads_as_false() -> None:
    """The ambiguity is the caller's to resolve, by looking at what is there."""

    async def main() -> None:
        store = MemoryMailbox()
        mailbox = retrying(FaultyMailbox(store, fail_nth(1, "after")))
        assert await mailbox.put_if_absent("key", b"mine") is False
        assert await mailbox.get("key") == b"mine"

    run_virtual(main)


@pytest.mark.parametrize("error", [ValueError("bad"), OSError(28, "full"), KeyError("bug")])
def test_other_errors_propagate_at_once(error: Exception) -> None:
    class Failing(MemoryMailbox):
        async def get(self, key: str, /) -> bytes | None:
            raise error

    async def main() -> None:
        counting = CountingMailbox(Failing())
        with pytest.raises(type(error)) as caught:
            await retrying(counting).get("key")
        assert caught.value is error
        assert counting.calls["get"] == 1
        assert now() == 0

    run_virtual(main)


def test_cancellation_goes_through_while_waiting() -> None:
    async def main() -> None:
        counting = CountingMailbox(PartitionedMailbox(MemoryMailbox(), connected=False))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await retrying(counting).get("key")
        assert now() == 100
        calls = counting.calls["get"]
        await asyncio.sleep(1000)
        assert counting.calls["get"] == calls

    run_virtual(main)
