"""What a store must do for a run to live in it, tried out on the store itself.

Everything is written below a folder of its own, ``doctor-{random}/``, which no node reads, and
removed again. Two instances of the store take turns, so that what one of them remembers does not
hide what the other would see.
"""

import asyncio
import hashlib
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradientmail.errors import MailboxRefused, MailboxUnavailable
from gradientmail.mailbox.base import Mailbox, flat

RACERS = 16
"""How many create one object at the same moment."""
RACES = 6
PAUSE_SECONDS = 0.5
"""Between two tries of a store that does not answer."""
AT_ONCE = 16
LAST_CALLS_SECONDS = 10.0
"""How long calls that are under way are waited for before what they wrote is removed."""

type State = Literal["ok", "warning", "fault", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    state: State
    detail: str
    advice: str = ""


class Fault(Exception):
    """The store does not do what it must; ``detail`` and ``advice`` for the user."""

    def __init__(self, detail: str, advice: str = "") -> None:
        """Say what was seen, and what to do."""
        super().__init__(detail)
        self.advice = advice


USE_ANOTHER = (
    "do not put a run here: use AWS S3, Cloudflare R2, MinIO or SeaweedFS in a current version, or "
    "a shared folder"
)


@dataclass(slots=True)
class Examination:
    """A store under examination: two instances of it, and what was written."""

    boxes: Sequence[Mailbox]
    folder: str = field(default_factory=lambda: f"doctor-{secrets.token_hex(6)}/")
    written: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    """What ``MailboxUnavailable`` said, once each time a call was repeated for it."""
    running: set[asyncio.Future[Any]] = field(default_factory=set)
    """Calls that the store has not answered, of checks that are over too."""

    async def put(self, name: str, data: bytes, *, box: int = 0) -> bool:
        """Create ``name`` in the folder."""
        key = self.folder + name
        known = key in self.written
        self.written.add(key)
        try:
            return await self.persist(lambda: self.boxes[box].put_if_absent(key, data))
        except MailboxRefused:
            if not known:  # and so there is nothing to remove
                self.written.discard(key)
            raise

    async def get(self, name: str, *, box: int = 1) -> bytes | None:
        """Its bytes."""
        found = await self.persist(lambda: self.boxes[box].get(self.folder + name))
        if found is None:
            return None
        with flat(found) as view:
            return bytes(view)

    async def delete(self, names: Iterable[str], *, box: int = 0) -> None:
        """Remove them."""
        keys = [self.folder + name for name in names]
        await self.persist(lambda: self.boxes[box].delete(keys))

    async def clean(self) -> list[str]:
        """Remove all that was written; the keys that are still there.

        What a check that was out of time had begun is waited for: it would land afterwards.
        """
        if self.running:
            await asyncio.wait(self.running, timeout=LAST_CALLS_SECONDS)
        box = self.boxes[0]
        await box.delete(sorted(self.written))
        left = list(await box.list(self.folder))
        if left:
            await box.delete(left)
            left = list(await box.list(self.folder))
        return left

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self.running.discard(call)
        if not call.cancelled():
            call.exception()  # known to whoever waited; if nobody did any more it matters no more

    async def persist[T](self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call until the store answers; whoever waits for it sets the limit."""
        while True:
            running = asyncio.ensure_future(call())
            self.running.add(running)
            running.add_done_callback(self._ended)
            try:
                return await asyncio.shield(running)
            except MailboxUnavailable as error:
                self.failures.append(str(error))
                await asyncio.sleep(PAUSE_SECONDS)

    async def list(self, prefix: str = "", *, after: str = "", box: int = 1) -> list[str]:
        """Names below ``prefix`` and beyond ``after``, all in the folder."""
        start = self.folder + after if after else ""
        keys = await self.persist(lambda: self.boxes[box].list(self.folder + prefix, after=start))
        return [key.removeprefix(self.folder) for key in keys]


# The checks, in their order. Each returns what it saw, or raises ``Fault``.


async def reachable(store: Examination) -> str:
    """The store answers."""
    if await store.get("nothing", box=0) is not None:
        raise Fault("an object with a name drawn at random is there already", USE_ANOTHER)
    return "it answers"


async def read_and_write(store: Examination) -> str:
    """These credentials may do all that a node does."""
    for data in (b"{}", b""):
        name = f"write-{len(data)}"
        if not await store.put(name, data):
            raise Fault(f"creating a new object of {len(data)} bytes was refused", USE_ANOTHER)
        found = await store.get(name)
        if found != data:
            raise Fault(f"an object of {len(data)} bytes came back as {_shown(found)}", USE_ANOTHER)
        await store.list("write-")
        await store.delete([name])
    return "put, get, list and delete are allowed"


async def create_once(store: Examination) -> str:
    """An object is created once: one after the other, and by many at the same moment."""
    await store.put("once", b"first")
    if await store.put("once", b"second", box=1) or await store.get("once") != b"first":
        raise Fault("an object that existed was written again", USE_ANOTHER)
    for race in range(RACES):
        name, before = f"race/{race}", len(store.failures)
        bodies = [b"%d by %d " % (race, racer) * 40 for racer in range(RACERS)]
        created = await asyncio.gather(
            *(store.put(name, body, box=racer % 2) for racer, body in enumerate(bodies))
        )
        winners = [racer for racer, mine in enumerate(created) if mine]
        found = await store.get(name)
        if len(winners) > 1:
            raise Fault(
                f"{len(winners)} of {RACERS} that created one object at the same moment were told "
                "that it is theirs",
                USE_ANOTHER,
            )
        if found not in bodies or (winners and bodies[winners[0]] != found):
            raise Fault("the object is not that of the one who created it", USE_ANOTHER)
        if not winners and len(store.failures) == before:
            raise Fault(f"none of {RACERS} who created an object was told that it is theirs")
    return f"{RACES} races of {RACERS}, one winner each"


async def read_after_write(store: Examination) -> str:
    """What was written is there for everyone, also for who has just found nothing."""
    for number in range(10):
        name, data = f"read/{number:03d}", secrets.token_bytes(100)
        if await store.get(name) is not None:
            raise Fault("an object is there that nobody wrote", USE_ANOTHER)
        await store.put(name, data)
        found = await store.get(name)
        if found != data:
            raise Fault(
                f"another reader got {_shown(found)} instead of the {len(data)} bytes just written",
                "nodes would wait for what is there. Turn off caches between the nodes and the "
                "store (a CDN, NFS attribute caches: mount with lookupcache=none), or use another",
            )
    return "seen at once by another reader"


async def list_after_write(store: Examination) -> str:
    """Listings show what was written and what was deleted, at once."""
    expected: list[str] = []
    for number in range(10):
        expected.append(f"list/{number:03d}")
        await store.put(expected[-1], b"x")
        _same(sorted(await store.list("list/")), expected, "after a write")
    while expected:
        await store.delete([expected.pop(len(expected) // 2)])
        _same(sorted(await store.list("list/")), expected, "after a deletion")
    return "listings follow writes and deletions at once"


async def ordered(store: Examination) -> str:
    """Listings are complete, in byte order, and begin after a key if asked to."""
    names = [f"order/{name}" for name in ("a/b", "a-b", "a.b", "a0", "B", "b/1", "b/10", "b/9")]
    for name in names:
        await store.put(name, b"x")
    expected = sorted(names)
    found = await store.list("order/")
    if sorted(found) == expected != found:
        raise Fault(
            f"a listing is not in byte order: {' '.join(found)}",
            "the mailbox must sort what its store lists (S3Mailbox does)",
        )
    _same(found, expected, "of several folders")
    for start in (*expected, "order/a", "order/b/2", "order/", "order/z"):
        found = await store.list("order/", after=start)
        if found != [name for name in expected if name > start]:
            raise Fault(
                f"a listing after {start!r} is {' '.join(found)}",
                "the mailbox must cut what its store lists by itself (S3Mailbox does)",
            )
    return "complete, in byte order, cut where asked"


def many_keys(count: int) -> Callable[[Examination], Awaitable[str]]:
    """A listing of more keys than a store gives at a time, and their deletion in one call."""

    async def check(store: Examination) -> str:
        names = [f"many/{number:05d}" for number in range(count)]
        turn = asyncio.Semaphore(AT_ONCE)

        async def put(name: str) -> None:
            async with turn:
                await store.put(name, b"")

        await asyncio.gather(*map(put, names))
        _same(await store.list("many/"), names, f"of {count} keys")
        _same(
            await store.list("many/", after=names[count // 2]), names[count // 2 + 1 :], "of half"
        )
        await store.delete([*names, "many/that was never there"])
        _same(await store.list("many/"), [], "after they were deleted")
        if await store.get(names[0]) is not None:
            raise Fault("a deleted object can still be read", USE_ANOTHER)
        return f"{count} keys listed and deleted"

    return check


def large_object(nbytes: int) -> Callable[[Examination], Awaitable[str]]:
    """A payload goes up and comes back as it was."""

    async def check(store: Examination) -> str:
        data = random.Random(nbytes).randbytes(nbytes)
        name = f"blobs/{hashlib.sha256(data).hexdigest()}.safetensors"
        clock = asyncio.get_running_loop().time
        began = clock()
        await store.put(name, data)
        written = clock()
        found = await store.persist(lambda: store.boxes[1].get(store.folder + name))
        read = clock()
        with memoryview(found if found is not None else b"") as view:
            if view != data:
                raise Fault(
                    f"a payload of {nbytes} bytes came back as {view.nbytes} bytes, not the same",
                    USE_ANOTHER,
                )
        await store.delete([name])
        up, down = (nbytes / 1e6 / max(span, 1e-9) for span in (written - began, read - written))
        return f"{nbytes / 2**20:g} MiB: {up:,.0f} MB/s up, {down:,.0f} MB/s down"

    return check


def _same(found: Sequence[str], expected: Sequence[str], when: str) -> None:
    """Raise ``Fault`` unless a listing is what it should be."""
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    if missing:
        raise Fault(
            f"a listing {when} lacks {len(missing)} of {len(expected)} keys, {min(missing)!r} for "
            "one",
            USE_ANOTHER,
        )
    if extra:
        raise Fault(f"a listing {when} has {min(extra)!r}, which is not there", USE_ANOTHER)
    if list(found) != list(expected):
        raise Fault(f"a listing {when} is out of order, or has keys twice", USE_ANOTHER)


def _shown(found: bytes | None) -> str:
    return "nothing" if found is None else f"{len(found)} bytes, not the same"
