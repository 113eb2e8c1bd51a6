"""The half of a node that closes rounds: collects, merges, commits, recovers, sweeps.

It imports no framework: tensors are the backend's, bytes the exchange's. What it knows of the
mailbox it reads from the watch, and what it holds of a fragment is what the newest record names, so
that any node can take its place after any record.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from gradientmail.attendance import Waiting, round_waits
from gradientmail.backend.base import Backend
from gradientmail.clock import Clock, Flag, Offload, wait_any, wait_or_sleep
from gradientmail.collecting import Collector, take_new
from gradientmail.committing import Closing, Committer
from gradientmail.election import Election
from gradientmail.estimates import RECENT, grace_seconds, moving_average, outlived
from gradientmail.events import (
    Contribution,
    Event,
    ParametersOutOfRange,
    RoundCommitted,
    RoundSuperseded,
    TaskFailed,
)
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.lease import sweep_beats
from gradientmail.exchange.records import Estimates, RoundRecord
from gradientmail.failures import Failures, in_words
from gradientmail.holding import Holding
from gradientmail.run import Run
from gradientmail.sweeping import known_keys, stale, sweep_thoroughly
from gradientmail.watch import Watch


def may_close(accepted: int, quorum_size: int, *, everyone: bool) -> bool:
    """Whether a round has enough: the quorum, or all there can be and at least one."""
    return accepted >= quorum_size or (everyone and accepted >= 1)


class Syncer:
    """Closes rounds when it is this node's turn. Used on the loop's thread."""

    def __init__(
        self,
        run: Run,
        exchange: Exchange,
        watch: Watch,
        *,
        backend: Backend,
        learner: str,
        clock: Clock,
        offload: Offload,
        announce: Callable[[Event], None],
    ) -> None:
        """``backend`` does the merging, on the host."""
        self._run = run
        self._exchange = exchange
        self._watch = watch
        self._backend = backend
        self._clock = clock
        self._offload = offload
        self._announce = announce
        self._failures = Failures(announce)
        self._committer = Committer(run, exchange, backend=backend, offload=offload)
        self._stopping = Flag()
        self._election = Election(
            exchange, watch, clock, learner=learner, stopping=self._stopping, announce=announce
        )
        self._holding = Holding(run, exchange, watch.progress, announce)
        self._claim: tuple[int, int] | None = None
        """Round and number of the claim that this node holds."""
        self._committed: tuple[int, float] | None = None
        self._syncs: deque[float] = deque(maxlen=RECENT)
        """The round committed here last, and the seconds from its close to its record."""
        self._commits_in_a_row = 0
        self._collectors: dict[int, Collector] = {}
        """Of rounds that are not over; the next one's fills while this one commits."""
        self._sweeping: asyncio.Future[None] | None = None

    def stop(self) -> None:
        """End soon: a round that is only collecting is left, one that commits is finished."""
        self._stopping.set()

    def let_go(self) -> None:
        """Hold no payload any more, when the loop has ended."""
        self._collectors.clear()
        self._holding.clear()

    async def run(self) -> None:
        """Close rounds until ``stop``."""
        try:
            await self._close_rounds()
        finally:
            if self._sweeping is not None:  # only when cancelled
                self._sweeping.cancel()

    async def _close_rounds(self) -> None:
        while not self._stopping.is_set():
            number = self._watch.next_round
            try:
                await self._attend(number)
            except Exception as error:
                self._failures.failed("close round", error, number)
                self._collectors.clear()
                await wait_or_sleep(self._clock, self._watch.poll_interval, self._stopping)
            else:
                self._failures.worked("close round")
        await self._swept()

    async def _attend(self, number: int) -> None:
        """See one round through, as its closer or by waiting for its record."""
        if self._claim is None or self._claim[0] != number:
            self._claim = None
            self._commits_in_a_row = 0
            self._collectors.clear()  # a follower holds no tensors for closing
            self._holding.clear()
            attempt = await self._election.wait(number)
            if attempt is None:
                return
            self._claim = (number, attempt)
            if number > 0:
                # A predecessor may have died between a commit and the end of its sweep.
                await sweep_thoroughly(self._exchange, number - 1, len(self._run.fragments))
        if self._watch.progress.blocked is not None:
            raise self._watch.progress.blocked
        self._watch.seek("syncer", number)
        self._watch.undisputed = number if self._claim[1] == 1 else None
        state = asyncio.ensure_future(self._holding.read(number))
        try:
            closing = await self._collect(number, self._claim[1])
            if closing is not None and await state:
                await self._commit(closing)
        finally:
            state.cancel()
            await asyncio.gather(state, return_exceptions=True)
            del state  # an error of it has this frame, and would hold itself and what was collected
            self._watch.seek("syncer", None)
            self._watch.undisputed = None
            self._collectors.pop(number, None)

    # Collecting

    async def _collect(self, number: int, claim: int) -> Closing | None:
        """Take in snapshots until the round may close; None when it should not be closed here."""
        collector = self._collector(number)
        began, quorum_at, waiting = self._clock.now(), None, Waiting()
        while True:
            changed = self._watch.changed.next
            if self._watch.next_round != number:
                self._announce(RoundSuperseded(round=number))
                return None
            if self._stopping.is_set():
                return None
            if await take_new(collector, self._watch.snapshots.get(number, {})):
                continue
            everyone = self._watch.live <= collector.reported
            now = self._clock.now()
            if not self._may_close(collector, everyone=everyone):
                if everyone:
                    self._watch.forget_others(number)
                self._tell_if_it_waits(collector, waiting, now)
                quorum_at, pause = None, self._watch.poll_interval
            elif quorum_at is None:
                quorum_at = now
                await self._look_around(collector)
                continue
            else:
                ends = quorum_at + self._grace(number)
                if everyone or now >= ends:
                    if await collector.settle():
                        return Closing(collector, claim, quorum_at - began, now - quorum_at)
                    await self._watch.progress.read_next()
                    continue
                pause = ends - now
            await wait_or_sleep(self._clock, pause, changed, self._stopping)

    def _tell_if_it_waits(self, collector: Collector, waiting: Waiting, now: float) -> None:
        """A round that somebody has reported to and that others hold up for long is told of."""
        patience = self._watch.takeover_seconds()
        waited = waiting.overdue(now, patience) if collector.reported else None
        if waited is not None:
            event = round_waits(
                collector.number,
                waited,
                accepted=collector.accepted,
                rejected=collector.rejected,
                live=self._watch.live,
                quorum_size=self._run.algorithm.quorum_size,
            )
            self._announce(event)

    def _collector(self, number: int) -> Collector:
        """What is collected of a round so far."""
        if number not in self._collectors:
            self._collectors[number] = Collector(
                self._run,
                self._exchange,
                number=number,
                backend=self._backend,
                offload=self._offload,
                announce=self._announce,
            )
        return self._collectors[number]

    def _may_close(self, collector: Collector, *, everyone: bool) -> bool:
        quorum_size = self._run.algorithm.quorum_size
        return may_close(len(collector.accepted), quorum_size, everyone=everyone)

    async def _look_around(self, collector: Collector) -> None:
        """Before closing: find what else is in the round, and who has joined and is waited for."""
        await self._watch.list_snapshots(collector.number)
        if len(collector.accepted) < self._run.algorithm.quorum_size:
            await self._watch.refresh_leases()

    def _grace(self, number: int) -> float:
        algorithm, estimates = self._run.algorithm, self._watch.estimates
        known = map(self._watch.progress.history.get, range(number - RECENT, number))
        quorums = [record.quorum_seconds for record in known if record is not None]
        estimates = replace(
            estimates,
            quorum=outlived(estimates.quorum, quorums),
            sync=outlived(estimates.sync, self._syncs),
        )
        return grace_seconds(
            estimates,
            gap=self._run.schedule.gap(number),
            in_flight=min(algorithm.in_flight, len(self._run.fragments)),
            overlap=algorithm.overlap_steps,
        )

    # Committing

    async def _commit(self, closing: Closing) -> None:
        """Merge, upload, create the record; then keep the role and sweep.

        Once it only uploads, the next round's snapshots are taken in.
        """
        began = self._clock.now()
        number = closing.collector.number
        merged, enough = Flag(), Flag()
        early = asyncio.ensure_future(self._fill(number + 1, merged, enough))
        try:
            made = await self._committer.make(
                closing,
                # Whatever becomes of this attempt, the old state is used up by it.
                self._holding.pop(closing.collector.fragment.index),
                self._estimates(closing),
                merged=merged,
            )
            if made.overflowed:
                self._announce(ParametersOutOfRange(round=number, tensors=made.overflowed))
            record = made.record
            counts = await self._exchange.commit(record)
            if self._watch.next_round == number:
                self._watch.progress.advance(counts)
            if _payload_keys(counts) != _payload_keys(record):
                self._holding.clear()
                self._announce(RoundSuperseded(round=number))
                return
            sync_seconds = self._clock.now() - began
            self._committed = (number, sync_seconds)
            self._syncs.append(sync_seconds)
            self._holding.put(record.fragment, made.held)
            # The one that counts: another closer may have made the same bytes of more snapshots.
            self._announce(_committed(counts, sync_seconds))
            self._claim = None
            if await self._election.claim_next(number + 1):
                self._claim = (number + 1, 1)
            await self._swept()
            self._sweeping = asyncio.ensure_future(self._sweep(closing))
        except asyncio.CancelledError:
            early.cancel()
            raise
        finally:
            # Not cancelled otherwise: a snapshot that is half folded in would be folded twice.
            enough.set()
            await asyncio.gather(early, return_exceptions=True)

    async def _fill(self, number: int, merged: Flag, enough: Flag) -> None:
        """Take in a round's snapshots once the one before it is ``merged``, until ``enough``."""
        await wait_any(merged, enough)
        collector = self._collector(number)
        self._watch.seek("syncer, next round", number)
        while not enough.is_set():
            changed = self._watch.changed.next
            try:
                if await take_new(collector, self._watch.snapshots.get(number, {})):
                    continue
            except Exception as error:
                # The round itself will take them in again and report what stays wrong.
                self._collectors.pop(number, None)
                self._announce(TaskFailed(task="fetch", error=in_words(error), round=number))
                break
            await wait_or_sleep(self._clock, self._watch.poll_interval, changed, enough)
        self._watch.seek("syncer, next round", None)

    def _estimates(self, closing: Closing) -> Estimates:
        """Averages going on from the record before; what its commit took only its closer knows."""
        number = closing.collector.number
        old = self._watch.estimates
        last = self._committed
        sync = last[1] if last is not None and last[0] == number - 1 else None
        return Estimates(
            step=moving_average(old.step, closing.collector.step_seconds()),
            quorum=moving_average(old.quorum, closing.quorum_seconds),
            sync=moving_average(old.sync, sync),
        )

    async def _sweep(self, closing: Closing) -> None:
        """Remove what the commit made unnecessary, by keys that are known or by listings.

        What fails here is left to a later sweep.
        """
        number, fragments = closing.collector.number, len(self._run.fragments)
        expired = self._watch.progress.history.get(number - 2 * fragments)
        keys = known_keys(
            number,
            claims=closing.claim,
            snapshots=sorted(closing.collector.reported),
            payloads=sorted(closing.collector.payload_keys),
            expired=expired,
        )
        self._commits_in_a_row += 1
        try:
            if expired is None and number >= 2 * fragments:  # committed before this node came
                prefix = layout.blobs_round_prefix(number - 2 * fragments)
                found = await self._exchange.keys(prefix)
                keys += [key for key in found if stale(key, number, fragments)]
            await self._exchange.delete(keys)
            if self._watch.late_snapshots or self._commits_in_a_row % (4 * fragments) == 0:
                await sweep_thoroughly(self._exchange, number, fragments)
            if beats := self._watch.silent_beats():
                await sweep_beats(self._exchange.mailbox, beats)
                await self._watch.refresh_leases()
        except Exception as error:
            self._failures.failed("sweep", error, number)
        else:
            self._failures.worked("sweep")

    async def _swept(self) -> None:
        """Wait for the sweep of the commit before."""
        if self._sweeping is not None:
            await self._sweeping
            self._sweeping = None


def _payload_keys(record: RoundRecord) -> tuple[str, ...]:
    return tuple(ref.key for ref in record.payloads)


def _committed(record: RoundRecord, sync_seconds: float) -> RoundCommitted:
    return RoundCommitted(
        round=record.round,
        fragment=record.fragment,
        version=record.version,
        contributions=tuple(
            Contribution(learner=p.learner, steps=p.steps, tokens=p.tokens, weight=p.weight)
            for p in record.participants
        ),
        rejected=record.rejected,
        cosine=record.cosine,
        quorum_seconds=record.quorum_seconds,
        grace_seconds=record.grace_seconds,
        sync_seconds=sync_seconds,
    )
