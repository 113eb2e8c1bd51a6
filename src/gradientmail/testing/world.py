"""A world of nodes in one thread, under virtual time, over one simulated store.

Each node is the real loop half (courier, syncer, watch, lease) and the real learner; only the
threads and the training are simulated: a step is a pause on the node's clock and a change of a
small model. The same seed gives the same history.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.backend import backend_for
from gradientmail.buffers import BufferPool
from gradientmail.clock import inline
from gradientmail.events import Event
from gradientmail.handoff import Handoff
from gradientmail.learner import Learner
from gradientmail.mailbox.base import Mailbox
from gradientmail.node import Node, Settings, planned
from gradientmail.run import arrays_over
from gradientmail.testing.virtual_time import VirtualClock


@dataclass(frozen=True, slots=True)
class Training:
    """How a simulated node trains."""

    model: object
    """What a session takes."""
    change: Callable[[object, int], None]
    """``change(model, local_step)``: one optimizer step."""
    step_seconds: float = 1.0
    samples: int = 8


@dataclass(slots=True)
class SimulatedNode:
    """One node of a world. ``join`` first, then ``train``, then ``close`` or ``kill``."""

    mailbox: Mailbox
    settings: Settings
    algorithm: DiLoCo
    training: Training
    seed: int = 0
    clock: VirtualClock = field(default_factory=VirtualClock)
    events: list[Event] = field(default_factory=list)
    node: Node = field(init=False)
    handoff: Handoff = field(init=False)
    learner: Learner = field(init=False)

    async def join(self) -> None:
        """As constructing a session does; raises what that raises."""
        backend = backend_for(self.training.model)
        parameters = backend.bind(self.training.model)
        pool = BufferPool()
        self.handoff = Handoff(wake=self._wake)
        self.node = Node(
            self.mailbox,
            self.settings,
            self.handoff,
            clock=self.clock,
            random=Random(self.seed),
            offload=inline,
            take=pool.take,
            announce=self.events.append,
        )
        schema = parameters.schema
        fragments = planned(schema, self.algorithm)
        manifest = await self.node.find(max(one.theta.nbytes for one in fragments))
        if manifest is None:
            buffers = [one.theta.blank(pool.take) for one in fragments]
            for one, buffer in zip(fragments, buffers, strict=True):
                parameters.capture(arrays_over(backend, buffer, one.theta))()
            manifest = await self.node.create(schema, self.algorithm, buffers)
        run, versions = await self.node.enter(manifest, schema, self.algorithm, backend)
        for version in versions:
            parameters.apply(parameters.stage(version.arrays))
        seen = self.node.rounds_seen
        courier = self.node.start(
            run, versions, parameters=parameters, backend=backend, merging=backend
        )
        self.learner = Learner(
            parameters,
            versions,
            learner=self.settings.learner,
            rounds_seen=seen,
            algorithm=self.algorithm,
            schedule=run.schedule,
            handoff=self.handoff,
            make_blank=courier.make_blank,
            poll_interval=self.settings.poll_interval,
            now=self.clock.now,
        )

    async def train(self, steps: int) -> None:
        """Take so many steps, each ``step_seconds`` on this node's clock."""
        for _ in range(steps):
            await self.clock.sleep(self.training.step_seconds)
            self.training.change(self.training.model, self.learner.local_step)
            self.learner.step(self.training.samples)

    async def close(self, *, patience: float = 600.0) -> tuple[int, ...]:
        """Leave as a clean exit does; the rounds in flight that did not commit in time."""
        ends = self.clock.now() + patience
        while self.learner.in_flight() and self.clock.now() < ends:
            await self.clock.sleep(self.settings.poll_interval)
            self.learner.take_news()
        missed = self.learner.in_flight()
        assert self.node.courier is not None
        if not missed:
            await self.node.courier.bring_newest()
            self.learner.take_news()
        self.learner.settle()
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
