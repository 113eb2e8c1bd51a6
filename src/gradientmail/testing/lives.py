"""One node of a plan, through all its processes: it joins, trains, dies, comes back, leaves."""

import asyncio
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

from gradientmail.errors import LearnerReplaced
from gradientmail.events import Event, LearnerLost, RoundCommitted, TaskFailed, TookOver
from gradientmail.exchange.lease_book import kept_seconds
from gradientmail.node import Settings
from gradientmail.testing.plans import PLAIN, Formats, NodePlan, Plan
from gradientmail.testing.recording import RecordingMailbox, Witness
from gradientmail.testing.simulated import SimulatedMailbox, SimulatedStore
from gradientmail.testing.striking import StrikingMailbox, StrikingWork
from gradientmail.testing.vector import Vector, put
from gradientmail.testing.vector_formats import Packed
from gradientmail.testing.virtual_time import VirtualClock
from gradientmail.testing.world import SimulatedNode, Training

SHAPES = {"a.weight": 3, "b.weight": 2, "c.embed": 4}
BUFFERS = {"d.mean": 2, "d.variance": 2}
PAUSE_SECONDS = 30.0
"""How long a node sleeps whose call was struck by a pause."""


def model_of(number: int, formats: Formats = PLAIN) -> Vector:
    """A small model that differs from node to node."""
    buffers = BUFFERS if formats.buffers else {}
    shapes = SHAPES | buffers
    return Vector(
        {name: [number + 0.25 * i for i in range(n)] for name, n in shapes.items()},
        dtypes=dict(zip(shapes, cycle(formats.parameters), strict=False)),
        buffers=buffers,
    )


MOST_A_STEP = 504 / 20_000
"""``drift`` moves no value further in one step."""


def drift(number: int) -> Callable[[object, int], None]:
    """A training that moves a model somewhere else on every node and in every step.

    A value that rounding would take further stays where it is.
    """

    def change(model: object, local_step: int) -> None:
        assert isinstance(model, Vector)
        for place, row in enumerate(model.values.values()):
            moved: list[float] = []
            old = row.tolist()
            for index, value in enumerate(old):
                mixed = (
                    (local_step + 1) * 7919 + number * 104729 + place * 1299709 + index * 15485863
                )
                moved.append(value + (mixed % 1009 - 504) / 20_000)
            if isinstance(row, Packed):
                pairs = zip(old, row.rounded(moved), strict=True)
                moved = [new if abs(new - was) <= MOST_A_STEP else was for was, new in pairs]
            put(row, moved)

    return change


