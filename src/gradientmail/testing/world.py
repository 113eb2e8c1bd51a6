"""Nodes in one thread, under virtual time, over one simulated store.

Each node is the real loop half (courier, syncer, watch, lease) and the real learner; only the
threads and the training are simulated: a step is a pause on the node's clock and a change of a
small model. The same seed gives the same history.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import override

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.backend import backend_for
from gradientmail.backend.base import Backend, Parameters
from gradientmail.buffers import BufferPool
from gradientmail.clock import Offload, Signal, inline, wait_or_sleep
from gradientmail.events import Event
from gradientmail.handoff import Handoff, Outgoing
from gradientmail.learner import Learner
from gradientmail.mailbox.base import Mailbox
from gradientmail.node import Node, Settings, planned
from gradientmail.run import arrays_over
from gradientmail.testing.vector import Vector, VectorBackend
from gradientmail.testing.virtual_time import VirtualClock


@dataclass(frozen=True, slots=True)
class Training:
    """How a simulated node trains."""

    model: object
    """What a session takes, or a ``Vector``."""
    change: Callable[[object, int], None]
    """``change(model, local_step)``: one optimizer step."""
    step_seconds: float = 1.0
    samples: int = 8
    steps_at_once: int = 1
    """Up to so many steps that only count pass on one timer; seen from outside, late."""
    average_buffers: bool = False
    """As ``buffers="average"`` of a session does."""


def _nothing(_: Outgoing) -> None:
    """Nobody looks at snapshots."""


class _NoticingHandoff(Handoff):
    """Also tells a simulated training thread, which waits on the loop instead of on a lock."""

    noticed: Signal
    posted: Callable[[Outgoing], object]

    @override
    def tell(self) -> None:
        Handoff.tell(self)
        self.noticed.set()

    @override
    def post(self, outgoing: Outgoing) -> None:
        self.posted(outgoing)
        Handoff.post(self, outgoing)


@dataclass(slots=True)
class SimulatedNode:
    """One node of a world. ``join`` first, then ``train``, then ``close`` or ``kill``."""

    mailbox: Mailbox
    settings: Settings
    algorithm: DiLoCo
    training: Training
    seed: int = 0
    clock: VirtualClock = field(default_factory=VirtualClock)
    offload: Offload = inline
    events: list[Event] = field(default_factory=list)
    announce: Callable[[Event], None] | None = None
    """Called with every event; None keeps them in ``events``."""
    posted: Callable[[Outgoing], object] = _nothing
    """Called with every snapshot, its copy of the parameters complete and not written over yet."""
    node: Node = field(init=False)
    handoff: Handoff = field(init=False)
    learner: Learner = field(init=False)
    _news: Signal = field(default_factory=Signal)
    _stepped_at: float = 0.0

    async def join(self) -> None:
        """As constructing a session does; raises what that raises."""
        backend, parameters = self._bind()
        pool, averaged = BufferPool(), parameters.averaged
        self.handoff = handoff = _NoticingHandoff(wake=self._wake)
        handoff.noticed, handoff.posted = self._news, self.posted
        self.node = Node(
            self.mailbox,
            self.settings,
            handoff,
            clock=self.clock,
            random=Random(self.seed),
            offload=self.offload,
            hashing=self.offload,
            take=pool.take,
            announce=self.announce or self.events.append,
        )
        schema = parameters.schema
        fragments = planned(schema, self.algorithm)
        manifest = await self.node.look(schema, self.algorithm, averaged)
        if manifest is None:
            manifest = await self.node.find(max(one.theta.nbytes for one in fragments))
        if manifest is None:
            buffers = [one.theta.blank(pool.take) for one in fragments]
            for one, buffer in zip(fragments, buffers, strict=True):
                parameters.capture(arrays_over(backend, buffer, one.theta))()
            manifest = await self.node.create(schema, self.algorithm, buffers, averaged)
        run, versions = await self.node.enter(manifest, schema, self.algorithm, backend, averaged)
        await self.node.hold_lease()
        for version in versions:
            parameters.apply(parameters.stage(version.arrays))
        courier = await self.node.start(
            run, versions, parameters=parameters, backend=backend, merging=backend
        )
        self.learner = Learner(
            parameters,
            versions,
            learner=self.settings.learner,
            rounds_seen=self.node.rounds_seen,
            # Its waiting would stop the only thread there is; ``train`` waits instead.
            algorithm=replace(self.algorithm, overlap_steps=None),
            schedule=run.schedule,
            handoff=self.handoff,
            make_blank=courier.blanks.make,
            now=lambda: self._stepped_at,
        )

    def _bind(self) -> tuple[Backend, Parameters]:
        model = self.training.model
        backend: Backend = VectorBackend() if isinstance(model, Vector) else backend_for(model)
        if self.training.average_buffers:
            return backend, backend.bind_with_buffers(model)
        return backend, backend.bind(model)

    async def train(self, steps: int) -> None:
        """Take so many steps, each ``step_seconds`` on this node's clock."""
        seconds, learner = self.training.step_seconds, self.learner
        while steps > 0:
            began = self.clock.now()
            count = int(min(steps, learner.steps_to_count(), self.training.steps_at_once))
            if count > 1:
                count = await self._pass(count)
            else:
                await self.clock.sleep(seconds)
            for left in reversed(range(count)):
                self._stepped_at = (
                    self.clock.now() if not left else began + (count - left) * seconds
                )
                self.training.change(self.training.model, learner.local_step)
                learner.step(self.training.samples)
            steps -= count
            await self._wait_for_overlap()

    async def _pass(self, steps: int) -> int:
        """Let time pass for so many steps, or fewer when news come: to the end of that step."""
        seconds, began = self.training.step_seconds, self.clock.now()
        if not self.handoff.news:
            await wait_or_sleep(self.clock, steps * seconds, self._news.next)
        passed = self.clock.now() - began
        count = min(max(math.ceil(passed / seconds - 1e-9), 1), steps)
        left = count * seconds - passed
        if left > 0:
            await self.clock.sleep(left)
        return count

    async def _wait_for_overlap(self) -> None:
        """As the learner waits in a step, if the algorithm has ``overlap_steps``."""
        overlap, waited = self.algorithm.overlap_steps, False
        while overlap is not None and self.learner.is_ahead(overlap):
            waited = True
            if not self.handoff.news:
                await self._news.next.wait()
            self.learner.take_news()
        if waited:
            self.handoff.news = True  # so that the next step looks again at what is due

    async def close(self, *, patience: float = 600.0) -> tuple[int, ...]:
        """Leave as a clean exit does; the rounds in flight that did not commit in time."""
        ends = self.clock.now() + patience
        learner = self.learner
        left = len(learner.versions) if self.algorithm.flush_on_close else 0
        while self.clock.now() < ends:
            while left and learner.local_step >= learner._final_due():
                learner._publish(final=True)
                left -= 1
            if not learner.in_flight():
                break
            await self.clock.sleep(self.settings.poll_interval)
            learner.take_news()
        missed, failed = self.learner.in_flight(), None
        assert self.node.courier is not None
        if not missed:
            failed = await self.node.courier.bring_newest()
            self.learner.take_news()
        self.learner.settle()
        if failed is not None:
            raise failed
        await self.node.leave(patience=30.0, finish=True)
        return missed

    async def kill(self) -> None:
        """End as SIGKILL does: every task stops where it is and nothing is written."""
        await self.node.abandon()

    def _wake(self) -> None:
        if self.node.courier is not None:
            self.node.courier.woken.set()


async def train_together(nodes: list[SimulatedNode], steps: int) -> None:
    """Join, train and close all nodes at once."""

    async def life(node: SimulatedNode) -> None:
        await node.join()
        await node.train(steps)
        await node.close()

    for result in await asyncio.gather(*(life(node) for node in nodes), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
