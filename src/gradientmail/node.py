"""The loop half of one node, put together: joins, runs its tasks, leaves.

It takes its mailbox, clock, random numbers and the way work leaves the loop as arguments. A session
runs it on a thread of its own; a simulated world runs many of them in one thread.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.partition import partition
from gradientmail.backend.base import Backend, Parameters
from gradientmail.calls import uncancelled
from gradientmail.clock import Clock, Flag, Offload, wait_or_sleep
from gradientmail.courier import Courier
from gradientmail.errors import LearnerReplaced, MailboxUnavailable
from gradientmail.events import (
    Event,
    Joined,
    LeaseLost,
    LeaseRenewed,
    RunCreated,
    StoreUnavailable,
    TaskFailed,
)
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.lease import Lease
from gradientmail.exchange.records import Manifest, Ref, RoundRecord
from gradientmail.exchange.sealing import Payload
from gradientmail.failures import Failures, called
from gradientmail.handoff import Handoff, Version
from gradientmail.joining import create_run, find_run, newest_versions, rounds_held
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.retrying import RetryingMailbox
from gradientmail.run import Fragment, Run, check_algorithm, check_schema, fragments_of, read_run
from gradientmail.schema import Schema
from gradientmail.syncer import Syncer
from gradientmail.watch import Watch


@dataclass(frozen=True, slots=True)
class Settings:
    """What is this node's own; the rest is the run's. Times in seconds."""

    learner: str
    poll_interval: float = 1.0
    lease_every: float = 60.0
    lease_timeout: float = 120.0
    compressed: bool = False


class Node:
    """The loop half of a node. Used on the loop's thread, one call after the other."""

    def __init__(
        self,
        mailbox: Mailbox,
        settings: Settings,
        handoff: Handoff,
        *,
        clock: Clock,
        random: Random,
        offload: Offload,
        hashing: Offload,
        take: Callable[[int], memoryview],
        announce: Callable[[Event], None],
    ) -> None:
        """Nothing is read or written yet.

        ``offload`` is given the work on tensors, ``hashing`` that on payloads' bytes.
        """
        self.settings = settings
        self._handoff = handoff
        self._where = called(mailbox)
        self._clock = clock
        self._offload = offload
        self._announce = announce
        self._retrying = retrying = RetryingMailbox(
            mailbox, clock=clock, random=random, on_unavailable=self._on_unavailable
        )
        self.exchange = Exchange(
            retrying, offload=hashing, take=take, compressed=settings.compressed
        )
        token = f"{random.getrandbits(64):016x}"
        self._listed_beat = 0
        self._holds_lease = False
        self._lease = Lease(retrying, settings.learner, token, self._observe_leases, now=clock.now)
        self.rounds_seen = -1
        """The round that the model holds when it has joined, −1 for a fresh run."""
        self._tasks: list[asyncio.Task[None]] = []
        self._serving: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._lease_due = Flag()
        self._created: list[Payload] = []
        """The initial payloads, held until the model's versions refer to them."""
        self.watch: Watch | None = None
        self.courier: Courier | None = None
        self.syncer: Syncer | None = None

    # Joining, in this order

    async def look(
        self, schema: Schema, algorithm: DiLoCo, averaged: frozenset[str] = frozenset()
    ) -> Manifest | None:
        """The run's manifest, None when there is none yet.

        Raises when model and options are not the run's. Nothing is written before that is known:
        who cannot join must not end a session that has this node's id.
        """
        manifest = await self.exchange.manifest()
        if manifest is not None:
            _checked(manifest, schema, algorithm, averaged)
        return manifest

    async def find(self, largest: int) -> Manifest | None:
        """Take the lease, then wait for the run; None when this node is to create it.

        ``largest`` is the size of the largest fragment in bytes.
        """
        await self.hold_lease()
        return await find_run(
            self.exchange,
            self._clock,
            learner=self.settings.learner,
            poll_interval=self.settings.poll_interval,
            largest=largest,
        )

    async def create(
        self,
        schema: Schema,
        algorithm: DiLoCo,
        buffers: Sequence[memoryview],
        averaged: frozenset[str] = frozenset(),
    ) -> Manifest:
        """Create the run from theta payload buffers, one a fragment of ``planned``'s.

        ``averaged`` are the names in ``schema`` that are a model's buffers.
        """
        fragments = planned(schema, algorithm)

        def manifest(init: tuple[Ref, ...]) -> Manifest:
            return Manifest(
                schema=schema,
                plan=tuple(tuple(spec.name for spec in one.specs) for one in fragments),
                algorithm=algorithm.to_json(),
                init=init,
                created_by=self.settings.learner,
                averaged=tuple(sorted(averaged)),
            )

        counts, self._created = await create_run(
            self.exchange, manifest=manifest, fragments=fragments, buffers=buffers
        )
        if counts.created_by == self.settings.learner:
            parameters = sum(spec.count for spec in schema)
            made, asked = len(fragments), algorithm.fragments
            self._announce(
                RunCreated(
                    fragments=made,
                    parameters=parameters,
                    asked=asked if asked > made else 0,
                    mailbox=self._where,
                )
            )
        return counts

    async def enter(
        self,
        manifest: Manifest,
        schema: Schema,
        algorithm: DiLoCo,
        backend: Backend,
        averaged: frozenset[str] = frozenset(),
    ) -> tuple[Run, list[Version]]:
        """Check that model and options are the run's, and read its newest parameters."""
        run = _checked(manifest, schema, algorithm, averaged)
        settings = self.settings
        self.watch = Watch(
            self.exchange,
            self._clock,
            learner=settings.learner,
            fragments=len(run.fragments),
            poll_interval=settings.poll_interval,
            lease_every=settings.lease_every,
            lease_timeout=settings.lease_timeout,
            announce=self._announce,
            listed=self._look_for_own,
            where=self._where,
        )
        versions = await newest_versions(run, self.exchange, self.watch.progress, backend)
        self.rounds_seen = rounds_held(versions)
        self._created = []
        return run, versions

    async def hold_lease(self) -> None:
        """Take the lease and keep it, if that is not done; older processes of this id end."""
        if self._keeping is None:
            self._holds_lease = True  # or a part of it, should this be stopped
            await self._lease.acquire()
            self._keeping = self._start(self._keep_lease())
        if self.watch is not None:
            await self.watch.refresh_leases()

    async def start(
        self,
        run: Run,
        versions: list[Version],
        *,
        parameters: Parameters,
        backend: Backend,
        merging: Backend,
    ) -> Courier:
        """Begin to poll, publish, fetch and close rounds. After ``enter`` and ``hold_lease``."""
        if self.watch is None or self._keeping is None:
            raise RuntimeError("start comes after enter and hold_lease")
        self.courier = Courier(
            run,
            self.exchange,
            self.watch,
            self._handoff,
            backend=backend,
            parameters=parameters,
            versions=versions,
            learner=self.settings.learner,
            clock=self._clock,
            offload=self._offload,
            announce=self._announce,
        )
        self.syncer = Syncer(
            run,
            self.exchange,
            self.watch,
            backend=merging,
            learner=self.settings.learner,
            clock=self._clock,
            offload=self._offload,
            announce=self._announce,
        )
        self._handoff.takeover_seconds = self.watch.takeover_seconds()
        self._handoff.live = len(self.watch.live)
        learner, seen = self.settings.learner, self.rounds_seen
        self._announce(Joined(learner=learner, rounds_seen=seen, mailbox=self._where))
        self._serving = [self._start(self.watch.run()), self._start(self.courier.run())]
        self._closing = self._start(self.syncer.run())
        return self.courier

    async def history(self) -> dict[int, RoundRecord]:
        """The records that this node remembers, by round."""
        return dict(self.watch.progress.history) if self.watch is not None else {}

    # Leaving

    def patience(self) -> float:
        """Seconds that a leaving learner waits for something to land. Any thread."""
        return self.settings.lease_timeout + self._handoff.takeover_seconds

    async def leave(self, *, patience: float, finish: bool) -> None:
        """Stop all tasks and delete the lease, within ``patience`` seconds.

        With ``finish`` a commit under way is completed first, sweep included.
        """
        try:
            async with asyncio.timeout(patience):
                if finish and self.syncer is not None and self._closing is not None:
                    self.syncer.stop()
                    await asyncio.wait([self._closing], timeout=patience / 2)
                await self._stop(task for task in self._tasks if task is not self._keeping)
                if self._holds_lease:
                    await self._lease.release()
        except Exception as error:
            said = str(error) or f"the mailbox has not answered for {patience:g} s"
            if self.courier is not None:  # who never was in gets told why as an exception
                self._announce(TaskFailed(task="lease", error=said, repeated=False))
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """Stop all tasks where they are."""
        await self._stop(self._tasks)
        self._tasks.clear()
        self._closing = self._keeping = None  # their frames hold buffers

    def let_go(self) -> None:
        """Hold no payload any more, when the loop has ended."""
        for part in (self.courier, self.syncer):
            if part is not None:
                part.let_go()
        self._handoff.let_go()
        self.exchange.deltas.clear()

    async def _stop(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        stopped = tuple(tasks)
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)

    # Tasks

    def _start(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._guard(work))
        # One that is cancelled before it begins would warn that its work was never awaited.
        task.add_done_callback(lambda _: work.close())
        self._tasks.append(task)
        return task

    async def _guard(self, work: Coroutine[Any, Any, object]) -> None:
        """A task that ends by an error nobody foresaw ends the training too, loudly."""
        try:
            await uncancelled(work)
        except Exception as error:
            self._handoff.fail(error)

    async def _keep_lease(self) -> None:
        every = pause = self.settings.lease_every
        failures = Failures(self._announce)
        while True:
            await wait_or_sleep(self._clock, pause, self._lease_due)
            self._lease_due.clear()
            try:
                held = await self._lease.renew()
            except Exception as error:
                # Soon again: after ``lease_every`` once more the others would call this node lost.
                pause = min(self.settings.poll_interval, every)
                failures.failed("lease", error)
                continue
            pause = every
            if self._lease.untidy is None:
                failures.worked("lease")
            else:  # the lease holds all the same
                failures.failed("lease", self._lease.untidy)
            if not held:
                self._step_aside()
                return
            live = self.watch.ordered if self.watch is not None else ()
            self._announce(LeaseRenewed(beat=self._lease.beat, live=live))

    def _observe_leases(self, keys: Sequence[str]) -> None:
        self._look_for_own(keys)
        if self.watch is not None:
            self.watch.observe_leases(keys)

    def _look_for_own(self, leases: Sequence[str]) -> None:
        """Renew at once if the own beat is gone: a newer process deletes it when it begins.

        Only one that was listed before: a listing may be older than the beat.
        """
        if self._lease.is_among(leases):
            self._listed_beat = self._lease.beat
        elif self._listed_beat == self._lease.beat:
            self.check_lease()

    def check_lease(self) -> None:
        """Renew the lease now, which shows whether another process has it. On the loop's thread."""
        self._lease_due.set()

    def _step_aside(self) -> None:
        """A newer process has this learner's id: it goes on, this one writes nothing more."""
        learner = self.settings.learner
        if self.courier is not None:
            self.courier.silent = True
        if self.syncer is not None:
            self.syncer.stop()
        for task in self._serving:  # whoever holds this node may never ask it for anything again
            task.cancel()
        self._announce(LeaseLost(learner=learner))
        self._handoff.fail(
            LearnerReplaced(
                "another session, here or in another process, joined this run with the learner id "
                f"{learner!r} and goes on with it; this one publishes nothing more. Stop this one, "
                "or give every session a learner_id of its own"
            )
        )

    def _on_unavailable(self, operation: str, error: MailboxUnavailable, delay: float) -> None:
        answered = self._retrying.answered
        event = StoreUnavailable(
            operation=operation, error=str(error), retry_seconds=delay, answered=answered
        )
        self._announce(event)


def _checked(
    manifest: Manifest, schema: Schema, algorithm: DiLoCo, averaged: frozenset[str]
) -> Run:
    """The run, for a model and options that are its own."""
    run = read_run(manifest)
    check_schema(run, schema, averaged)
    check_algorithm(run, algorithm)
    return run


def planned(schema: Schema, algorithm: DiLoCo) -> tuple[Fragment, ...]:
    """The fragments that a run of this model and these options has."""
    plan = partition(schema, algorithm.partition, algorithm.fragments)
    return fragments_of(schema, plan, algorithm)
