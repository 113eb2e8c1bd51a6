"""Objects that are created once: what counts when the store has something there, or says so."""

import asyncio
from collections.abc import Buffer
from typing import override

import pytest

from gradientmail.clock import inline
from gradientmail.errors import ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import CREATIONS, Exchange
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.exchange.records import Estimates, Manifest, Ref, RoundRecord
from gradientmail.exchange.sealing import Sealing
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.schema import TensorSpec

SHA256 = "a" * 64
REF = Ref(layout.round_blob_key(0, SHA256, layout.RAW_EXT), SHA256, 1)
NONE = Estimates(None, None, None)
RECORD = RoundRecord(0, 1, 0, 1, (), (), None, REF, REF, None, 0.0, 0.0, NONE)


class Denying(MemoryMailbox):
    """Says so many times that an object is there that nobody finds."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        self.left -= 1
        return self.left < 0 and await super().put_if_absent(key, data)


@pytest.mark.parametrize("there", ["whole", "flipped", "cut", "longer", "nothing"])
def test_a_payload_that_is_there_and_damaged_is_replaced(there: str) -> None:
    """By the commit of a run that went back and took the same steps again, for one."""
    payload_layout = PayloadLayout([TensorSpec("w", "F32", (4,))])
    buffer = payload_layout.blank(lambda nbytes: memoryview(bytearray(nbytes)))
    found = {
        "whole": bytes(buffer),
        "flipped": bytes(buffer)[:-1] + b"\x01",
        "cut": bytes(buffer)[:-1],
        "longer": bytes(buffer) + b"\0",
        "nothing": b"",
    }[there]

    async def main() -> tuple[bytes, bool]:
        mailbox = MemoryMailbox()
        one = exchange(mailbox)

        def key_of(digest: str, extension: str) -> str:
            return layout.round_blob_key(0, digest, extension)

        sealed = await one.seal(Sealing(buffer, payload_layout), key_of)
        await mailbox.put_if_absent(sealed.ref.key, found)
        payload = await one.store(sealed)
        data = await mailbox.get(sealed.ref.key)
        return bytes(data or b""), payload.buffer is buffer

    assert asyncio.run(main()) == (bytes(buffer), True)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_view_that_was_kept_by_a_call_that_failed_counts_as_kept(*, keeps: bool) -> None:
    """Else the commit made from a delta would be written over it under the store."""
    kept: list[Buffer] = []

    class Losing(MemoryMailbox):
        @override
        async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
            if await super().put_if_absent(key, bytes(memoryview(data))):
                if keeps:
                    kept.append(data)
                raise OSError(5, "the answer was lost")
            return False

    async def main() -> tuple[bool, bool]:
        one = exchange(Losing())
        payload_layout = PayloadLayout([TensorSpec("w", "F32", (4,))])
        buffer = payload_layout.blank(lambda nbytes: memoryview(bytearray(nbytes)))
        sealed = await one.seal(
            Sealing(buffer, payload_layout), lambda d, e: layout.round_blob_key(0, d, e)
        )
        with pytest.raises(OSError, match="lost"):
            await one.store(sealed)
        payload = await one.store(sealed)
        return payload.sole, bool(kept)

    assert asyncio.run(main()) == (not keeps, keeps)


def exchange(mailbox: MemoryMailbox) -> Exchange:
    return Exchange(mailbox, offload=inline, take=lambda nbytes: memoryview(bytearray(nbytes)))


def test_a_record_that_is_not_there_was_not_created() -> None:
    mailbox = Denying(CREATIONS - 1)
    assert asyncio.run(exchange(mailbox).commit(RECORD)) is RECORD
    assert asyncio.run(mailbox.list("")) == (RECORD.key,)


def test_a_record_that_can_neither_be_created_nor_read_is_told() -> None:
    with pytest.raises(ProtocolError, match=f"{RECORD.key} can neither be created nor read"):
        asyncio.run(exchange(Denying(10**6)).commit(RECORD))


def test_a_manifest_that_nobody_could_read_is_not_written() -> None:
    many = tuple(TensorSpec(f"{number:0500d}", "F32", (1,)) for number in range(70_000))
    mailbox, init = MemoryMailbox(), layout.init_blob_key(0, SHA256, layout.RAW_EXT)
    plan = (tuple(one.name for one in many),)
    manifest = Manifest(many, plan, {}, (Ref(init, SHA256, 1),), "a", ())
    with pytest.raises(ValueError, match="70000 parameters are more than a manifest can name"):
        asyncio.run(exchange(mailbox).create_manifest(manifest))
    assert asyncio.run(mailbox.list("")) == ()
