"""How a node finds the run in a mailbox, or creates it, and gets its newest parameters.

One node creates a run: the holder of the newest creation claim uploads the initial parameters and
then the manifest, which is created once and decides. The others wait for it; when the creator's
uploads stand still, a waiter takes the next claim and creates the run itself.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial

from gradientmail.backend.base import Backend
from gradientmail.clock import Clock
from gradientmail.errors import PayloadCorrupt, ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import REPAIR, Exchange
from gradientmail.exchange.records import Manifest, Ref
from gradientmail.exchange.sealing import Payload, Sealing
from gradientmail.handoff import Version
from gradientmail.progress import BEYOND, Progress
from gradientmail.run import Fragment, Run, check_schema, payload_arrays, read_run
from gradientmail.schema import Schema

STALLED_POLLS = 30
SLOWEST_UPLOAD = 2**20
"""Bytes a second that a creator is trusted to upload at least."""


_PUT_BACK = (
    "Put it back from a copy of the mailbox, or begin a new run in another place, with the "
    "parameters of a node that still trains (docs/damaged-mailbox.md)"
)


async def find_run(
    exchange: Exchange, clock: Clock, *, learner: str, poll_interval: float, largest: int
) -> Manifest | None:
    """The run's manifest, or None when this node now holds the claim to create it.

    ``largest`` is the largest fragment's size in bytes, which bounds how long a creator's uploads
    may stand still. Raises ``ProtocolError`` for a run that has lost its manifest: another one
    would change the options under its nodes.
    """
    patience = max(STALLED_POLLS * poll_interval, largest / SLOWEST_UPLOAD)
    uploads, moved = -1, clock.now()
    while True:
        manifest = await _find_manifest(exchange)
        if manifest is not None:
            return manifest
        count = sum(map(_is_init, await exchange.keys(layout.BLOBS_INIT)))
        if count != uploads:
            uploads, moved = count, clock.now()
        last = await exchange.last_claim(None)
        if last is not None and last[1] == learner:
            return None
        stalled = clock.now() - moved > patience
        if last is None or stalled:
            if await exchange.claim(None, 1 if last is None else last[0] + 1, learner):
                return None
            moved = clock.now()
        await clock.sleep(poll_interval)


async def _find_manifest(exchange: Exchange) -> Manifest | None:
    """The manifest, None where no run is; ``ProtocolError`` for a run that has lost it."""
    manifest = await exchange.manifest()
    if manifest is None and await _has_rounds(exchange):
        manifest = await exchange.manifest()  # created meanwhile, else it is gone
        if manifest is None:
            raise ProtocolError(f"{layout.MANIFEST} is gone, and rounds are there. {_PUT_BACK}")
    return manifest


async def _has_rounds(exchange: Exchange) -> bool:
    """Whether rounds were committed. What lies under a later round's key may be no record."""
    found = await exchange.rounds_from(0)
    if 0 in found:
        return True
    for number in found[-BEYOND:]:
        with contextlib.suppress(ProtocolError):
            if await exchange.round(number) is not None:
                return True
    return False


def _is_init(key: str) -> bool:
    """Whether a creator may have uploaded this; what else comes and goes there is not progress."""
    blob = layout.parse_blob_key(key)
    return blob is not None and blob.kind == "init"


async def create_run(
    exchange: Exchange,
    *,
    manifest: Callable[[tuple[Ref, ...]], Manifest],
    fragments: Sequence[Fragment],
    buffers: Sequence[memoryview],
) -> tuple[Manifest, list[Payload]]:
    """Upload the initial parameters, one fragment after the other, then the manifest.

    Returns the manifest that counts and the payloads uploaded. What lies beside those that it
    names is deleted: of creators that died, or this node's own if another one was first.
    """
    payloads: list[Payload] = []
    for fragment, buffer in zip(fragments, buffers, strict=True):
        key_of = partial(layout.init_blob_key, fragment.index)
        sealed = await exchange.seal(Sealing(buffer, fragment.theta), key_of)
        payloads.append(await exchange.store(sealed))
    counts = await exchange.create_manifest(manifest(tuple(payload.ref for payload in payloads)))
    used = {ref.key for ref in counts.init}
    there = filter(_is_init, await exchange.keys(layout.BLOBS_INIT))
    await exchange.delete(key for key in there if key not in used)
    return counts, payloads


async def newest_versions(
    run: Run, exchange: Exchange, progress: Progress, backend: Backend
) -> list[Version]:
    """The newest committed version of every fragment, and ``progress`` at the newest record.

    A run may commit faster than this node can fetch, and sweep what it was about to. What it has
    got counts then, though a newer version exists: ``rounds_held`` tells how new they are together.
    Raises ``PayloadCorrupt`` naming the key.
    """
    versions: dict[int, Version] = {}
    limit = asyncio.Semaphore(4)

    async def fetch(fragment: Fragment) -> Version | None:
        async with limit:
            record = progress.newest(fragment.index)
            ref = run.manifest.init[fragment.index] if record is None else record.theta
            payload = await exchange.fetch(ref, fragment.theta)
            if payload is None:
                return None
            number = 0 if record is None else record.version
            return Version(number, payload, payload_arrays(backend, payload))

    await progress.find_end()
    while True:
        before = progress.next_round
        wanted = [one for one in run.fragments if one.index not in versions]
        found = await asyncio.gather(*map(fetch, wanted), return_exceptions=True)
        for fragment, result in zip(wanted, found, strict=True):
            if isinstance(result, PayloadCorrupt):
                raise PayloadCorrupt(f"{result}. {REPAIR}") from None
            if isinstance(result, BaseException):
                raise result
            if result is not None:
                versions[fragment.index] = result
        if len(versions) == len(run.fragments):
            return [versions[fragment.index] for fragment in run.fragments]
        # A payload that is gone was swept, because newer versions exist; unless none does.
        await progress.catch_up()
        if progress.next_round == before:
            missing = next(one.index for one in wanted if one.index not in versions)
            record = progress.newest(missing)
            ref = run.manifest.init[missing] if record is None else record.theta
            raise PayloadCorrupt(f"{ref.key} is missing from the mailbox. {REPAIR}")


def rounds_held(versions: Sequence[Version]) -> int:
    """The newest round of which these versions, one a fragment, hold all that came up to it."""
    return min(one.number * len(versions) + p for p, one in enumerate(versions)) - 1


async def read_newest(
    exchange: Exchange, schema: Schema, backend: Backend, averaged: frozenset[str] = frozenset()
) -> tuple[int, list[Version]] | None:
    """The newest committed round (−1 before the first) and versions, for a reader that joins not.

    None when there is no run. Raises ``SchemaMismatch`` and ``PayloadCorrupt``, and
    ``ProtocolError`` for a run that has lost its manifest.
    """
    manifest = await _find_manifest(exchange)
    if manifest is None:
        return None
    run = read_run(manifest)
    check_schema(run, schema, averaged)
    progress = Progress(exchange, len(run.fragments))
    versions = await newest_versions(run, exchange, progress, backend)
    return rounds_held(versions), versions
