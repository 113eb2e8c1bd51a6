"""What a closer holds of the fragments, and how it gets that from the mailbox when it is new."""

from collections.abc import Callable
from dataclasses import dataclass

from gradientmail.errors import PayloadCorrupt
from gradientmail.event import Event
from gradientmail.events import MomentumLost
from gradientmail.exchange.exchange import REPAIR, Exchange
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.exchange.records import Ref, RoundRecord
from gradientmail.exchange.sealing import Payload
from gradientmail.progress import Progress
from gradientmail.run import Fragment, Run


@dataclass(frozen=True, slots=True)
class Held:
    """A fragment as its closer holds it."""

    version: int
    theta: Payload
    outer: Payload | None
    """None before the first commit: zero momentum, the master is theta."""


class Holding:
    """The fragments as their newest records have them, one at a time. Used on the loop's thread.

    It holds what the newest record names, so that any node can take the closer's place after any.
    """

    def __init__(
        self, run: Run, exchange: Exchange, progress: Progress, announce: Callable[[Event], None]
    ) -> None:
        """Nothing is held yet."""
        self._run = run
        self._exchange = exchange
        self._progress = progress
        self._announce = announce
        self._held: dict[int, Held] = {}
        self._damaged: set[int] = set()
        """The rounds whose outer state could not be read, once."""

    def put(self, fragment: int, held: Held) -> None:
        """Hold what this node has committed."""
        self._held[fragment] = held

    def pop(self, fragment: int) -> Held:
        """Give away what ``read`` has made sure is held."""
        return self._held.pop(fragment)

    def clear(self) -> None:
        """Let go of everything."""
        self._held.clear()

    async def read(self, number: int) -> bool:
        """Have the fragment of round ``number``; from the mailbox if it is not held.

        False when the round turns out to be committed: then what it starts from may be swept.
        """
        fragment = self._run.fragments[self._run.schedule.fragment(number)]
        record = self._progress.newest(fragment.index)
        held = self._held.get(fragment.index)
        if held is not None and held.version == (0 if record is None else record.version):
            return True
        try:
            self._held[fragment.index] = await self._read(record, fragment, number)
        except PayloadCorrupt:
            await self._progress.read_next()
            if self._progress.next_round == number:
                raise
            return False
        return True

    async def _read(self, record: RoundRecord | None, fragment: Fragment, number: int) -> Held:
        if record is None:
            init = self._run.manifest.init[fragment.index]
            return Held(0, await self._payload(init, fragment.theta), None)
        theta = await self._payload(record.theta, fragment.theta)
        try:
            outer = await self._payload(record.outer, fragment.outer)
        except PayloadCorrupt as error:
            # The parameters are what the run is; it goes on without a momentum that nobody has.
            if record.round not in self._damaged:
                self._damaged.add(record.round)
                raise
            self._announce(MomentumLost(round=number, fragment=fragment.index, error=str(error)))
            return Held(record.version, theta, None)
        return Held(record.version, theta, outer)

    async def _payload(self, ref: Ref, payload_layout: PayloadLayout) -> Payload:
        try:
            payload = await self._exchange.fetch(ref, payload_layout)
        except PayloadCorrupt as error:
            raise PayloadCorrupt(f"{error}. {REPAIR}") from None
        if payload is None:
            raise PayloadCorrupt(f"{ref.key} is missing from the mailbox. {REPAIR}")
        return payload
