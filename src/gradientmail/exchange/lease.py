"""Leases: how a learner shows that it lives.

A learner creates a new beat now and then and deletes its older ones.

Two processes with one learner id: the newer one wins, so that a restart is never blocked. A beat's
body carries a token drawn at random by the process, and the tokens that this process knows to be
older: of whoever held the lease when it began, and of those whom that one knew. Who finds its own
token among them, or another's beat in place of its own last one, has been replaced.

The numbers alone would not tell. A process that leaves takes its beats along, the next one begins
at 1, and one that slept since before both holds, or writes, a higher number. That one has lost its
last beat, and ends. The other meanwhile goes past whoever does not know it: a newer one would.

The beats of those who were killed stay behind, and every restart without an id of its own has a
new one. A closer sweeps them when it has seen no change for ``kept_seconds``. Whoever sleeps so
long and wakes goes on: its next beat brings its lease back. But were the beats of an id gone
without a trace, its last beat would be missing as if a newer process had deleted it. So a sweep
first writes how far the swept beats went, and a lease begins beyond that.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from gradientmail.errors import ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.lease_book import KEPT_SECONDS
from gradientmail.exchange.records import SMALL_LIMIT, Beat
from gradientmail.mailbox.base import Mailbox, get_at_most

LAST_BEAT = layout.MAX_ROUND // 2
"""No lease gets so far by itself; beats beyond it would leave none for the next process."""

LAST_FIRST = LAST_BEAT - 10**8
"""No lease begins beyond it: each has a hundred million beats to go."""

LAST_SWEPT = LAST_BEAT // 2
"""Sweeping garbage beyond it is not noted, so that beats are left for those who begin after it."""

MOST_OLDER = 64
"""Older processes that a beat names; of more, the oldest are left out."""

LONGEST_TOKEN = 64
"""Characters of a token that a beat names: all of them fit into one, however escaped."""

MOST_LOOKS = 8
"""How often who begins looks again where beats go while it reads them: as in a lagging listing."""


class Lease:
    """This process's lease. Used on the loop's thread."""

    def __init__(
        self,
        mailbox: Mailbox,
        learner: str,
        token: str,
        observe: Callable[[Sequence[str]], None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``token`` is what tells this process from an earlier or later one of the same id.

        ``observe`` is given the keys of all leases whenever a renewal has listed them. ``now``
        tells seconds on this process's own clock.
        """
        self._mailbox = mailbox
        self._learner = learner
        self._token = token
        self._observe = observe
        self._now = now
        self._turn = asyncio.Lock()
        self._older: tuple[str, ...] = ()
        self._shown = 0
        """The newest beat of when this process last looked who else is there."""
        self._looked_at, self._noted = now(), 0
        """When that was, and how far beats were swept by then."""
        self._released = self._replaced = False
        self.untidy: Exception | None = None
        """Why older beats could not be deleted the last time; it holds nobody up."""
        self.beat = 0

    async def acquire(self) -> None:
        """Write a beat newer than any of this learner's, and delete those.

        An older process with this id finds it when it renews. If that takes each number first, in
        step with this one's looks, this one goes further past it with every number that is lost.
        """
        taken = noted = lost = 0
        for look in itertools.count(1):
            keys = await self._mailbox.list(layout.beats_prefix(self._learner))
            numbers = sorted(number for number in self._own(keys) if number <= LAST_BEAT)
            found, gone = await self._beats([n for n in numbers if n != self.beat][-MOST_OLDER:])
            if gone and look < MOST_LOOKS:
                continue  # renewed meanwhile: the next beat counts
            if self.beat and (max(numbers, default=0) <= self.beat or self._is_known_to(found)):
                self._has_looked(noted)
                await self._remove(number for number in numbers if number < self.beat)
                return
            # The first time, or one woke up that had gone further, between the listing and the put.
            self._learn_of(found.values())
            # After the own beats: a sweep writes this first, and then deletes.
            noted = await _swept_so_far(self._mailbox)
            first = max([*numbers, taken, noted]) + 1 + lost
            if first > LAST_FIRST and look < MOST_LOOKS:
                await self._remove(numbers)  # nobody came there by renewing
            elif await self._put(first):
                self.beat = first
            else:
                lost += 1
                taken = first  # whatever the next listing shows

    async def renew(self) -> bool:
        """Write the next beat and delete the older ones; False when another process has the id."""
        async with self._turn:
            number = self.beat + 1
            while number and not (self._released or self._replaced):
                number = await self._renew(number)
            return not self._replaced

    async def _renew(self, number: int) -> int:
        """Write this beat; which one to write now, 0 for none.

        Another one where the number was taken, or lies below a process that is not newer.
        """
        written = await self._put(number)
        if written:
            self.beat = number
        # The listing comes after the put: of two that write at once, one sees the other.
        # Everybody's leases are listed, which costs the same and serves the watch.
        keys = await self._mailbox.list(layout.LEASES)
        if self._observe is not None:
            self._observe(keys)
        numbers = sorted(n for n in self._own(keys) if n != number or not written)
        # Where nothing can be deleted there are ever more, which nobody could read in time.
        # The own previous one is asked for by its key: a listing may lack what is there.
        read = {*numbers[-MOST_OLDER:], *([self._shown] if self._shown else [])}
        # The own one last: whoever deleted it by then has named this process in what was read.
        found, gone = await self._beats(sorted(read, key=lambda n: (n == self._shown, n)))
        others = {n: beat for n, beat in found.items() if beat.token != self._token}
        own = found.keys() - others.keys()
        lost = None if self._shown in own else self._shown
        noted = max(_noted(keys), default=0)
        if self._is_replaced(others, lost, noted):
            self._replaced = True
            await self._remove([*own, *([number] if written else [])])
            return 0  # the newer one goes past what stays
        furthest = max(found, default=0)
        if furthest > self.beat or not written:
            self._learn_of(beat for n, beat in others.items() if n > self.beat)
            return max(furthest, number) + 1
        self._has_looked(noted)
        await self._remove(n for n in {*numbers, *found} if n < number and n not in gone)
        return 0

    def _is_replaced(self, others: Mapping[int, Beat], lost: int | None, noted: int) -> bool:
        """Whether one of ``others`` is a newer process.

        ``lost`` is the last beat that this one wrote, if it is gone; ``noted``, how far was swept.
        """
        if self._is_known_to(others):
            return True
        unknown = {n: beat for n, beat in others.items() if beat.token not in self._older}
        if any(beat.after is None and number > self.beat for number, beat in unknown.items()):
            return True
        # Who lost its last beat in a sweep is older than who begins after that, beyond that beat;
        # who lost it to no sweep, than whoever is there.
        if lost is None or not unknown:
            return False
        return max(unknown) > lost or not self._may_be_swept(lost, noted)

    def _may_be_swept(self, lost: int, noted: int) -> bool:
        """Whether it may have been a sweep that deleted the last beat: after an hour of silence.

        Every sweep raises the note, and to no less than what it deletes.
        """
        silent = self._now() - self._looked_at
        return silent > KEPT_SECONDS / 2 and noted >= lost and noted > self._noted

    def _has_looked(self, noted: int) -> None:
        self._shown, self._looked_at, self._noted = self.beat, self._now(), noted

    def _is_known_to(self, beats: Mapping[int, Beat]) -> bool:
        """Whether one of these was written by a process that knows this one to be older."""
        return any(self._token in (beat.after or ()) for beat in beats.values())

    def is_among(self, keys: Container[str]) -> bool:
        """Whether this process's newest beat is one of ``keys``."""
        return layout.beat_key(self._learner, self.beat) in keys

    async def release(self) -> None:
        """Delete this process's beats; those of a newer process with the same id stay.

        Let a renewal that is under way end first: a beat that lands after the listing would stay.
        """
        async with self._turn:
            self._released = True
            numbers = self._own(await self._mailbox.list(layout.beats_prefix(self._learner)))
            found, _ = await self._beats(sorted(numbers)[-MOST_OLDER:])
            await self._remove(n for n, beat in found.items() if self._goes_along(n, beat))
            if self.untidy is not None:
                raise self.untidy

    def _goes_along(self, number: int, beat: Beat) -> bool:
        """Whether this beat is this process's, or one that it deletes when it leaves."""
        if beat.token == self._token:
            return True
        is_older = beat.token in self._older or beat.after is None
        return is_older and number < self.beat and not self._replaced

    def _own(self, keys: Iterable[str]) -> list[int]:
        """The numbers of this learner's beats among ``keys``."""
        own = layout.beats_prefix(self._learner)
        return [n for _, n in layout.beats_among(key for key in keys if key.startswith(own))]

    def _learn_of(self, beats: Iterable[Beat]) -> None:
        """Who wrote these is older from now on, and whom they knew to be so."""
        tokens = [t for beat in beats for t in (beat.token, *(beat.after or ())) if t]
        known = dict.fromkeys([*tokens, *self._older])
        own, longest = self._token, LONGEST_TOKEN
        named = (t for t in known if t != own and len(t) <= longest)
        self._older = tuple(itertools.islice(named, MOST_OLDER))

    async def _put(self, number: int) -> bool:
        """Create a beat; True when the one there is this process's, by an answer lost before.

        What is there and is no beat at all says nothing of another process, and makes room.
        """
        key = layout.beat_key(self._learner, number)
        data = Beat(self._token, self._older).to_bytes()
        if await self._mailbox.put_if_absent(key, data):
            return True
        try:
            found = await self._read(number)
        except ProtocolError:
            await self._remove((number,))
            return await self._mailbox.put_if_absent(key, data)
        return found is not None and found.token == self._token

    async def _beats(self, numbers: Iterable[int]) -> tuple[dict[int, Beat], set[int]]:
        """What these are, and which are gone; what no process can have written is deleted."""
        found: dict[int, Beat] = {}
        gone, junk = set[int](), list[int]()
        for number in numbers:
            try:
                beat = await self._read(number)
            except ProtocolError:
                junk.append(number)
                continue
            if beat is None:
                gone.add(number)
            else:
                found[number] = beat
        await self._remove(junk)
        return found, gone

    async def _read(self, number: int) -> Beat | None:
        key = layout.beat_key(self._learner, number)
        if number > LAST_BEAT:
            raise ProtocolError(f"{key} lies beyond every beat")
        data = await get_at_most(self._mailbox, key, SMALL_LIMIT)
        return None if data is None else Beat.from_bytes(data)

    async def _remove(self, numbers: Iterable[int]) -> None:
        keys = [layout.beat_key(self._learner, number) for number in numbers]
        self.untidy = None
        try:
            if keys:
                await self._mailbox.delete(keys)
        except Exception as error:
            self.untidy = error


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
    numbers = [number for _, number in layout.beats_among(beats) if number <= LAST_SWEPT]
    noted = _noted(await mailbox.list(layout.SWEPT))
    # One further at least: who sleeps meanwhile can tell that there was a sweep.
    furthest = min(max([*numbers, *(number + 1 for number in noted)], default=0), LAST_SWEPT)
    if furthest not in noted:
        await mailbox.put_if_absent(layout.swept_key(furthest), b"{}")
    older = [layout.swept_key(number) for number in noted if number < furthest]
    # Beats last: those that are left after a kill bring the next sweep, which finds the notes, too.
    await mailbox.delete([*older, *beats])
