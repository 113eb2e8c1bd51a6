"""Leases: how a learner shows that it lives, and how an observer judges others.

A learner creates a new beat now and then and deletes its older ones. No wall clock is compared: an
observer notes on its own clock when it last saw a learner's newest beat change.

Two processes with one learner id: the newer one wins, so that a restart is never blocked. A beat's
body carries a token drawn at random by the process; a process that finds a beat of its learner that
is newer than its own, or its own next beat taken by another token, has been replaced.

The beats of those who were killed stay behind, and every restart without an id of its own has a
new one. A closer sweeps them when it has seen no change for ``kept_seconds``. Whoever sleeps so
long and wakes goes on: its next beat brings its lease back. But were the beats of an id gone
without a trace, its next process would begin at 1 again, and one that slept since before it would
pass for the newer one. So a sweep first writes how far the swept beats went, and a lease begins
beyond that.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from gradientmail.errors import ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.records import SMALL_LIMIT, Beat
from gradientmail.mailbox.base import Mailbox, get_at_most

LAST_BEAT = layout.MAX_ROUND // 2
"""No lease gets so far by itself; beats beyond it would leave none for the next process."""

LAST_SWEPT = LAST_BEAT // 2
"""Sweeping garbage beyond it is not noted, so that beats are left for those who begin after it."""

KEPT_TIMEOUTS = 20
KEPT_SECONDS = 3600.0


def kept_seconds(timeout: float) -> float:
    """How long a lease must have been seen not to change before it may be swept."""
    return max(KEPT_TIMEOUTS * timeout, KEPT_SECONDS)


class Lease:
    """This process's lease. Used on the loop's thread."""

    def __init__(
        self,
        mailbox: Mailbox,
        learner: str,
        token: str,
        observe: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """``token`` is what tells this process from an earlier or later one of the same id.

        ``observe`` is given the keys of all leases whenever a renewal has listed them.
        """
        self._mailbox = mailbox
        self._learner = learner
        self._token = token
        self._observe = observe
        self._turn = asyncio.Lock()
        self._released = False
        self.beat = 0

    async def acquire(self) -> None:
        """Write a beat newer than any of this learner's, and delete those.

        An older process with this id finds it when it renews.
        """
        while True:
            numbers = await self._numbers()
            if max(numbers, default=0) > LAST_BEAT:
                await self._remove(number for number in numbers if number > LAST_BEAT)
                continue
            # After the own beats: a sweep writes this first, and then deletes.
            self.beat = max([*numbers, await _swept_so_far(self._mailbox)]) + 1
            if await self._put(self.beat):
                await self._remove(number for number in numbers if number < self.beat)
                return

    async def renew(self) -> bool:
        """Write the next beat and delete the older ones; False when another process has the id."""
        async with self._turn:
            return self._released or await self._renew()

    async def _renew(self) -> bool:
        if not await self._put(self.beat + 1):
            return False
        # The listing comes after the put: a newer process that had already gone past this number
        # and deleted what lay below it is seen by the beat it holds now. Everybody's leases are
        # listed, which costs the same and serves the watch.
        self.beat += 1
        keys = await self._mailbox.list(layout.LEASES)
        if self._observe is not None:
            self._observe(keys)
        numbers = self._own(keys)
        for newer in [number for number in numbers if number > self.beat]:
            if not await self._is_garbage(newer):
                await self._remove((self.beat,))
                return False
            await self._remove((newer,))
        older = [number for number in numbers if number < self.beat]
        if self.beat - 1 not in older and max(_noted(keys), default=0) < self.beat - 1:
            # No sweep, after which who begins counts on, but a newer process deleted the last beat,
            # and after its end the next one has begun at 1.
            for number in older:
                if await self._is_anothers(number):
                    await self._remove((self.beat,))
                    return False
        await self._remove(older)
        return True

    async def release(self) -> None:
        """Delete this process's beats; those of a newer process with the same id stay.

        Let a renewal that is under way end first: a beat that lands after the listing would stay.
        """
        async with self._turn:
            self._released = True
            await self._remove(number for number in await self._numbers() if number <= self.beat)

    async def _numbers(self) -> list[int]:
        return self._own(await self._mailbox.list(layout.beats_prefix(self._learner)))

    def _own(self, keys: Iterable[str]) -> list[int]:
        """The numbers of this learner's beats among ``keys``."""
        own = layout.beats_prefix(self._learner)
        return [number for _, number in _beats([key for key in keys if key.startswith(own)])]

    async def _put(self, number: int) -> bool:
        """Create a beat; True when the one there is this process's, by an answer lost before.

        What is there and is no beat at all says nothing of another process, and makes room.
        """
        key = layout.beat_key(self._learner, number)
        while not await self._mailbox.put_if_absent(key, Beat(self._token).to_bytes()):
            try:
                found = await self._read(number)
            except ProtocolError:
                await self._remove((number,))
            else:
                return found is not None and found.token == self._token
        return True

    async def _is_garbage(self, number: int) -> bool:
        """Whether this beat is none that a process of this learner can have written."""
        try:
            await self._read(number)
        except ProtocolError:
            return True
        return number > LAST_BEAT

    async def _is_anothers(self, number: int) -> bool:
        try:
            found = await self._read(number)
        except ProtocolError:
            return False
        return found is not None and found.token != self._token

    async def _read(self, number: int) -> Beat | None:
        key = layout.beat_key(self._learner, number)
        data = await get_at_most(self._mailbox, key, SMALL_LIMIT)
        return None if data is None else Beat.from_bytes(data)

    async def _remove(self, numbers: Iterable[int]) -> None:
        keys = [layout.beat_key(self._learner, number) for number in numbers]
        if keys:
            await self._mailbox.delete(keys)


