"""How fast a store is, whether its clock agrees with this machine's, and how it lists by itself."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from gradientmail.commands.checks import Examination, Fault
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.filesystem import FilesystemMailbox
from gradientmail.mailbox.s3 import S3Mailbox

SKEW_SECONDS = 60.0
"""A clock that is further off is worth a warning."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one operation on small objects, in milliseconds."""

    operation: str
    median: float
    p95: float


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest of ``values`` that at least ``part`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


async def latencies(store: Examination, samples: int) -> tuple[Latency, ...]:
    """Each operation ``samples`` times, one after the other."""
    clock = asyncio.get_running_loop().time
    spans: dict[str, list[float]] = {name: [] for name in ("put", "get", "list", "delete")}
    for number in range(samples):
        name = f"latency/{number:04d}"
        for operation, call in (
            ("put", lambda name=name: store.put(name, b"{}" * 100)),
            ("get", lambda name=name: store.get(name)),
            ("list", lambda: store.list("latency/")),
            ("delete", lambda name=name: store.delete([name])),
        ):
            began = clock()
            await call()
            spans[operation].append((clock() - began) * 1e3)
    return tuple(
        Latency(operation, quantile(values, 0.5), quantile(values, 0.95))
        for operation, values in spans.items()
    )


async def clock_skew(store: Examination) -> float | None:
    """By how many seconds the store's clock is ahead of this one's; None where it has none.

    Of a folder, by the time of change of a new file, which a network mount takes from its server.
    """
    box = store.boxes[0]
    before = time.time()
    there = await _their_time(store, box)
    after = time.time()
    if there is None:
        return None
    if before - 1 <= there <= after:  # S3 tells whole seconds
        return 0.0
    return there - (before + after) / 2


async def _their_time(store: Examination, box: Mailbox) -> float | None:
    if isinstance(box, FilesystemMailbox):
        await store.put("clock", b"x")
        path = f"{box.path}/{store.folder}clock"
        return (await asyncio.to_thread(os.stat, path)).st_mtime
    if isinstance(box, S3Mailbox):
        answer = await box.ask_store(
            "asking for the time", "list_objects_v2", Prefix=_name(box, store), MaxKeys=1
        )
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return None if date is None else parsedate_to_datetime(date).timestamp()
    return None


async def own_listing(store: Examination) -> str | None:
    """How an S3 store lists by itself, where the client has to make it good; None for others."""
    box = store.boxes[0]
    if not isinstance(box, S3Mailbox):
        return None
    names = ["own/a-b", "own/a/b", "own/a0", "own/b"]
    for name in names:
        await store.put(name, b"x")
    whole = await _listed(box, store, "")
    if sorted(whole) != sorted(names):
        raise Fault(f"the store lists {' '.join(whole)} of {' '.join(names)}")
    habits = ["in byte order" if whole == sorted(names) else "not in byte order"]
    cut = await _listed(box, store, "own/a-b")
    if cut == [name for name in whole if name > "own/a-b"]:
        habits.append("StartAfter honoured")
    else:
        habits.append("StartAfter ignored" if cut == whole else "StartAfter cuts in folder order")
    return f"{', '.join(habits)}; the client sorts and cuts"


async def _listed(box: S3Mailbox, store: Examination, after: str) -> list[str]:
    start = _name(box, store)
    more = {"StartAfter": start + after} if after else {}
    answer = await box.ask_store("listing", "list_objects_v2", Prefix=start + "own/", **more)
    return [one["Key"].removeprefix(start) for one in answer.get("Contents", ())]


def _name(box: S3Mailbox, store: Examination) -> str:
    """The examination's folder, as the bucket has it."""
    return f"{box.prefix}/{store.folder}" if box.prefix else store.folder
