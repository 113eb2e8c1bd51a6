"""The loop half of the learner: publishes its snapshots and brings commits."""

import asyncio
from collections.abc import Callable, Mapping
from time import perf_counter

from gradientmail.attendance import Movement, explain_silence, published
from gradientmail.backend.base import Array, Backend, Parameters
from gradientmail.blanks import Blanks
from gradientmail.clock import Clock, Offload, Signal, wait_any, wait_or_sleep
from gradientmail.collecting import judge
from gradientmail.deltas import Delta, make_delta
from gradientmail.errors import PayloadCorrupt, ProtocolError
from gradientmail.events import Event, ParametersStandStill
from gradientmail.exchange import layout
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.records import RoundRecord, SnapshotRecord, expect_key
from gradientmail.exchange.sealing import Payload, Sealed, Sealing
from gradientmail.failures import Failures
from gradientmail.handoff import Arrival, Handoff, Outgoing, Version
from gradientmail.joining import rounds_held
from gradientmail.rhythm import LONGEST_PAUSE_SECONDS, Turn
from gradientmail.run import Fragment, Run, payload_arrays
from gradientmail.versions import Versions
from gradientmail.watch import Watch

TRIES = 3
"""How often the newest commit is asked for before this node goes on without it."""
REPLACEMENTS = 4
"""How often a snapshot is put in the place of one that counts nothing. A store may not delete."""


