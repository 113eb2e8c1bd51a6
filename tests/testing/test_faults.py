"""Mailboxes that fail, hang, are slow and count."""

import asyncio
from random import Random

import pytest

from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox import MemoryMailbox
from gradientmail.testing.faults import (
    CountingMailbox,
    Decide,
    FaultyMailbox,
    HangingMailbox,
    PartitionedMailbox,
    SlowMailbox,
    fail_nth,
    fail_randomly,
)
from gradientmail.testing.mailbox_contract import MailboxContract
from gradientmail.testing.mailbox_races import OpenMailbox
from gradientmail.testing.simulated import SimulatedStore
from gradientmail.testing.virtual_time import VirtualClock, run_virtual


class TestWrappersWithoutFaults(MailboxContract):
    """All of them together change nothing while nothing is wrong."""

    examples = 10
    many_keys = 80

    @pytest.fixture
    def open_mailbox(self) -> OpenMailbox:
        mailbox = MemoryMailbox()
        return lambda: CountingMailbox(
            PartitionedMailbox(
                HangingMailbox(FaultyMailbox(mailbox, lambda _operation, _key: None))
            )
        )


class TestSimulatedViews(MailboxContract):
    """A view without delays is a mailbox like any other."""

    examples = 10
    many_keys = 80

    @pytest.fixture
    def open_mailbox(self) -> OpenMailbox:
        return SimulatedStore(seed=1).view


def test_strikes_before_and_after() -> None:
    async def main() -> None:
        store = MemoryMailbox()
        faulty = FaultyMailbox(store, fail_nth(2, "before", "put_if_absent"))
        assert await faulty.put_if_absent("1", b"")
        assert await faulty.get("2") is None
        with pytest.raises(MailboxUnavailable, match="put_if_absent '2' failed before acting"):
            await faulty.put_if_absent("2", b"")
        assert await store.get("2") is None
        assert await faulty.put_if_absent("2", b"")

        faulty.decide = fail_nth(1, "after")
        with pytest.raises(MailboxUnavailable, match="delete '1' failed after acting"):
            await faulty.delete(["1", "2"])
        assert await store.list("") == ()

    asyncio.run(main())


def test_decide_hears_every_operation_and_key() -> None:
    heard: list[tuple[str, str]] = []

    def decide(operation: str, key: str) -> None:
        heard.append((operation, key))

    async def main() -> None:
        faulty = FaultyMailbox(MemoryMailbox(), decide)
        await faulty.put_if_absent("a/b", b"")
        await faulty.get("a/c")
        await faulty.list("a/", after="x")
        await faulty.delete(iter(["a/b", "a/d"]))
        await faulty.delete([])

    asyncio.run(main())
    assert heard == [
        ("put_if_absent", "a/b"),
        ("get", "a/c"),
        ("list", "a/"),
        ("delete", "a/b"),
        ("delete", ""),
    ]


def test_random_failures_have_their_probability() -> None:
    seed = 3
    print("seed", seed)
    decide: Decide = fail_randomly(Random(seed), 0.2)
    strikes = [decide("get", "key") for _ in range(10_000)]
    assert 800 < strikes.count("before") < 1200
    assert 800 < strikes.count("after") < 1200
    never = fail_randomly(Random(seed), 0.0)
    assert {never("get", "key") for _ in range(1000)} == {None}


def test_partition_loses_calls_and_answers() -> None:
    async def main() -> None:
        store = MemoryMailbox()
        link = PartitionedMailbox(SlowMailbox(store, clock=VirtualClock(), seconds=1))
        asyncio.get_running_loop().call_later(1.5, setattr, link, "connected", False)
        with pytest.raises(MailboxUnavailable, match="no connection for put_if_absent 'key'"):
            await link.put_if_absent("key", b"x")
        assert await store.get("key") == b"x"
        with pytest.raises(MailboxUnavailable):
            await link.delete(["key"])
        assert await store.get("key") == b"x"
        link.connected = True
        assert await link.get("key") == b"x"

    run_virtual(main)


def test_hanging_until_released() -> None:
    async def main() -> None:
        store = MemoryMailbox()
        mailbox = HangingMailbox(store)
        mailbox.hang()
        put = asyncio.ensure_future(mailbox.put_if_absent("key", b"x"))
        await asyncio.sleep(1000)
        assert not put.done()
        assert await store.get("key") is None
        mailbox.release()
        assert await put is True
        mailbox.hang()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(mailbox.get("key"), 5)

    run_virtual(main)


def test_slow_both_ways_on_its_clock() -> None:
    async def main() -> None:
        store, loop = MemoryMailbox(), asyncio.get_running_loop()
        slow = SlowMailbox(store, clock=VirtualClock(2.0), seconds=3)
        put = asyncio.ensure_future(slow.put_if_absent("key", b"x"))
        await asyncio.sleep(1.4)
        assert await store.get("key") is None
        await asyncio.sleep(0.2)
        assert await store.get("key") == b"x"
        assert await put is True
        assert loop.time() == 3

    run_virtual(main)


def test_counts() -> None:
    async def main() -> None:
        counting = CountingMailbox(MemoryMailbox())
        await counting.put_if_absent("key", b"12345")
        await counting.put_if_absent("key", bytearray(7))
        await counting.get("key")
        await counting.get("missing")
        await counting.list("")
        await counting.delete(["key", "missing"])
        assert counting.calls == {"put_if_absent": 2, "get": 2, "list": 1, "delete": 1}
        assert (counting.sent_bytes, counting.received_bytes) == (12, 5)

    asyncio.run(main())
