"""One store, many nodes, each with a connection of its own."""

import asyncio

import pytest

from gradientmail.errors import MailboxUnavailable
from gradientmail.testing.simulated import Connection, SimulatedStore
from gradientmail.testing.virtual_time import run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_latency_and_bandwidth() -> None:
    async def main() -> None:
        store = SimulatedStore(seed=1)
        node = store.view(Connection(latency_seconds=0.5, bytes_per_second=1000))
        put = asyncio.ensure_future(node.put_if_absent("key", bytes(2000)))
        await asyncio.sleep(2.4)
        assert await store.mailbox.get("key") is None
        await asyncio.sleep(0.2)
        assert await store.mailbox.get("key") == bytes(2000)
        assert await put is True
        assert now() == pytest.approx(3.0)
        assert await node.get("key") == bytes(2000)
        assert now() == pytest.approx(6.0)
        assert await store.view().get("key") == bytes(2000)
        assert now() == pytest.approx(6.0)

    run_virtual(main)


def history(seed: int) -> list[tuple[float, str]]:
    """What two nodes see that race over connections which lose a third of the calls."""
    log: list[tuple[float, str]] = []

    async def race(store: SimulatedStore, name: str) -> None:
        node = store.view(Connection(latency_seconds=0.1, jitter_seconds=0.2, failures=1 / 3))
        for number in range(100):
            try:
                created = await node.put_if_absent(f"{number}", name.encode())
                log.append((now(), f"{name} {number} {created}"))
            except MailboxUnavailable:
                there = await store.mailbox.get(f"{number}") is not None
                log.append((now(), f"{name} {number} lost, there: {there}"))

    async def main() -> None:
        store = SimulatedStore(seed=seed)
        await asyncio.gather(race(store, "a"), race(store, "b"))
        for number in range(100):
            claims = [text for _, text in log if text.endswith(f" {number} True")]
            winner = await store.mailbox.get(f"{number}")
            assert len(claims) <= 1
            assert not claims or (winner is not None and claims[0].startswith(winner.decode()))

    run_virtual(main)
    return log


def test_seeded_faults_and_jitter() -> None:
    seed = 4
    print("seed", seed)
    log = history(seed)
    assert log == history(seed)
    assert log != history(seed + 1)
    lost = [text for _, text in log if "lost" in text]
    assert 40 < len(lost) < 95
    assert {text.rpartition(" ")[2] for text in lost} == {"True", "False"}


def test_partition_strikes_calls_that_are_on_their_way() -> None:
    async def main() -> None:
        store = SimulatedStore(seed=1)
        node = store.view(Connection(latency_seconds=1, timeout_seconds=5))
        loop = asyncio.get_running_loop()
        loop.call_later(1.5, setattr, node, "connected", False)
        with pytest.raises(MailboxUnavailable, match="put_if_absent 'key' got no answer"):
            await node.put_if_absent("key", b"x")
        assert now() == 7  # there, back, and the time to give up
        assert await store.mailbox.get("key") == b"x"
        with pytest.raises(MailboxUnavailable):
            await node.delete(["key"])
        assert await store.mailbox.get("key") == b"x"
        assert await store.view().get("key") == b"x"
        node.connected = True
        assert await node.get("key") == b"x"

    run_virtual(main)


def test_pause_holds_calls_where_they_are() -> None:
    async def main() -> None:
        store = SimulatedStore(seed=1)
        node = store.view(Connection(latency_seconds=1))
        put = asyncio.ensure_future(node.put_if_absent("key", b"x"))
        await asyncio.sleep(1.5)
        node.pause()
        await asyncio.sleep(1000)
        assert await store.mailbox.get("key") == b"x"
        assert not put.done()
        node.resume()
        assert await put is True

    run_virtual(main)
