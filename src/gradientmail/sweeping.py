"""Removing what no node needs any more, so that a run's store does not grow but for its records.

After the commit of round r: snapshots, their payloads and claims of rounds up to r, and the
payloads of rounds up to r − 2P. Manifest, initial payloads and round records stay for good.

Usually everything is deleted by keys that the closer knows, which costs no listing. What it cannot
know of (a late snapshot, a crash between commit and sweep, a lost race's payloads) is found by the
thorough sweep, which lists three prefixes: by a closer that is new in the role, after snapshots
that came late, and once in 4·P rounds.
"""

from collections.abc import Iterable

from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.records import RoundRecord

RACERS = 4
"""Claims on one round that are deleted unseen."""


def round_payload_keys(record: RoundRecord) -> list[str]:
    """The keys of a commit's payloads."""
    return [ref.key for ref in record.payloads]


def known_keys(
    number: int,
    *,
    claims: int,
    snapshots: Iterable[str],
    payloads: Iterable[str],
    expired: RoundRecord | None,
) -> list[str]:
    """What the closer of a round knows can go: its inputs, and the payloads ``expired`` names.

    ``snapshots`` are the learners whose records are there, ``payloads`` the keys of their deltas.
    """
    keys = [layout.snapshot_key(number, learner) for learner in snapshots]
    keys += payloads
    # One claim more than is known, and the round before again: losers of a race come late.
    keys += [layout.claim_key(number, attempt) for attempt in range(1, claims + 2)]
    if number > 0:
        keys += [layout.claim_key(number - 1, attempt) for attempt in range(1, RACERS + 1)]
    if expired is not None:
        keys += round_payload_keys(expired)
    return keys


def stale(key: str, number: int, fragments: int) -> bool:
    """Whether ``key`` is no longer needed once round ``number`` is committed."""
    snapshot = layout.parse_snapshot_key(key)
    if snapshot is not None:
        return snapshot[0] <= number
    claim = layout.parse_claim_key(key)
    if claim is not None:
        return claim[0] is not None and claim[0] <= number
    blob = layout.parse_blob_key(key)
    if blob is None or blob.kind == "init":
        return False
    return blob.index <= (number if blob.kind == "snapshot" else number - 2 * fragments)


async def sweep_thoroughly(exchange: Exchange, number: int, fragments: int) -> None:
    """List and delete everything that the commit of round ``number`` made unnecessary."""
    for prefix in (layout.SNAPSHOTS, layout.BLOBS, layout.CLAIMS):
        keys = await exchange.keys(prefix)
        await exchange.delete(key for key in keys if stale(key, number, fragments))