async def _swept_so_far(mailbox: Mailbox) -> int:
    return max(_noted(await mailbox.list(layout.SWEPT)), default=0)


def _noted(keys: Iterable[str]) -> list[int]:
    """How far beats were swept, as ``keys`` say; what no sweep can have written is left out."""
    parsed = (layout.parse_swept_key(key) for key in keys)
    return [number for number in parsed if number is not None and number <= LAST_SWEPT]


async def sweep_beats(mailbox: Mailbox, beats: Sequence[str]) -> None:
    """Delete these beats, all of learners that have long been silent, and note how far they went.

    Only what was seen is deleted, key by key: a beat that comes meanwhile has another number.
    """
    numbers = [number for _, number in _beats(beats) if number <= LAST_SWEPT]
    noted = _noted(await mailbox.list(layout.SWEPT))
    furthest = max(numbers + noted, default=0)
    if furthest not in noted:
        await mailbox.put_if_absent(layout.swept_key(furthest), b"{}")
    older = [layout.swept_key(number) for number in noted if number < furthest]
    # Beats last: those that are left after a kill bring the next sweep, which finds the notes, too.
    await mailbox.delete([*older, *beats])


class LeaseBook:
    """What one observer knows of all leases, on its own clock. Pure bookkeeping.

    Every node of a run keeps one, of all the others, and looks into it at every poll: what that
    costs grows with what has changed, not with how many there are.
    """

    def __init__(self, timeout: float) -> None:
        """``timeout`` seconds without a change make a lease stale."""
        self._timeout = timeout
        self._listed: tuple[str, ...] = ()
        self._keys: frozenset[str] = frozenset()
        """What was listed last time, in order and as a set."""
        self._newest: dict[str, tuple[int, float]] = {}
        """Each one's newest beat, and when that was seen first."""
        self._observed_at = -math.inf
        self._live: frozenset[str] = frozenset()
        """Who was live when this was last looked up, which was right until ``_first_end``."""
        self._first_end = math.inf
        """None of the leases in ``_live`` runs out before this. Renewals only make it later."""
        self._live_when_listed = self._live

    def observe(self, keys: Iterable[str], now: float) -> None:
        """Take in a listing of ``leases/``, made at ``now``."""
        self._forgive_blindness(now)
        listed = tuple(keys)
        if listed != self._listed:  # most listings say what the last one said
            self._take_in(listed, now)
        self._live_when_listed = self.live(now)

    def _take_in(self, listed: tuple[str, ...], now: float) -> None:
        before, keys = self._keys, frozenset(listed)
        self._listed, self._keys = listed, keys
        changed: set[str] = set()
        for learner, number in _beats(keys - before):
            newest = self._newest.get(learner)
            if newest is None or number > newest[0]:
                self._newest[learner] = (number, now)
                changed.add(learner)
        # Usually an older beat than the newest, which a renewal has deleted.
        fallen = {who for who, number in _beats(before - keys) if self._newest[who][0] == number}
        gone = self._fall_back(fallen, now) if fallen else fallen
        came = (changed | fallen) - gone - self._live
        if gone or came:
            self._live = (self._live - gone) | came
            self._first_end = min(self._first_end, now + self._timeout)

    def _fall_back(self, fallen: set[str], now: float) -> set[str]:
        """The newest beat of these was deleted: their newest now, and who of them has none."""
        left: dict[str, int] = {}
        for learner, number in _beats(self._keys):
            if learner in fallen:
                left[learner] = max(number, left.get(learner, number))
        for learner in fallen - left.keys():
            del self._newest[learner]
        self._newest |= {learner: (number, now) for learner, number in left.items()}
        return fallen - left.keys()

    def live(self, now: float) -> frozenset[str]:
        """The learners whose newest beat was listed last time and changed within the timeout.

        The same object as the last time when nothing has changed in between.
        """
        if self._first_end < now:
            ends = {who: changed + self._timeout for who, (_, changed) in self._newest.items()}
            live = frozenset(who for who, end in ends.items() if now <= end)
            if live != self._live:
                self._live = live
            self._first_end = min((ends[who] for who in live), default=math.inf)
        return self._live

    def has_lost(self, now: float) -> bool:
        """Whether by ``now`` a lease has run out of one who was live at the last listing."""
        return self.live(now) is not self._live_when_listed

    def listed(self) -> frozenset[str]:
        """All learners that have a beat, live or stale."""
        return frozenset(self._newest)

    def silent(self, seconds: float) -> list[str]:
        """The keys of all beats of the learners that were seen not to change for so long.

        Up to the last listing: what came after it is not known, and time without a listing is none
        that anybody was seen in.
        """
        now = self._observed_at
        silent = {who for who, (_, changed) in self._newest.items() if now - changed > seconds}
        beats = sorted(beat for beat in _beats(self._keys if silent else ()) if beat[0] in silent)
        return [layout.beat_key(who, number) for who, number in beats]

    def _forgive_blindness(self, now: float) -> None:
        """Time in which nothing could be observed makes nobody stale.

        After an outage of the store, or when this process was stopped, every beat looks old: the
        others could not renew either, or renewed unseen. Only half of the timeout counts.
        """
        blind = now - self._observed_at - self._timeout / 2
        if 0 < blind < math.inf:
            self._newest = {
                learner: (beat, changed + blind)
                for learner, (beat, changed) in self._newest.items()
            }
            self._first_end = -math.inf  # who was called lost meanwhile may not be
        self._observed_at = now


def _beats(keys: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Learner and number of every beat among ``keys``."""
    return (beat for key in keys if (beat := layout.parse_beat_key(key)) is not None)
