"""How far a run has come: its newest records, found with few requests."""

import asyncio
import contextlib
from collections.abc import Callable

from gradientmail.errors import ProtocolError
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import REPAIR, Exchange
from gradientmail.exchange.records import RoundRecord

AT_ONCE = 8
"""Records read at a time."""
BEYOND = 64
"""Objects under keys of later rounds that are looked at for a record."""


class Progress:
    """The records that matter: the newest of every fragment, and those whose payloads still exist.

    Nobody of the run deletes records, or leaves a gap. Used on the loop's thread.
    """

    def __init__(
        self,
        exchange: Exchange,
        fragments: int,
        on_record: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        """``on_record`` is called with every record taken in, in order."""
        self._exchange = exchange
        self._fragments = fragments
        self._on_record = on_record
        self.next_round = 0
        self.history: dict[int, RoundRecord] = {}
        """By round: the last P, if there are so many, and of P + 1 before those that were read."""
        self.blocked: ProtocolError | None = None
        """Why the next round cannot be committed: an object that is no record has its key."""

    def newest(self, fragment: int) -> RoundRecord | None:
        """The newest record of a fragment, None before its first commit."""
        latest = self.next_round - 1
        return self.history.get(latest - (latest - fragment) % self._fragments)

    @property
    def latest(self) -> RoundRecord | None:
        """The newest record of all."""
        return self.history.get(self.next_round - 1)

    def advance(self, record: RoundRecord) -> None:
        """Take in the next record, read from the mailbox or committed here."""
        self._check(record, self.next_round)
        self._take_in(record)

    async def read_next(self) -> bool:
        """Look for the next record, once; a node that turns out to be behind catches up.

        ``ProtocolError`` while an object that is no record has the next record's key. If later
        rounds are there, it was one: the run is past it, and so is this node as soon as it can be.
        """
        number = self.next_round
        try:
            found = await self._read_one()
        except ProtocolError as error:
            if await self._is_committed(number, {}):
                await self.catch_up()
                return True
            self.blocked = ProtocolError(
                f"{error}. No round can be committed until it is removed; "
                "docs/damaged-mailbox.md says what else to do"
            )
            raise self.blocked from None
        self.blocked = None
        if not found:
            return False
        if await self._read_one():  # one more has come already
            await self.catch_up()
        return True

    async def catch_up(self) -> None:
        """Find the newest record, and read those that matter up to it.

        The end is found by doubling steps and bisection: about 2·log₂(n) GETs for n rounds, where
        a listing would page through all of them.
        """
        probed: dict[int, RoundRecord] = {}
        last = await self._last(probed)
        wanted = range(max(self.next_round, last + 1 - self._fragments), last + 1)
        limit = asyncio.Semaphore(AT_ONCE)

        async def read(number: int) -> RoundRecord:
            async with limit:
                return probed.get(number) or await self._require(number)

        found = await asyncio.gather(*map(read, wanted), return_exceptions=True)
        for number, record in zip(wanted, found, strict=True):
            if isinstance(record, BaseException):
                raise record
            if number >= self.next_round:  # this node's own commits may have come in meanwhile
                self._take_in(record)

    async def find_end(self) -> None:
        """``catch_up``, for who joins: finds the newest record also behind some that are gone.

        Costs a LIST more. ``ProtocolError`` when one of the last P records is gone.
        """
        try:
            await self.catch_up()
        except ProtocolError:  # its bisection may have ended below a gap
            if not await self._pass_gap():
                raise
        else:
            await self._pass_gap()

    async def _pass_gap(self) -> bool:
        """Go on behind records that are gone, to the newest, if there are any later ones."""
        for number in reversed((await self._exchange.rounds_from(self.next_round))[-BEYOND:]):
            with contextlib.suppress(ProtocolError):  # somebody may put there what is no record
                if await self._read(number) is not None:
                    self.next_round = max(self.next_round, number + 1 - self._fragments)
                    break
        else:
            return False
        for lost in range(self.next_round, number + 1):
            await self._require(lost)
        await self.catch_up()
        return True

    async def _last(self, probed: dict[int, RoundRecord]) -> int:
        """The last round that is committed."""
        low, step = self.next_round - 1, 1
        while await self._is_committed(low + step, probed):
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if await self._is_committed(middle, probed):
                low = middle
            else:
                high = middle
        return low

    async def _is_committed(self, number: int, probed: dict[int, RoundRecord]) -> bool:
        """Whether the round has a record, which is then in ``probed`` if it can be read.

        An object that is none may be what became of one, or may have been put there by somebody
        before its time. It was one when the next round is committed.
        """
        for later in range(number, layout.MAX_ROUND + 1):
            try:
                record = await self._read(later)
            except ProtocolError:
                continue
            if record is not None:
                probed[later] = record
            return record is not None
        return False

    async def _read(self, number: int) -> RoundRecord | None:
        record = await self._exchange.round(number)
        if record is not None:
            self._check(record, number)
        return record

    async def _require(self, number: int) -> RoundRecord:
        record = await self._read(number)
        if record is None:
            raise ProtocolError(
                f"{layout.round_key(number)} is missing below later rounds. {REPAIR}"
            )
        return record

    async def _read_one(self) -> bool:
        number = self.next_round
        record = await self._read(number)
        if record is None:
            return False
        if number == self.next_round:  # else this node committed it meanwhile
            self._take_in(record)
        return True

    def _check(self, record: RoundRecord, number: int) -> None:
        expected = (number, number % self._fragments, number // self._fragments + 1)
        if (record.round, record.fragment, record.version) != expected:
            raise ProtocolError(
                f"{layout.round_key(number)} holds round {record.round}, fragment "
                f"{record.fragment}, version {record.version}; expected {expected}"
            )

    def _take_in(self, record: RoundRecord) -> None:
        self.history[record.round] = record
        self.next_round = record.round + 1
        for number in [n for n in self.history if n < record.round - 2 * self._fragments]:
            del self.history[number]
        if self._on_record is not None:
            self._on_record(record)
