"""One call of a node goes wrong, or some of its work, and what somebody puts into the store."""

import asyncio
import hashlib
import json
import math
from array import array
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import override

from gradientmail.clock import Inline
from gradientmail.errors import MailboxUnavailable
from gradientmail.exchange import layout
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.exchange.records import Ref, SnapshotRecord
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.run import Run
from gradientmail.testing.plans import STRIKES, WORK_STRIKES, Strike


class StrikingMailbox(WrappedMailbox):
    """Counts a node's calls and lets some go wrong, each once.

    Asking again for an object is not counted: polls are all alike.
    """

    def __init__(
        self,
        inner: Mailbox,
        strikes: Iterable[Strike],
        *,
        crash: Callable[[], None],
        pause: Callable[[], None],
    ) -> None:
        """``crash`` and ``pause`` are called when the node is to end, or to stop for a while."""
        super().__init__(inner)
        self.count = 0
        self._strikes = {one.number: one.how for one in strikes if one.how in STRIKES}
        self._crash = crash
        self._pause = pause
        self._looked: set[str] = set()

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        again = call.operation == "get" and call.key in self._looked
        self._looked.add(call.key)
        self.count += not again
        how = None if again else self._strikes.pop(self.count, None)
        if how is None:
            return await act()
        what, _, when = how.partition(" ")
        result = await act() if when == "after" else None
        if what == "crash":
            self._crash()
            await asyncio.Event().wait()
        if what == "pause":
            self._pause()
            await asyncio.sleep(0)
            assert result is not None or call.operation != "list"
            return result  # type: ignore[return-value]
        raise MailboxUnavailable(f"struck: {call.operation} {call.key!r} {when} acting")


class StrikingWork(Inline):
    """Counts what a node gives to other threads and lets some go wrong, each once."""

    def __init__(self, strikes: Iterable[Strike]) -> None:
        """Those of work; calls of the store are another's."""
        self.count = 0
        self.counts = False
        """Whether it has begun: who cannot join for want of memory raises that."""
        self._strikes = {one.number: one.how for one in strikes if one.how in WORK_STRIKES}

    @override
    async def __call__[**P, T](
        self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self.count += self.counts
        how = self._strikes.pop(self.count, None) if self.counts else None
        if how != "work before":
            result = work(*args, **kwargs)
            if how is None:
                return result
        raise MemoryError(f"struck: {how}")


def vandalism(run: Run, number: int, random: Random) -> dict[str, bytes]:
    """Objects that every node must ignore or reject, in the rounds from ``number`` on."""
    found = {
        f"{prefix}{name}": b"\x00garbage"
        for prefix in ("rounds/", "snapshots/", "claims/", "leases/", "blobs/", "blobs/rounds/")
        for name in ("notes.txt", ".DS_Store", "UPPER/0000000001.json")
    }
    for ahead in range(2):
        for kind in random.sample(sorted(_SNAPSHOTS), 3):
            found |= _SNAPSHOTS[kind](run, number + ahead, f"vandal-{kind}")
    return found


def _payload(layout_: PayloadLayout, value: float) -> bytes:
    """A payload of one value; of another one, and NaN for NaN, in formats that are not all F32."""
    nbytes = layout_.nbytes - len(layout_.header)
    if any(slot.dtype != "F32" for slot in layout_.slots.values()):
        return layout_.header + (b"\xff" if math.isnan(value) else b"\x3c") * nbytes
    return layout_.header + array("f", [value] * (nbytes // 4)).tobytes()


def _snapshot(
    run: Run, number: int, learner: str, value: float = 0.5, /, **changes: object
) -> tuple[SnapshotRecord, bytes]:
    fragment = run.fragments[run.schedule.fragment(number)]
    data = _payload(fragment.delta, value)
    sha256 = hashlib.sha256(data).hexdigest()
    key = layout.snapshot_blob_key(number, learner, sha256, layout.RAW_EXT)
    fields: dict[str, object] = {
        "learner": learner,
        "round": number,
        "local_step": 3,
        "steps": 3,
        "tokens": 24,
        "base_version": run.schedule.version(number) - 1,
        "rounds_seen": number - 1,
        "step_seconds": 1.0,
        "schema_digest": run.digest,
        "final": False,
        "payload": Ref(key, sha256, len(data)),
    }
    return SnapshotRecord(**(fields | changes)), data  # type: ignore[arg-type]


def _changed(**changes: object) -> Callable[[Run, int, str], dict[str, bytes]]:
    def build(run: Run, number: int, learner: str) -> dict[str, bytes]:
        record, data = _snapshot(run, number, learner, **changes)
        return {record.payload.key: data, record.key: record.to_bytes()}

    return build


def _old_base(run: Run, number: int, learner: str) -> dict[str, bytes]:
    version = run.schedule.version(number) - 1
    return _changed(base_version=version - 1 if version else 1)(run, number, learner)


def _without_payload(run: Run, number: int, learner: str) -> dict[str, bytes]:
    record, _ = _snapshot(run, number, learner)
    return {record.key: record.to_bytes()}


def _with_other_bytes(run: Run, number: int, learner: str) -> dict[str, bytes]:
    record, data = _snapshot(run, number, learner)
    changed = data[:-4] + array("f", [1.0]).tobytes()
    return {record.payload.key: changed, record.key: record.to_bytes()}


def _not_finite(run: Run, number: int, learner: str) -> dict[str, bytes]:
    record, data = _snapshot(run, number, learner, math.nan)
    return {record.payload.key: data, record.key: record.to_bytes()}


def _deep(run: Run, number: int, learner: str) -> dict[str, bytes]:
    del run
    return {layout.snapshot_key(number, learner): b"[" * 10_000}


def _of_another(run: Run, number: int, learner: str) -> dict[str, bytes]:
    record, data = _snapshot(run, number, f"{learner}-2")
    body = json.dumps(json.loads(record.to_bytes()) | {"learner": f"{learner}-2"}).encode()
    return {record.payload.key: data, layout.snapshot_key(number, learner): body}


_SNAPSHOTS: dict[str, Callable[[Run, int, str], dict[str, bytes]]] = {
    "base": _old_base,
    "steps": _changed(steps=0),
    "tokens": _changed(tokens=0),
    "schema": _changed(schema_digest="0" * 64),
    "missing": _without_payload,
    "bytes": _with_other_bytes,
    "nan": _not_finite,
    "deep": _deep,
    "other": _of_another,
}
