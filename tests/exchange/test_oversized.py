"""Objects far larger than any can be, in a folder: told by their size, never read."""

import asyncio
import os
from pathlib import Path

import pytest
from tests.exchange.wire import take

from gradientmail.clock import inline
from gradientmail.errors import PayloadCorrupt, ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.lease import Lease
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.exchange.records import Ref
from gradientmail.mailbox.base import get_at_most
from gradientmail.mailbox.filesystem import FilesystemMailbox
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.retrying import RetryingMailbox
from gradientmail.schema import TensorSpec
from gradientmail.testing.faults import CountingMailbox

HUGE = 2**42
"""4 TiB, sparse: reading it would take all memory."""
LAYOUT = PayloadLayout([TensorSpec("w", "F32", (8,))])
SHA = "0" * 64
BLOB = layout.round_blob_key(3, SHA, ".safetensors")


def exchange_over(folder: Path) -> Exchange:
    """An exchange over a folder in which every object is huge."""
    for key in (
        layout.MANIFEST,
        layout.round_key(3),
        layout.snapshot_key(3, "a"),
        layout.claim_key(3, 1),
        layout.beat_key("a", 2),
        BLOB,
    ):
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            os.truncate(file.fileno(), HUGE)
    box = CountingMailbox(FilesystemMailbox(folder))
    return Exchange(box, offload=inline, take=take)


def test_what_must_be_read_says_that_it_cannot_be(tmp_path: Path) -> None:
    exchange = exchange_over(tmp_path)
    said = "{} has " + f"{HUGE} bytes, more than the"
    with pytest.raises(ProtocolError, match=said.format(layout.MANIFEST)):
        asyncio.run(exchange.manifest())
    with pytest.raises(ProtocolError, match=said.format(layout.round_key(3))):
        asyncio.run(exchange.round(3))
    with pytest.raises(PayloadCorrupt, match=said.format(BLOB)):
        asyncio.run(exchange.fetch(Ref(BLOB, SHA, LAYOUT.nbytes), LAYOUT))


def test_snapshots_claims_and_beats_are_none(tmp_path: Path) -> None:
    async def main() -> None:
        exchange = exchange_over(tmp_path)
        assert await exchange.snapshot(3, "a") == b""
        assert await exchange.last_claim(3) == (1, None)
        assert not await exchange.claim(3, 1, "a")
        lease = Lease(exchange.mailbox, "a", "token")
        await lease.acquire()
        assert lease.beat == 3
        assert await exchange.keys("leases/") == ["leases/a/0000000003.json"]
        await exchange.delete([layout.beat_key("a", 3)])

    asyncio.run(main())


def test_the_limit_ends_with_the_call_and_is_checked_over_any_store() -> None:
    class Clock:
        def now(self) -> float:
            return 0.0

        async def sleep(self, seconds: float) -> None:
            raise AssertionError(seconds)

    async def main() -> None:
        inner = MemoryMailbox()
        await inner.put_if_absent("a", b"12345")
        box = RetryingMailbox(inner, clock=Clock(), random=None)  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match="a has 5 bytes, more than the 4 it may have"):
            await get_at_most(box, "a", 4)
        assert await get_at_most(box, "a", 5) == b"12345"
        assert await get_at_most(box, "b", 0) is None
        assert await box.get("a") == b"12345"

    asyncio.run(main())