class Life:
    """One name of a plan; its processes follow each other, or overlap when one is a twin."""

    def __init__(
        self, plan: Plan, number: int, store: SimulatedStore, recording: RecordingMailbox
    ) -> None:
        """Nothing runs yet."""
        self.plan = plan
        self.number = number
        self.recording = recording
        self.node: SimulatedNode | None = None
        """The newest process, once it has joined."""
        self._joined = 0
        """Which process that is, from 1."""
        self._views: list[SimulatedMailbox] = []
        self.calls: StrikingMailbox | None = None
        """Of the first process."""
        self.work: StrikingWork | None = None
        """Of the first process."""
        self.healthy_since: float | None = None
        """When the newest process last became able to work; None while it is not."""
        self.peers: Sequence[Life] = ()
        """All lives of the plan."""
        self.fault_free = not plan.faults and not plan.strikes
        self._store = store
        self._clock = VirtualClock(self.own.clock_rate)
        self._tasks: list[asyncio.Task[None]] = []
        self._joining: list[asyncio.Task[None]] = []
        self._processes = 0
        self._training = True
        self._replaced = False
        self._left = 0

    @property
    def own(self) -> NodePlan:
        """Its part of the plan."""
        return self.plan.nodes[self.number]

    def alive(self) -> bool:
        """Whether its newest process runs."""
        return bool(self._tasks) and not self._tasks[-1].done()

    # What the plan does to it

    def start(self) -> None:
        """Start a process; a second one while the first still runs is its twin."""
        if self._processes:
            self._replaced = self._replaced or self.alive()
            self.recording.share(self.own.name)
        self._processes += 1
        self._tasks.append(asyncio.ensure_future(self._live(self._processes)))

    async def crash(self) -> None:
        """End the newest process as by SIGKILL."""
        self.healthy_since = None
        if self._tasks:
            self._tasks[-1].cancel()
            await asyncio.gather(self._tasks[-1], return_exceptions=True)

    def pause(self) -> None:
        """Stop it where it is."""
        self.healthy_since = None
        self._clock.pause()
        for view in self._views:
            view.pause()

    def resume(self) -> None:
        """Let it go on, late."""
        self._clock.resume()
        for view in self._views:
            view.resume()
        self._heal()

    def connect(self, connected: bool) -> None:
        """Cut it off, or let it reach the store again."""
        self.healthy_since = None
        for view in self._views:
            view.connected = connected
        if connected:
            self._heal()

    def _heal(self) -> None:
        if self.alive():
            self.healthy_since = asyncio.get_running_loop().time()

    def spoil(self) -> None:
        """Its parameters become NaN; who is leaving trains no more, and is spared."""
        if self.node is not None and self._left < self._joined:
            model = self.node.training.model
            assert isinstance(model, Vector)
            for row in model.values.values():
                put(row, [math.nan, *row.tolist()[1:]])

    def rest(self) -> None:
        """Train no more, and stay."""
        self._training = False

    async def leave(self) -> None:
        """Close cleanly. A process that has not joined yet ends, as by Ctrl-C.

        It would join only to leave, and end the one that was started after it.
        """
        self._left = self._processes
        for task in self._joining:
            task.cancel()
        if self._tasks:
            await asyncio.wait([self._tasks[-1]])

    # What it does

    async def _live(self, process: int) -> None:
        own, plan = self.own, self.plan
        view = self._store.view(own.connection)
        # Seen by it for so long on its own clock, which the beats need not know of.
        kept = kept_seconds(plan.lease_timeout) / own.clock_rate
        view.inner = Witness(self.recording, own.name, kept - 1e-6)
        self._views.append(view)
        strikes = [one for one in plan.strikes if one.node == self.number and process == 1]
        work = StrikingWork(strikes)
        mailbox = StrikingMailbox(view, strikes, crash=self._struck_down, pause=self._struck_asleep)
        if process == 1:
            self.calls, self.work = mailbox, work
        node = SimulatedNode(
            mailbox=mailbox,
            settings=self._settings(),
            algorithm=plan.algorithm,
            training=Training(
                model_of(self.number, plan.formats),
                drift(self.number),
                step_seconds=own.step_seconds,
                average_buffers=plan.formats.buffers,
            ),
            seed=1000 * plan.seed + 10 * self.number + process,
            clock=self._clock,
            offload=work,
            posted=partial(self.recording.expect, own.name),
        )
        node.announce = partial(self._heard, node)
        try:
            await self._work(node, work, process)
        except asyncio.CancelledError:
            raise
        except LearnerReplaced as error:
            if not self._replaced:
                self.recording.tell("nodes", own.name, repr(error))
        except Exception as error:  # whatever ends a node is to be told
            self.recording.tell("nodes", own.name, repr(error))
        finally:
            if process == self._processes:
                self.healthy_since = None
                self.node = None
            if hasattr(node, "node"):
                await node.kill()

    def _settings(self) -> Settings:
        plan, compressed = self.plan, self.plan.formats.compressed
        return Settings(
            self.own.name,
            plan.poll_interval,
            plan.lease_every,
            plan.lease_timeout,
            compressed=compressed[self.number % len(compressed)],
        )

    async def _work(self, node: SimulatedNode, work: StrikingWork, process: int) -> None:
        if process == self._processes:
            self._heal()
        task = self._tasks[process - 1]
        self._joining.append(task)
        try:
            await node.join()
        finally:
            self._joining.remove(task)
        work.counts = True
        if process == self._processes:
            self.node, self._joined = node, process
        while process > self._left:
            if self._training:
                await node.train(1)
            else:
                await node.clock.sleep(1.0)
                node.learner.take_news()
            self._check_anchors(node)
        missed = await node.close()
        if missed and self.fault_free:
            self.recording.tell("progress", self.own.name, f"left with rounds {missed} in flight")
        self._check_settled(node, missed)

    def _check_settled(self, node: SimulatedNode, missed: tuple[int, ...]) -> None:
        """One that has left holds the versions that it has seen."""
        model = node.training.model
        assert isinstance(model, Vector)
        if missed:
            return
        for version in node.learner.versions:
            for name, committed in version.arrays.items():
                if model.values[name].tolist() != committed.tolist():
                    self.recording.tell("convergence", self.own.name, f"{name} is not committed")

    def _check_anchors(self, node: SimulatedNode) -> None:
        """What it measures its deltas from is what the store holds, or held, to the byte."""
        run, records = self.recording.run, self.recording.records
        assert run is not None
        for fragment, version in enumerate(node.learner.versions):
            if version.number == 0:
                ref = run.manifest.init[fragment]
            else:
                number = (version.number - 1) * len(run.fragments) + fragment
                if number >= len(records):
                    self.recording.tell("anchors", self.own.name, f"version of round {number}")
                    return
                ref = records[number].theta
            found = hashlib.sha256(version.payload.buffer).hexdigest()
            if found != self.recording.plain_sha256(ref):
                self.recording.tell("anchors", self.own.name, f"is not the bytes of {ref.key}")

    def _heard(self, node: SimulatedNode, event: Event) -> None:
        """Check what it says of itself and of others."""
        match event:
            case RoundCommitted(round=number):
                records = self.recording.records
                record = records[number] if number < len(records) else None
                said = [(one.learner, one.steps, one.tokens) for one in event.contributions]
                if record is None or said != [
                    (one.learner, one.steps, one.tokens) for one in record.participants
                ]:
                    self.recording.tell("told", self.own.name, f"did not commit round {number}")
                elif node.node.syncer is not None:
                    held = node.node.syncer._holding._held[event.fragment]
                    if held.theta.ref.key != record.theta.key:
                        self.recording.tell("told", self.own.name, f"lost round {number}")
            case LearnerLost(learner=learner) if self.fault_free and self._beats_in_time():
                self.recording.tell("lives", learner, f"is lost to {self.own.name}")
            case TookOver(previous=str(name), reason="lease") if (
                self.fault_free and self._beats_in_time()
            ):
                if any(
                    one.own.name == name and one.healthy_since is not None for one in self.peers
                ):
                    self.recording.tell("lives", name, f"lost its role to {self.own.name}")
            case TaskFailed(task=task, error=error) if self.fault_free:
                self.recording.tell("nodes", self.own.name, f"{task}: {error}")
            case _:
                pass

    def _beats_in_time(self) -> bool:
        """Whether leases hold here: a renewal takes three calls, which may be slow, or fail."""
        link = self.own.connection
        way = link.latency_seconds + link.jitter_seconds
        return not link.failures and 12 * way < self.plan.lease_timeout

    def _struck_down(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._tasks[0].cancel)
        self.healthy_since = None
        if self._training:  # who dies while all leave stays away
            loop.call_later(1.0, self.start)

    def _struck_asleep(self) -> None:
        self.pause()
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self.resume)
