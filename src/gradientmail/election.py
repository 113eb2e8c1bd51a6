"""Who closes a round.

The holder of the newest claim does. A closer that commits a round claims the next one at once, so
that the role stays where it is while its holder lives. The others follow: they wait for the record
and look at the claims once, to know whom they rely on. One takes over when the claimant's lease is
gone or stale, or when no record has come for the takeover timeout on its own clock.

Claims only save work: two nodes that both close a round do no harm, since the record decides.
"""

from collections.abc import Callable

from gradientmail.clock import Clock, Flag, wait_or_sleep
from gradientmail.events import Event, RoundClaimed, TookOver
from gradientmail.exchange.exchange import Exchange
from gradientmail.watch import Watch


class Election:
    """This node's part in the election. Used on the loop's thread."""

    def __init__(
        self,
        exchange: Exchange,
        watch: Watch,
        clock: Clock,
        *,
        learner: str,
        stopping: Flag,
        announce: Callable[[Event], None],
    ) -> None:
        """``stopping`` ends the wait for a round."""
        self._exchange = exchange
        self._watch = watch
        self._clock = clock
        self._learner = learner
        self._stopping = stopping
        self._announce = announce
        self._fresh = True
        """Nothing is known of the claims yet: this node has just joined."""
        self._closer: str | None = None
        """Whom this node relies on to close rounds; None while it does not know."""

    async def claim_next(self, number: int) -> bool:
        """After committing the round before: keep the role. False if another has it already."""
        held = await self._exchange.claim(number, 1, self._learner)
        if held:
            self._closer = self._learner
            self._announce(RoundClaimed(round=number, claim=1))
        return held

    async def wait(self, number: int) -> int | None:
        """The number of this node's claim on the round, once it is the one to close it.

        None when the round was committed by another node meanwhile, or this node is leaving.
        """
        began = self._clock.now()
        # Or it closed the round before, and its claim on this one failed: nobody else has the role.
        fresh = looked = self._fresh or self._closer == self._learner
        self._fresh = False
        claim = await self._exchange.last_claim(number) if looked else None
        while self._watch.next_round == number and not self._stopping.is_set():
            changed = self._watch.changed.next
            if claim is not None:
                self._closer = claim[1]
                if claim[1] == self._learner:
                    self._announce(RoundClaimed(round=number, claim=claim[0]))
                    return claim[0]
            reason = self._reason(began, claim, fresh=fresh) if looked else None
            if reason is not None:
                again, mine = await self._take_over(number, claim, reason, began)
                if mine and again is not None:
                    return again[0]
                if again != claim:  # somebody else took over and has the full time to close
                    claim, began = again, self._clock.now()
                    continue
            pause = self._watch.poll_interval
            if looked and claim is not None:  # whoever relies on somebody is told if he is lost
                ends = began + self._watch.takeover_seconds()
                pause = max(pause, ends - self._clock.now())
            await wait_or_sleep(self._clock, pause, changed, self._stopping)
            if self._watch.next_round == number and (not looked or claim is None):
                claim, looked = await self._exchange.last_claim(number), True
        return None

    def _reason(
        self, began: float, claim: tuple[int, str | None] | None, *, fresh: bool
    ) -> str | None:
        """Why this node should take over now: ``lease``, ``silence`` or not at all."""
        if claim is None and fresh:
            return "lease"
        closer = claim[1] if claim is not None else self._closer
        if closer not in self._watch.live:
            return "lease"
        if self._clock.now() - began > self._watch.takeover_seconds():
            return "silence"
        return None

    async def _take_over(
        self, number: int, claim: tuple[int, str | None] | None, reason: str, began: float
    ) -> tuple[tuple[int, str | None] | None, bool]:
        """Look again, then claim: the newest claim now, and whether it is this node's new one.

        The listing of leases may be older than the claim of a node that has just joined.
        """
        previous = claim[1] if claim is not None else self._closer
        if reason == "lease" and previous not in (None, self._learner):
            await self._watch.refresh_leases()
            if previous in self._watch.live:
                return claim, False
        newest = await self._exchange.last_claim(number)
        if newest != claim or self._watch.next_round != number:
            return newest, False
        attempt = 1 if claim is None else claim[0] + 1
        if not await self._exchange.claim(number, attempt, self._learner):
            return await self._exchange.last_claim(number), False
        if previous is None or previous == self._learner:
            self._announce(RoundClaimed(round=number, claim=attempt))
        else:
            self._announce(
                TookOver(
                    round=number,
                    previous=previous,
                    reason=reason,
                    after_seconds=self._clock.now() - began,
                )
            )
        self._closer = self._learner
        return (attempt, self._learner), True
