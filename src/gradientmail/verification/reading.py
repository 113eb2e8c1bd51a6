"""A mailbox as a verification reads it: its keys by kind, and its records."""

import asyncio
from collections.abc import Awaitable, Buffer, Callable, Iterable, Mapping, Sequence
from itertools import batched

from gradientmail.clock import inline
from gradientmail.errors import ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.records import RoundRecord, SnapshotRecord, expect_key
from gradientmail.mailbox.base import Mailbox
from gradientmail.verification.report import Violation

AT_ONCE = 16
"""Objects asked for at a time."""
NOT_OURS = (layout.UNITS, layout.BARRIERS)
"""Prefixes of the patterns, in which a verification sees nothing wrong."""


class FrozenMailbox:
    """A mailbox over a mapping of objects by key, which it only reads."""

    def __init__(self, objects: Mapping[str, Buffer]) -> None:
        """``objects`` is not copied."""
        self._objects = objects

    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        """Refused."""
        del data
        raise TypeError(f"a frozen mailbox takes no objects, {key!r} neither")

    async def get(self, key: str, /) -> Buffer | None:
        """The object."""
        return self._objects.get(key)

    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        """The keys below ``prefix`` and beyond ``after``."""
        return sorted(key for key in self._objects if key.startswith(prefix) and key > after)

    async def delete(self, keys: Iterable[str], /) -> None:
        """Refused."""
        raise TypeError(f"a frozen mailbox deletes nothing, {list(keys)!r} neither")


def memory(nbytes: int) -> memoryview:
    """A buffer that nobody gave back before."""
    return memoryview(bytearray(nbytes))


def reading_exchange(mailbox: Mailbox) -> Exchange:
    """An exchange that reads ``mailbox``, with the work done in place."""
    return Exchange(mailbox, offload=inline, take=memory)


async def each[K, V](
    wanted: Iterable[K], read: Callable[[K], Awaitable[V]], *, at_once: int = AT_ONCE
) -> list[V]:
    """``read`` of every one, a few at a time, in order; the first error is raised."""
    found: list[V] = []
    for some in batched(wanted, at_once):
        for result in await asyncio.gather(*map(read, some), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            found.append(result)
    return found


def is_known(key: str) -> bool:
    """Whether a node of this protocol could have written ``key``."""
    return (
        key == layout.MANIFEST
        or key.startswith(NOT_OURS)
        or layout.parse_round_key(key) is not None
        or layout.parse_snapshot_key(key) is not None
        or layout.parse_claim_key(key) is not None
        or layout.parse_beat_key(key) is not None
        or layout.parse_swept_key(key) is not None
        or layout.parse_blob_key(key) is not None
    )


async def read_records(
    exchange: Exchange,
    numbers: Sequence[int],
    look: Callable[[int, RoundRecord], Iterable[Violation]],
    keep: Callable[[int], bool],
) -> tuple[dict[int, RoundRecord], list[Violation]]:
    """The round records to ``keep``, by number, and what is wrong with any of them.

    A run has many: each is let go of once ``look`` has seen it.
    """
    violations: list[Violation] = []
    listed = set(numbers)
    read_last = -1

    async def read(number: int) -> RoundRecord | None:
        key = layout.round_key(number)
        try:
            record = await exchange.round(number)
            return None if record is None else expect_key(record, key)
        except ProtocolError as error:
            violations.append(Violation("records", key, str(error)))
            return None

    records: dict[int, RoundRecord] = {}
    gaps = 0
    for some in batched(numbers, AT_ONCE):
        for number, record in zip(some, await each(some, read), strict=True):
            if record is None:
                continue
            between = range(read_last + 1, min(number, read_last + 21))
            missing = [gap for gap in between if gap not in listed]
            violations += (_gap(gap, number) for gap in missing[: max(20 - gaps, 0)])
            gaps += len(missing)
            read_last = number
            violations += look(number, record)
            if keep(number):
                records[number] = record
    return records, violations


def _gap(missing: int, later: int) -> Violation:
    return Violation(
        "records", layout.round_key(missing), f"missing, though round {later} is there"
    )


async def last_readable(exchange: Exchange, numbers: Sequence[int]) -> int:
    """The last of ``numbers``, which are sorted, that is the record of its round; −1 without."""
    for number in reversed(numbers):
        try:
            record = await exchange.round(number)
            if record is not None and record.round == number:
                return number
        except ProtocolError:
            continue  # told when all are read
    return -1


async def read_snapshot(exchange: Exchange, number: int, learner: str) -> SnapshotRecord | None:
    """A snapshot record; None when there is none that a closer would take."""
    raw = await exchange.snapshot(number, learner)
    if raw is None:
        return None
    try:
        record = SnapshotRecord.from_bytes(raw)
        return expect_key(record, layout.snapshot_key(number, learner))
    except ProtocolError:
        return None
