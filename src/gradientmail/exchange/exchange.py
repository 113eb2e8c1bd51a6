"""The verbs of the protocol: who may write what into the mailbox, and what a reader checks.

Every write has three outcomes: done, lost, unknown. Lost is a value that the caller must look at;
unknown (``MailboxUnavailable``) is repeated by the retrying mailbox below until it is one of the
others, and where an earlier attempt may have landed unheard the object is read back and compared.

A payload that this process made or fetched is found here as long as somebody holds it, so that
nothing is downloaded twice and two users of one version share one buffer.
"""

import asyncio
from collections.abc import (
    Awaitable,
    Buffer,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from gradientmail.buffers import show
from gradientmail.clock import Offload
from gradientmail.errors import PayloadCorrupt, ProtocolError
from gradientmail.exchange import compression, layout
from gradientmail.exchange.payload import PayloadLayout, sha256_hex
from gradientmail.exchange.records import (
    MANIFEST_LIMIT,
    ROUND_LIMIT,
    SMALL_LIMIT,
    Claim,
    Manifest,
    Ref,
    RoundRecord,
    SnapshotRecord,
)
from gradientmail.exchange.sealing import Payload, Sealed, Sealing
from gradientmail.mailbox.base import Mailbox, get_at_most

REPAIR = (
    "Put the object back from a copy of the mailbox, or see docs/damaged-mailbox.md for how the "
    "run goes on from the commit before"
)
"""What to do about an object of the run that cannot be read."""
CREATIONS = 5
"""How often an object is to be created that is neither created nor there."""


class Exchange:
    """One run in one mailbox. Used on the loop's thread, but for ``deltas`` and ``forget``."""

    def __init__(
        self,
        mailbox: Mailbox,
        *,
        offload: Offload,
        take: Callable[[int], memoryview],
        compressed: bool = False,
    ) -> None:
        """Write payloads with zstd if ``compressed``; ``take`` gives buffers.

        Hashing and compressing is given to ``offload``.
        """
        self.mailbox = mailbox
        self.take = take
        self._offload = offload
        self._extension = layout.ZSTD_EXT if compressed else layout.RAW_EXT
        self._held: WeakValueDictionary[str, Payload] = WeakValueDictionary()
        self.deltas: dict[int, Payload] = {}
        """This learner's deltas by round, kept until merged here or committed elsewhere.

        A commit made here may write over one and then forgets it.
        """

    # Payloads

    async def hash_written(self, sealing: Sealing, counts: Mapping[str, int]) -> None:
        """Hash as far as the payload is complete, ``counts`` elements of its tensors being written.

        One call at a time. What is compressed before it is hashed has to wait for ``seal``.
        """
        stop = sealing.layout.written(counts)
        if self._extension == layout.RAW_EXT and stop > max(
            sealing.hashed, len(sealing.layout.header)
        ):
            await self._offload(sealing.hash_until, stop)

    async def seal(self, sealing: Sealing, key_of: Callable[[str, str], str]) -> Sealed:
        """Compress if the run does, hash what is not yet, and name: ``key_of(sha256, extension)``.

        All of the payload is written by now.
        """
        return await self._offload(self._seal, sealing, key_of)

    def _seal(self, sealing: Sealing, key_of: Callable[[str, str], str]) -> Sealed:
        stored = sealing.buffer
        if self._extension == layout.ZSTD_EXT:
            stored = compression.compress(sealing.layout, stored, self.take)
            digest = sha256_hex(stored)
        else:
            sealing.hash_until(stored.nbytes)
            digest = sealing.sha256.hexdigest()
        ref = Ref(key=key_of(digest, self._extension), sha256=digest, size=stored.nbytes)
        return Sealed(ref, sealing.buffer, stored, sealing.layout)

    async def sha256(self, buffer: memoryview) -> str:
        """The sha256 of ``buffer`` in hexadecimal digits."""
        return await self._offload(sha256_hex, buffer)

    async def plain_sha256(self, payload: Payload) -> str:
        """The sha256 of a payload as safetensors, whatever codec stored it."""
        plain = payload.ref.key.endswith(layout.RAW_EXT)
        return payload.ref.sha256 if plain else await self.sha256(payload.buffer)

    async def store(self, sealed: Sealed) -> Payload:
        """Put the payload. Its key holds its hash, so that finding it there is success too.

        One that is damaged is replaced: the bytes of its hash are at hand.
        """
        for _ in range(CREATIONS):
            if await self._put(sealed) or await self._is_whole(sealed):
                break
            await self.mailbox.delete((sealed.ref.key,))
        else:
            raise PayloadCorrupt(f"{sealed.ref.key} is damaged, and cannot be replaced")
        payload = self.hold(sealed.ref, sealed.buffer, sealed.layout)
        payload.sole = all(ended() for ended in sealed.shown)
        return payload

    async def _put(self, sealed: Sealed) -> bool:
        """Whether it was created."""
        view, ended = show(sealed.stored)
        sealed.shown.append(ended)
        storing = self.mailbox.put_if_absent(sealed.ref.key, view)
        del view
        return await storing

    async def _is_whole(self, sealed: Sealed) -> bool:
        """Whether what is there already is these very bytes: a disk may have changed it."""
        try:
            stored = await self._stored(sealed.ref, sealed.layout)
            if stored is not None:
                await self._offload(_check, stored, sealed.ref)
        except PayloadCorrupt:
            return False
        return stored is not None

    def hold(self, ref: Ref, buffer: memoryview, payload_layout: PayloadLayout) -> Payload:
        """Remember a payload that was made here instead of fetched."""
        payload = Payload(ref, buffer, payload_layout.slots)
        self._held[ref.key] = payload
        return payload

    def forget(self, payload: Payload) -> None:
        """Hand it out no more: its buffer will be written over."""
        self._held.pop(payload.ref.key, None)

    def held(self, ref: Ref) -> Payload | None:
        """The payload, if somebody in this process holds it."""
        payload = self._held.get(ref.key)
        return payload if payload is not None and payload.ref == ref else None

    async def fetch(self, ref: Ref, payload_layout: PayloadLayout) -> Payload | None:
        """The payload behind ``ref``, checked against it and the layout; None when it is gone.

        Raises ``PayloadCorrupt`` naming the key.
        """
        payload = self.held(ref)
        if payload is None:
            stored = await self._stored(ref, payload_layout)
            payload = None if stored is None else await self._open(stored, ref, payload_layout)
        return payload

    async def examine[T](
        self,
        ref: Ref,
        payload_layout: PayloadLayout,
        look: Callable[[Payload], Coroutine[Any, Any, T]],
    ) -> tuple[Payload, T] | None:
        """``fetch``, and what ``look`` gives of the payload.

        It may be called while the hash is still being checked: it has to bear any bytes.
        """
        payload = self.held(ref)
        if payload is None:
            stored = await self._stored(ref, payload_layout)
            if stored is None:
                return None
            plain = not ref.key.endswith(layout.ZSTD_EXT)
            if plain and ref.size == payload_layout.nbytes and payload_layout.matches(stored):
                payload = Payload(ref, stored, payload_layout.slots)
                looking = asyncio.ensure_future(look(payload))
                try:
                    await self._offload(_check, stored, ref)
                finally:
                    await asyncio.gather(looking, return_exceptions=True)
                self._held[ref.key] = payload
                try:
                    return payload, looking.result()
                finally:
                    del looking  # an error has this frame, and would hold itself and the payload
            payload = await self._open(stored, ref, payload_layout)
        return payload, await look(payload)

    async def _open(self, stored: memoryview, ref: Ref, payload_layout: PayloadLayout) -> Payload:
        payload = await self._offload(_open, stored, ref, payload_layout, self.take)
        self._held[ref.key] = payload
        return payload

    async def _stored(self, ref: Ref, payload_layout: PayloadLayout) -> memoryview | None:
        """What the store has under ``ref``'s key, if that can be a payload of this layout."""
        if ref.size > payload_layout.nbytes + (payload_layout.nbytes // 64 + 4096):
            raise PayloadCorrupt(
                f"{ref.key}: {ref.size} bytes are more than its tensors' {payload_layout.nbytes}"
            )
        try:
            stored = await get_at_most(self.mailbox, ref.key, ref.size)
        except ProtocolError as error:
            raise PayloadCorrupt(str(error)) from None
        return None if stored is None else memoryview(stored).cast("B")

    # Records, created once

    async def manifest(self) -> Manifest | None:
        """The run's manifest, None before it exists. ``ProtocolError`` when it is not one."""
        return await self._record(layout.MANIFEST, MANIFEST_LIMIT, Manifest.from_bytes)

    async def create_manifest(self, manifest: Manifest) -> Manifest:
        """Create the run; returns the manifest that counts, which may be another node's."""
        data = manifest.to_bytes()
        if len(data) > MANIFEST_LIMIT:
            raise ValueError(f"{len(manifest.schema)} parameters are more than a manifest can name")
        return await self._create(layout.MANIFEST, data, self.manifest) or manifest

    async def round(self, number: int) -> RoundRecord | None:
        """The record of a round, None before it is committed.

        ``ProtocolError`` naming the key when what is there is not the record of this round.
        """
        return await self._record(layout.round_key(number), ROUND_LIMIT, _round_record)

    async def rounds_from(self, number: int) -> list[int]:
        """The rounds, this one and later, under whose keys there is anything, in order."""
        after = layout.round_key(number - 1) if number else ""
        keys = await self.mailbox.list(layout.ROUNDS, after=after)
        found = (layout.parse_round_key(key) for key in keys)
        return sorted(one for one in found if one is not None)

    async def _record[R](self, key: str, limit: int, decode: Callable[[Buffer], R]) -> R | None:
        data = await get_at_most(self.mailbox, key, limit)
        try:
            return None if data is None else decode(data)
        except ProtocolError as error:
            raise ProtocolError(f"{key} cannot be read: {error}. {REPAIR}") from None

    async def commit(self, record: RoundRecord) -> RoundRecord:
        """Create the round's record; returns the one that counts.

        When a record is there already and names the same payloads, it is this node's own earlier
        attempt, whose answer was lost, or holds the same bytes: either way this commit landed.
        """
        key, data = layout.round_key(record.round), record.to_bytes()
        return await self._create(key, data, lambda: self.round(record.round)) or record

    async def _create[R](
        self, key: str, data: bytes, read: Callable[[], Awaitable[R | None]]
    ) -> R | None:
        """Create an object; what ``read`` finds when it is there already, else None."""
        for _ in range(CREATIONS):
            if await self.mailbox.put_if_absent(key, data):
                return None
            if (found := await read()) is not None:
                return found
        raise ProtocolError(f"{key} can neither be created nor read")

    async def snapshot(self, number: int, learner: str) -> bytes | None:
        """The raw snapshot record of a learner; decoded by whoever judges it.

        No bytes for one that is larger than any can be: that is no record either.
        """
        return await self._small(layout.snapshot_key(number, learner))

    async def _small(self, key: str) -> bytes | None:
        try:
            data = await get_at_most(self.mailbox, key, SMALL_LIMIT)
        except ProtocolError:
            return b""
        return None if data is None else bytes(data)

    async def put_snapshot(self, record: SnapshotRecord) -> bool:
        """Announce a snapshot whose payload is stored; False when one is there already."""
        key = layout.snapshot_key(record.round, record.learner)
        return await self.mailbox.put_if_absent(key, record.to_bytes())

    async def snapshots(self) -> list[tuple[int, str]]:
        """Round and learner of every snapshot record: of the open rounds, and late ones."""
        keys = await self.mailbox.list(layout.SNAPSHOTS)
        parsed = (layout.parse_snapshot_key(key) for key in keys)
        return [found for found in parsed if found is not None]

    async def claim(self, number: int | None, attempt: int, learner: str) -> bool:
        """Create the claim (of the manifest for ``number=None``); whether it is this learner's.

        One that was there and names this learner is its own: an attempt whose answer was lost, or
        made before a restart.
        """
        key = layout.claim_key(number, attempt)
        if await self.mailbox.put_if_absent(key, Claim(learner).to_bytes()):
            return True
        data = await self._small(key)
        return data is not None and _learner_of(data) == learner

    async def last_claim(self, number: int | None) -> tuple[int, str | None] | None:
        """Number and learner of the newest claim, None without one. Claims count from 1.

        The learner is None when the claim's body names none: such a claimant cannot be live.
        """
        newest: tuple[int, str | None] | None = None
        attempt = 1
        while True:
            data = await self._small(layout.claim_key(number, attempt))
            if data is None:
                return newest
            newest = (attempt, _learner_of(data))
            attempt += 1

    # Removal

    async def keys(self, prefix: str) -> Sequence[str]:
        """All keys under ``prefix``."""
        return await self.mailbox.list(prefix)

    async def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are no error."""
        found = tuple(keys)
        if found:
            await self.mailbox.delete(found)


def _round_record(data: Buffer) -> RoundRecord:
    return _shared_record(data) if isinstance(data, bytes) else RoundRecord.from_bytes(data)


@lru_cache(maxsize=8)
def _shared_record(data: bytes) -> RoundRecord:
    """Nodes of one process read the same records, which may list a thousand participants."""
    return RoundRecord.from_bytes(data)


def _learner_of(claim: Buffer) -> str | None:
    try:
        return Claim.from_bytes(claim).learner
    except ProtocolError:
        return None


def _check(stored: memoryview, ref: Ref) -> None:
    """Check stored bytes against their ref."""
    if stored.nbytes != ref.size:
        raise PayloadCorrupt(f"{ref.key}: {stored.nbytes} bytes, its record says {ref.size}")
    if sha256_hex(stored) != ref.sha256:
        raise PayloadCorrupt(f"{ref.key}: the bytes do not hash to the sha256 of its record")


def _open(
    stored: memoryview, ref: Ref, payload_layout: PayloadLayout, take: Callable[[int], memoryview]
) -> Payload:
    """Check stored bytes against their ref, decompress, check the tensors."""
    _check(stored, ref)
    try:
        compressed = ref.key.endswith(layout.ZSTD_EXT)
        buffer = compression.decompress(payload_layout, stored, take) if compressed else stored
        return Payload(ref, buffer, payload_layout.check(buffer))
    except PayloadCorrupt as error:
        raise PayloadCorrupt(f"{ref.key}: {error}") from None
