"""This node's one view of the mailbox: new records, snapshots of a round, leases.

One poller a process, read by the courier and the syncer. Requests are what a run costs, so it asks
by key where it can (a GET is a twelfth of a LIST): the next record, and the snapshots of learners
that are known to live, in rounds that somebody here wants. It looks seldom where no commit can be
there yet (``rhythm``). Leases are listed every other round, or as often as liveness needs.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from gradientmail.attendance import ALONE, Attendance
from gradientmail.clock import Clock, Signal, wait_or_sleep
from gradientmail.errors import ProtocolError
from gradientmail.events import (
    Event,
    LearnerAppeared,
    LearnerLeft,
    LearnerLost,
    RoundSeen,
    TrainsAlone,
)
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.lease_book import LeaseBook, kept_seconds
from gradientmail.exchange.records import Estimates, RoundRecord
from gradientmail.failures import Failures
from gradientmail.progress import Progress
from gradientmail.rhythm import LONGEST_PAUSE_SECONDS, Rhythm

UNKNOWN = Estimates(step=None, quorum=None, sync=None)

ASKED_BY_KEY = 12
"""Up to so many snapshots are asked for one by one at a time; where it were more, they are listed,
which costs as much as so many GETs."""

SHARE = 3
"""A poll of the closer asks for one in so many missing snapshots, in turn. When it finds one it
asks for all: they come together, and a round waits for the last."""


class Watch:
    """What this node knows of the run. Used on the loop's thread."""

    def __init__(
        self,
        exchange: Exchange,
        clock: Clock,
        *,
        learner: str,
        fragments: int,
        poll_interval: float,
        lease_every: float,
        lease_timeout: float,
        announce: Callable[[Event], None],
        listed: Callable[[Sequence[str]], None],
        where: str = "",
    ) -> None:
        """``fragments`` is the number that the run really has, ``where`` says what the mailbox is.

        ``listed`` is given the keys of all leases whenever this has listed them.
        """
        self._exchange = exchange
        self._clock = clock
        self._learner = learner
        self.poll_interval = poll_interval
        self._lease_every = lease_every
        self._lease_timeout = lease_timeout
        self._announce = announce
        self._listed = listed
        self._where = where
        self._book = LeaseBook(lease_timeout)
        self._leases_listed = self._snapshots_listed = -float("inf")
        self._hurry_until = -float("inf")
        self._hurried = -1
        self._record_asked = -float("inf")
        self._rhythm = Rhythm(poll_interval, clock.now())
        self._turn = 0
        self._poke = Signal()
        self.changed = Signal()
        self.progress = Progress(exchange, fragments, self._on_record)
        self.live = frozenset({learner})
        self.ordered: tuple[str, ...] = (learner,)
        """The same, in the order in which they are asked for."""
        self.snapshots: dict[int, dict[str, bytes]] = {}
        """Raw snapshot records found so far, by round and learner."""
        self.late_snapshots = False
        """Whether the last listing held snapshots of rounds that were committed without them."""
        self.undisputed: int | None = None
        """The round that this node closes and nobody else means to; set by its syncer."""
        self._sought: dict[str, int | None] = {}
        self._attendance = Attendance()
        self.explain: Callable[[], str] = lambda: "nothing of it was there when they closed"
        """Why this node itself is in none of the last rounds; the courier knows."""

    # What follows from what is known

    @property
    def next_round(self) -> int:
        """The first round that is not committed, as far as this node knows."""
        return self.progress.next_round

    @property
    def estimates(self) -> Estimates:
        """What the newest record says of the run's timing."""
        latest = self.progress.latest
        return latest.estimates if latest is not None else UNKNOWN

    @property
    def round_seconds(self) -> float:
        """From one record to the next, an average; a poll interval while that is not known."""
        return self._rhythm.round_seconds or self.poll_interval

    def takeover_seconds(self) -> float:
        """How long a follower waits for a record: 30 polls, or three times what a round takes."""
        known = (self.estimates.step, self.estimates.quorum, self.estimates.sync)
        return max(30 * self.poll_interval, 3 * sum(value or 0.0 for value in known))

    def others_in(self, number: int) -> int:
        """How many other learners' snapshots were found in the round."""
        return len(self.snapshots.get(number, {}).keys() - {self._learner})

    # What others tell it

    def seek(self, who: str, number: int | None) -> None:
        """Look for snapshots of this round from now on, for ``who``; None for no more."""
        if self._sought.get(who) != number:
            self._sought[who] = number
            self._snapshots_listed = self._clock.now()
            self._poke.set()

    def hurry(self, number: int, polls: float) -> None:
        """This round is about to be committed: poll four times as often for so many polls.

        Eight times while few snapshots are missing of those that this node closes it with.
        """
        if number >= self.next_round:
            self._hurried = number
            self._hurry_until = self._clock.now() + polls * self.poll_interval
            self._poke.set()

    def found_snapshot(self, number: int, learner: str, record: bytes) -> None:
        """Take in a snapshot record, this node's own included."""
        if number >= self.next_round and self.snapshots.get(number, {}).get(learner) != record:
            self.snapshots.setdefault(number, {})[learner] = record
            self.changed.set()

    def forget_others(self, number: int) -> None:
        """Ask again for the others' snapshots of this round: they may publish it again."""
        mine = self.snapshots.get(number, {}).get(self._learner)
        self.snapshots[number] = {} if mine is None else {self._learner: mine}

    # Reading the mailbox

    async def refresh_leases(self) -> None:
        """List the leases now and tell who came and went."""
        keys = await self._exchange.keys(layout.LEASES)
        self.observe_leases(keys)
        self._listed(keys)

    def observe_leases(self, keys: Iterable[str]) -> None:
        """Take in a listing of all leases, made just now."""
        now = self._clock.now()
        self._leases_listed = now
        self._book.observe(keys, now)
        live = self._book.live(now)
        if self._learner not in live:
            live |= {self._learner}
        if live is self.live or live == self.live:
            return
        listed = self._book.listed()
        for learner in sorted(live - self.live):
            self._announce(LearnerAppeared(learner=learner))
        for learner in sorted(self.live - live):
            silent = learner in listed
            self._announce((LearnerLost if silent else LearnerLeft)(learner=learner))
        self.live = live
        self.ordered = tuple(sorted(live))
        self.changed.set()

    def silent_beats(self) -> list[str]:
        """The keys of the others' beats that nobody has renewed for so long that they may go."""
        own = layout.beats_prefix(self._learner)
        silent = self._book.silent(kept_seconds(self._lease_timeout))
        return [key for key in silent if not key.startswith(own)]

    async def list_snapshots(self, number: int) -> None:
        """Find every snapshot that is in the round now, of unknown learners too."""
        self._snapshots_listed = self._clock.now()
        listed = await self._exchange.snapshots()
        self.late_snapshots = any(found < self.next_round for found, _ in listed)
        seen = self.snapshots.get(number, {})
        missing = [who for found, who in listed if found == number and who not in seen]
        await self._ask_all(number, missing)

    async def run(self) -> None:
        """Poll until cancelled. A poll that fails is reported and the next one follows."""
        self._attendance = Attendance()  # what came before this node does not tell of it
        failures = Failures(self._announce)
        while True:
            poke = self._poke.next
            try:
                await self._poll()
            except Exception as error:
                failures.failed("poll", error, self.next_round)
            else:
                failures.worked("poll")
            await wait_or_sleep(self._clock, self._pause(), poke)

    async def poll(self) -> None:
        """Look once at everything that may have changed."""
        try:
            await self.progress.read_next()
        except ProtocolError:
            await self._poll_others()  # a record that cannot be read makes nobody stale
            raise
        await self._poll_others()

    def _pause(self) -> float:
        now = self._clock.now()
        if now < self._hurry_until and self._hurried >= self.next_round:
            missing = self._missing(self.next_round) if self._closing(self.next_round) else []
            # A closer that asks for one snapshot a look can look more often.
            return self.poll_interval / (8 if 0 < len(missing) <= SHARE else 4)
        return self._rhythm.pause(now)

    async def _poll(self) -> None:
        now = self._clock.now()
        if now - self._record_asked >= self._record_cadence():
            self._record_asked = now
            await self.poll()
        else:
            await self._poll_others()

    async def _poll_others(self) -> None:
        now = self._clock.now()
        if self._leases_due(now):
            await self.refresh_leases()
        await self._tell_who_is_missing()
        sought = {number for number in self._sought.values() if number is not None}
        for number in sorted(sought):
            await self._poll_snapshots(number)

    async def _tell_who_is_missing(self) -> None:
        """Live learners that are in none of the last rounds; who has left is not live.

        And, after a run's first rounds, that nobody else came. Leases are listed before either.
        """
        if not (self._attendance.suspects or self._attendance.may_be_alone):
            return
        await self.refresh_leases()
        if self._attendance.is_alone(self.live, self._learner):
            self._announce(TrainsAlone(learner=self._learner, rounds=ALONE, mailbox=self._where))
        for event in self._attendance.missing(self.live, self._learner, self.explain):
            self._announce(event)

    def _closing(self, number: int) -> bool:
        """Whether this node closes the round, or the one before it."""
        return any(who != "learner" and sought == number for who, sought in self._sought.items())

    def _record_cadence(self) -> float:
        """Nobody but this node makes the record that it closes, as long as all goes well."""
        if self.undisputed != self.next_round:
            return 0.0
        quarter = (self._rhythm.round_seconds or 0.0) / 4
        return max(4 * self.poll_interval, min(quarter, LONGEST_PAUSE_SECONDS))

    async def _poll_snapshots(self, number: int) -> None:
        """Ask for some of the missing snapshots, and for all of them if one of these is there."""
        now, closing = self._clock.now(), self._closing(number)
        if closing:
            await self._poll_as_closer(number, now)
        # A learner wants to know when a round closes without it. Before a commit is due none does.
        elif not self._rhythm.due_in(now):
            one = self._next_missing(number)
            if one is not None and await self._ask(number, one):
                await self._ask_all(number, self._missing(number))

    async def _poll_as_closer(self, number: int, now: float) -> None:
        missing = self._missing(number)
        share = -(-len(missing) // SHARE)
        if missing and share <= ASKED_BY_KEY:
            self._turn = (self._turn + share) % len(missing)
            turned = missing[self._turn :] + missing[: self._turn]
            if await self._ask_all(number, turned[:share]):
                await self._ask_all(number, turned[share:])
        if now - self._snapshots_listed >= self._snapshots_cadence(len(missing)):
            await self.list_snapshots(number)

    def _missing(self, number: int) -> list[str]:
        """The live learners, in order, of whom nothing was found in the round; not this one."""
        seen = self.snapshots.get(number, {})
        return [who for who in self.ordered if who not in seen and who != self._learner]

    def _next_missing(self, number: int) -> str | None:
        """One of them, whose turn it is."""
        seen = self.snapshots.get(number, {})
        for _ in self.ordered:
            self._turn = (self._turn + 1) % len(self.ordered)
            one = self.ordered[self._turn]
            if one not in seen and one != self._learner:
                return one
        return None

    async def _ask_all(self, number: int, learners: Sequence[str]) -> bool:
        """Whether one of these snapshots is there."""
        return any(await asyncio.gather(*(self._ask(number, learner) for learner in learners)))

    async def _ask(self, number: int, learner: str) -> bool:
        record = await self._exchange.snapshot(number, learner)
        if record is not None:
            self.found_snapshot(number, learner, record)
        return record is not None

    def _leases_due(self, now: float) -> bool:
        """Once in two rounds while they come as usual; the renewals of the own lease list too.

        When the lease of somebody has run out, at once; and when a round is late, because who
        lives matters then: at once, and more often. So one who died before the round was due holds
        it up for one timeout from then on, whenever its last beat was noticed.
        """
        listed, late_at = self._leases_listed, self._rhythm.late_at
        usual = self._rhythm.round_seconds or self.poll_interval
        if self._book.has_lost(now):
            return True
        if now < late_at:
            pause = min(2 * usual, 1.5 * self._lease_every)
        elif listed < late_at:
            return True
        else:  # a longer one would be forgiven them as blindness
            pause = min(max(usual / 2, self._waited() / 16), self._lease_timeout / 4)
        return now - listed >= max(pause, self.poll_interval)

    def _snapshots_cadence(self, missing: int) -> float:
        """Listings find learners whose leases were not seen yet, or many at once."""
        usual = self._rhythm.round_seconds or 2 * self.poll_interval
        if missing > SHARE * ASKED_BY_KEY:
            return max(self.poll_interval, usual / 8)
        return max(1.5 * usual, 4 * self.poll_interval, min(self._waited() / 16, self._lease_every))

    def _waited(self) -> float:
        return self._rhythm.waited(self._clock.now())

    def _on_record(self, record: RoundRecord) -> None:
        self._rhythm.advance(self._clock.now())
        for number in [n for n in self.snapshots if n <= record.round]:
            del self.snapshots[number]
        self._announce(seen(record))
        self._attendance.observe(record, self.live)
        parallel = self._attendance.parallel(record)
        if parallel is not None:
            self._announce(parallel)
        self._attendance.notice_alone(record, self.live, self._learner)
        self.changed.set()


def seen(record: RoundRecord) -> RoundSeen:
    """The event for a record."""
    return RoundSeen(
        round=record.round,
        fragment=record.fragment,
        version=record.version,
        learners=tuple(part.learner for part in record.participants),
        rejected=tuple((row[0], row[1]) for row in record.rejected),
        cosine=record.cosine,
    )