class Courier:
    """Carries between the learner's handoff and the mailbox. Used on the loop's thread."""

    def __init__(
        self,
        run: Run,
        exchange: Exchange,
        watch: Watch,
        handoff: Handoff,
        *,
        backend: Backend,
        parameters: Parameters,
        versions: list[Version],
        learner: str,
        clock: Clock,
        offload: Offload,
        announce: Callable[[Event], None],
    ) -> None:
        """``versions`` are what the model holds."""
        self._run = run
        self._exchange = exchange
        self._watch = watch
        self._handoff = handoff
        self._backend = backend
        self._parameters = parameters
        self._versions = Versions(
            run, exchange, versions, backend=backend, offload=offload, announce=announce
        )
        self.blanks = Blanks(run, handoff, backend=backend, take=exchange.take, offload=offload)
        self._learner = learner
        self._clock = clock
        self._offload = offload
        self._announce = announce
        self._failures = Failures(announce)
        self._movement = Movement(len(versions))
        self._posted = dict.fromkeys(range(len(versions)), rounds_held(versions))
        """By fragment, the newest round whose commit the learner was given."""
        self._last_published = -1
        self._turn = Turn(watch.poll_interval)
        self._snapshot = (-1, 0.0)
        """Round and moment of the last one taken from the outbox."""
        self.woken = Signal()
        self.silent = False
        """Set when a newer process has this learner's id: nothing more is published."""
        self.in_time = -1
        """The last round whose snapshot was there before the round closed."""
        self._tries: dict[int, int] = {}
        """How often the parameters of a round could not be read."""
        self._left_out: dict[int, PayloadCorrupt] = {}
        """Why the model lacks the newest commit of a fragment."""
        self._told_at = clock.now()
        """When the learner was given news that it had no other before."""
        watch.explain = self._explain

    async def run(self) -> None:
        """Work until cancelled."""
        await asyncio.gather(self._listen(), self._publish_all(), self._fetch_all())

    def let_go(self) -> None:
        """Hold no payload any more, when the loop has ended."""
        self._versions.clear()

    # What the learner says

    async def _listen(self) -> None:
        handoff = self._handoff
        while True:
            woken, changed = self.woken.next, self._watch.changed.next
            while handoff.events:
                self._announce(handoff.events.popleft())
            number, due_seconds = self._next_round()
            pause = self._turn.pause(number, due_seconds, self._clock.now())
            self._watch.seek("learner", None if pause else number)
            self._report(number)
            await wait_or_sleep(self._clock, pause or LONGEST_PAUSE_SECONDS, woken, changed)

    def _next_round(self) -> tuple[int | None, float]:
        """The round that the learner publishes next, and in how many seconds.

        It may be one that it can publish with the commits that are on the way to it: by the step
        that takes them in, it should know of others' snapshots of that round.
        """
        handoff = self._handoff
        number, due_seconds = handoff.waits_for, handoff.due_seconds
        if handoff.arrivals and (after := self.blanks.next_round(self._newest_posted())) != number:
            return after, handoff.step_seconds
        return number, due_seconds

    def _report(self, number: int | None) -> None:
        """Tell the learner what changes when it publishes: who lives, who has published."""
        handoff, live = self._handoff, len(self._watch.live)
        handoff.takeover_seconds = self._watch.takeover_seconds()
        known, handoff.live = (handoff.others, handoff.live), live
        if number is not None:
            handoff.others = number, self._watch.others_in(number)
            if handoff.others != known[0] or (handoff.others[1] and live != known[1]):
                self._tell()

    def _tell(self) -> None:
        if not self._handoff.news:
            self._told_at = self._clock.now()
        self._handoff.tell()

    def _explain(self) -> str:
        """Why this learner is in none of the last rounds."""
        now = self._clock.now()
        return explain_silence(
            round_seconds=self._watch.round_seconds,
            step_seconds=self._handoff.step_seconds,
            poll_interval=self._watch.poll_interval,
            late=self.in_time < self._last_published < self._watch.next_round,
            idle=self._handoff.news and now - self._told_at > self._watch.round_seconds,
        )

    # Publishing

    async def _publish_all(self) -> None:
        while True:
            woken, changed = self.woken.next, self._watch.changed.next
            while self._handoff.outbox:
                # Not named here: a name would hold its buffers until the next one comes.
                await self._publish_once(self._handoff.outbox.popleft())
            deltas = self._exchange.deltas
            for number in tuple(deltas):  # the thread that merges takes out of it meanwhile
                if number < self._watch.next_round:
                    deltas.pop(number, None)
            try:
                await self.blanks.prepare(self._newest_posted())
            except Exception as error:  # then ``step`` makes its own, or fails itself
                self._failures.failed("publish", error)
            await wait_any(woken, changed)

    async def _publish_once(self, outgoing: Outgoing) -> None:
        """Publish a snapshot, unless it is the last one again: Ctrl-C came while it was posted."""
        snapshot = (outgoing.round, outgoing.started)
        if self._snapshot != snapshot:
            self._snapshot = snapshot
            await self._publish(outgoing)

    async def _publish(self, outgoing: Outgoing) -> None:
        """Upload one snapshot; repeated until done, or its round is committed without it."""
        if self.silent:
            return
        self._last_published = outgoing.round
        delta = await self._delta(outgoing)
        sealed: Sealed | None = None
        while delta is not None and self._watch.next_round <= outgoing.round:
            try:
                if sealed is None:
                    sealed = await self._seal(outgoing, delta)
                    # Before the upload, in which the next round may become due: ``step`` would
                    # have to touch fresh pages.
                    await self.blanks.prepare(self._newest_posted())
                await self._upload(outgoing, sealed, delta)
            except Exception as error:
                self._failures.failed("publish", error, outgoing.round)
                await self._clock.sleep(self._watch.poll_interval)
            else:
                self._failures.worked("publish")
                return

    async def _delta(self, outgoing: Outgoing) -> Delta | None:
        """Compute the delta, or have the learner make another snapshot.

        Never twice of one snapshot: it is written over the copy of the parameters, and half of that
        may be gone when it fails.
        """
        fragment = self._run.fragments[outgoing.fragment]
        try:
            delta = await self._offload(self._make_delta, fragment, outgoing)
        except Exception as error:
            self._failures.failed("publish", error, outgoing.round)
            await self._clock.sleep(self._watch.poll_interval)
            self._ask_again(outgoing.round, ())
            return None
        if delta.not_finite:
            self._ask_again(outgoing.round, delta.not_finite)
        return delta

    def _ask_again(self, number: int, not_finite: tuple[str, ...]) -> None:
        """Have the learner publish the round again, and put ``not_finite`` back before."""
        self._handoff.repairs.append((number, not_finite))
        self._handoff.tell()

    async def _upload(self, outgoing: Outgoing, sealed: Sealed, delta: Delta) -> None:
        healthy = not delta.not_finite
        payload = await self._exchange.store(sealed)
        payload.squares = delta.squares
        if self._watch.next_round > outgoing.round:  # closed meanwhile; nobody will look for it
            await self._exchange.delete((payload.ref.key,))
            return
        record = SnapshotRecord(
            learner=self._learner,
            round=outgoing.round,
            local_step=outgoing.local_step,
            steps=outgoing.steps if healthy else 0,
            tokens=outgoing.tokens if healthy else 0,
            base_version=outgoing.anchor.number,
            rounds_seen=outgoing.rounds_seen,
            step_seconds=outgoing.step_seconds or None,
            schema_digest=self._run.digest,
            final=outgoing.final,
            payload=payload.ref,
        )
        data: bytes | None = None
        for _ in range(REPLACEMENTS):
            if await self._exchange.put_snapshot(record):
                data = record.to_bytes()
                break
            # One is there: this attempt's, its answer lost, or an earlier process's of this id.
            data = await self._exchange.snapshot(outgoing.round, self._learner)
            if not healthy or data is None or await self._counts(outgoing, data):
                break
            # It counts nothing, so that the round may wait for ever for a contribution.
            await self._exchange.delete((record.key,))
        if self._watch.next_round <= outgoing.round:
            # Only now: the syncer may write over it, and nothing is uploaded again from here on.
            self._exchange.deltas[outgoing.round] = payload
            self.in_time = outgoing.round if healthy else self.in_time
        if data is not None:
            self._watch.found_snapshot(outgoing.round, self._learner, data)
        self._watch.hurry(outgoing.round, 4)
        took = perf_counter() - outgoing.started
        self._announce(published(record, outgoing.fragment, sealed.ref.size, took))
        if count := self._movement.stands_still(outgoing.fragment, record, delta.squares):
            self._announce(ParametersStandStill(learner=self._learner, rounds=count))

    async def _counts(self, outgoing: Outgoing, snapshot: bytes) -> bool:
        """Whether this learner's snapshot that is there already can be merged, payload included."""
        delta = self._run.fragments[outgoing.fragment].delta
        base_version = self._run.schedule.version(outgoing.round) - 1
        try:
            record = SnapshotRecord.from_bytes(snapshot)
            expect_key(record, layout.snapshot_key(outgoing.round, self._learner))
            if judge(record, digest=self._run.digest, base_version=base_version) is not None:
                return False
            return await self._exchange.fetch(record.payload, delta) is not None
        except ProtocolError:  # what is there cannot be read
            return False

    async def _seal(self, outgoing: Outgoing, delta: Delta) -> Sealed:
        """Hash it."""
        layout_ = self._run.fragments[outgoing.fragment].delta

        def key_of(digest: str, extension: str) -> str:
            return layout.snapshot_blob_key(outgoing.round, self._learner, digest, extension)

        return await self._exchange.seal(Sealing(delta.buffer, layout_), key_of)

    def _make_delta(self, fragment: Fragment, outgoing: Outgoing) -> Delta:
        """Off the loop."""
        outgoing.ready()
        dtype, take = self._run.algorithm.delta_dtype, self._exchange.take
        return make_delta(self._backend, fragment, outgoing, dtype, take)

    # Bringing commits

    async def _fetch_all(self) -> None:
        while True:
            changed = self._watch.changed.next
            try:
                await self._fetch_new()
            except Exception as error:
                self._failures.failed("fetch", error)
                await self._clock.sleep(self._watch.poll_interval)
            else:
                self._failures.worked("fetch")
                await changed.wait()

    async def bring_newest(self) -> Exception | None:
        """Look for commits once more, or some times if that fails, and post what is new.

        What it failed with at last, or why the model lacks a commit, for who calls to raise when
        the model has what could be read.
        """
        failed: Exception | None = None
        self._posted |= dict.fromkeys(self._left_out, -1)  # what was passed over is tried again
        self._tries = {}
        for _ in range(TRIES):
            failed = None
            for work in (self._watch.progress.read_next, self._fetch_new):
                try:
                    await work()
                except Exception as error:
                    failed = failed or error
                    self._failures.failed("fetch", error)
            if failed is None and not self._fresh():
                break
            await self._clock.sleep(min(self._watch.poll_interval, 1.0))
        return failed or next(iter(self._left_out.values()), None)

    def _fresh(self) -> list[RoundRecord]:
        """The newest commit of each fragment if it was not posted, the oldest first."""
        newest = filter(None, map(self._watch.progress.newest, self._posted))
        return sorted(filter(self._is_new, newest), key=lambda record: record.round)

    def _is_new(self, record: RoundRecord) -> bool:
        """Whether neither it nor a newer one of its fragment was posted; two may be fetching."""
        return record.round > self._posted[record.fragment]

    async def _fetch_new(self) -> None:
        """Post every commit that the learner has not got, the newest of each fragment only.

        One whose payload cannot be read is left out after some tries: others may wait for this
        learner to report, and so for ever. Its next snapshot of that fragment is stale.
        """
        unreadable = ""
        for record in self._fresh():
            if self._watch.progress.newest(record.fragment) is not record:
                continue  # superseded while others were fetched; the change that told so wakes us
            try:
                payload = await self._versions.theta(record)
            except PayloadCorrupt as error:  # named no longer than this: its frames hold the bytes
                unreadable = unreadable or str(error)
                if not self._is_new(record):
                    continue
                if not self._was_last_try(record.round):
                    break  # with a later one the learner would pass it, and publish from before it
                self._left_out[record.fragment] = PayloadCorrupt(str(error))
                self._post(Arrival(record, None, {}))
                continue
            if payload is None:
                continue  # swept: a poll tells of what came instead
            version, staged = await self._offload(self._stage, record.version, payload)
            await self.blanks.prepare(max(record.round, self._newest_posted()))
            if self._is_new(record):
                self._versions.put(record.fragment, version)
                self._post(Arrival(record, version, staged))
                self._left_out.pop(record.fragment, None)
        if unreadable:
            raise PayloadCorrupt(unreadable)

    def _stage(self, number: int, payload: Payload) -> tuple[Version, Mapping[str, Array]]:
        """A version, and its arrays where the model is. Off the loop."""
        arrays = payload_arrays(self._backend, payload)
        return Version(number, payload, arrays), self._parameters.stage(arrays)

    def _was_last_try(self, number: int) -> bool:
        """Count a try to read a commit; whether to go on without it."""
        oldest = min(self._posted.values())
        tries = {one: count for one, count in self._tries.items() if one > oldest}
        self._tries = tries | {number: tries.get(number, 0) + 1}
        return self._tries[number] >= TRIES

    def _newest_posted(self) -> int:
        return max(self._posted.values())

    def _post(self, arrival: Arrival) -> None:
        """Give an arrival to the learner, instead of an older one that it has not taken yet."""
        arrivals = self._handoff.arrivals
        for older in tuple(arrivals) if arrival.version is not None else ():
            if older.record.fragment == arrival.record.fragment:
                try:
                    arrivals.remove(older)
                except ValueError:  # the learner took it just now
                    break
        arrivals.append(arrival)
        self._posted[arrival.record.fragment] = arrival.record.round
        self._tell()
        self.woken.set()  # it may decide which round is next
