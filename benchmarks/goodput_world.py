"""Learners that fail and return, in the simulated world: the protocol's own code, virtual time.

Training is a pause and a nudge of a few numbers. What a payload of the real size would take is
charged to the node's link, one transfer at a time each way: the bytes of a tensor here stand for
``scale`` of the real run. Everything else (polls, records, claims, leases, elections, takeovers,
joins, sweeps, waits) is what the nodes really do.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Buffer, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, override

import ml_dtypes
import numpy as np

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.events import Aligned, Event
from gradientmail.exchange.records import RoundRecord
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.node import Settings
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import SimulatedNode, Training

ELEMENTS = 64
"""Elements of the one tensor that each fragment has here."""
SAMPLES = 8
HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One run to simulate. Times in seconds, rates in bytes a second."""

    learners: int
    algorithm: DiLoCo
    step_seconds: float
    between_failures: float
    """Mean time between the failures of one learner; infinity for none."""
    down_seconds: float
    keeps_state: bool
    """Whether a learner that failed goes on where it was, as one that rebuilds itself does."""
    duration: float
    poll_interval: float = 1.0
    parameters: float = 1e9
    bytes_per_second: float = math.inf
    cpu_bytes_per_second: float = 1e9
    """Hashing and merging, of every payload byte."""
    latency_seconds: float = 0.03
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """What happened in a run."""

    steps: int = 0
    joins: int = 0
    failures: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    sent: float = 0.0
    """Bytes of payloads, as large as the real ones."""
    received: float = 0.0
    replaced: list[int] = field(default_factory=list)
    """Local steps that an alignment overwrote, in rounds that the learner contributed to."""


class Link(WrappedMailbox):
    """A node's connection: latency for every call, payloads one after the other each way."""

    def __init__(self, inner: Mailbox, case: Case, scale: float, tally: Tally) -> None:
        super().__init__(inner)
        self._case = case
        self._scale = scale
        self._tally = tally
        self._free = {"put_if_absent": 0.0, "get": 0.0}

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        self._tally.calls["put"] += 1
        nbytes = self._real_size(key, data)
        self._tally.sent += nbytes
        await self._carry("put_if_absent", nbytes)
        return await self.inner.put_if_absent(key, data)

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        self._tally.calls[call.operation] += 1
        await asyncio.sleep(self._case.latency_seconds)
        result: Any = await act()
        if call.operation == "get" and result is not None:
            nbytes = self._real_size(call.key, result)
            self._tally.received += nbytes
            await self._carry("get", nbytes)
        return result

    def _real_size(self, key: str, data: Buffer) -> float:
        if not key.startswith("blobs/"):
            return 0.0
        view = memoryview(data)
        header = HEADER_BYTES + int.from_bytes(view[:HEADER_BYTES], "little")
        return (view.nbytes - header) * self._scale

    async def _carry(self, way: str, nbytes: float) -> None:
        now = asyncio.get_running_loop().time()
        case = self._case
        took = nbytes / case.bytes_per_second + nbytes / case.cpu_bytes_per_second
        self._free[way] = max(self._free[way], now) + took
        await asyncio.sleep(self._free[way] - now + case.latency_seconds * (way != "get"))


def failures(case: Case, random: Random) -> list[list[float]]:
    """When each learner fails, in seconds of its up time.

    Exponential gaps, drawn in strata over all learners, so that a short run has the mean rate.
    """
    if math.isinf(case.between_failures):
        return [[] for _ in range(case.learners)]
    each = math.ceil(2 * case.duration / case.between_failures) + 2
    count = each * case.learners
    gaps = [-case.between_failures * math.log1p(-(i + 0.5) / count) for i in range(count)]
    random.shuffle(gaps)
    return [gaps[one * each : (one + 1) * each] for one in range(case.learners)]


class World:
    """One case under way."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tally = Tally()
        self.mailbox = MemoryMailbox()
        self._count = 0
        tensors = case.algorithm.fragments
        self.scale = case.parameters / (tensors * ELEMENTS)

    async def run(self) -> "Result":
        """Let all learners live to the end; what came of it."""
        plans = failures(self.case, Random(self.case.seed))
        lives = [
            asyncio.ensure_future(self._live(f"n{number:02d}", plan))
            for number, plan in enumerate(plans)
        ]
        await asyncio.sleep(self.case.duration)
        for life in lives:
            life.cancel()
        for result in await asyncio.gather(*lives, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return Result(self.case, self.tally, await self._records())

    async def _records(self) -> list[RoundRecord]:
        found = []
        for key in await self.mailbox.list("rounds/"):
            data = await self.mailbox.get(key)
            if data is not None:
                found.append(RoundRecord.from_bytes(data))
        return found

    async def _live(self, name: str, gaps: list[float]) -> None:
        """Train, fail, stay down, come back, over and over."""
        node: SimulatedNode | None = None
        loop = asyncio.get_running_loop()
        try:
            for gap in [*gaps, math.inf]:
                try:
                    async with asyncio.timeout_at(loop.time() + gap if gap < math.inf else None):
                        if node is None:
                            node = self._node(name)
                            await node.join()
                            self.tally.joins += 1
                        while True:
                            await node.train(1)
                except TimeoutError:
                    self.tally.failures += 1
                if node is not None and not (self.case.keeps_state and hasattr(node, "learner")):
                    await _die(node)
                    node = None
                await asyncio.sleep(self.case.down_seconds)
        finally:
            if node is not None:
                await _die(node)

    def _node(self, name: str) -> SimulatedNode:
        case = self.case
        self._count += 1
        link = Link(self.mailbox, case, self.scale, self.tally)
        node = SimulatedNode(
            mailbox=link,
            settings=Settings(name, poll_interval=case.poll_interval),
            algorithm=case.algorithm,
            training=Training(
                model=self._model(),
                change=self._change,
                step_seconds=case.step_seconds,
                samples=SAMPLES,
            ),
            seed=1000 * case.seed + self._count,
        )
        node.events = Aligning(self.tally.replaced)
        return node

    def _model(self) -> dict[str, np.ndarray]:
        return {
            f"t{number:02d}": np.zeros(ELEMENTS, ml_dtypes.bfloat16)
            for number in range(self.case.algorithm.fragments)
        }

    def _change(self, model: object, local_step: int) -> None:
        assert isinstance(model, dict)
        for array in model.values():
            array[local_step % ELEMENTS] += 0.5
        self.tally.steps += 1


async def _die(node: SimulatedNode) -> None:
    if hasattr(node, "node"):  # else it had not begun to join
        await node.kill()


class Aligning(list[Event]):
    """Keeps no events but what alignments overwrote."""

    def __init__(self, replaced: list[int]) -> None:
        super().__init__()
        self._replaced = replaced

    @override
    def append(self, event: Event, /) -> None:
        if isinstance(event, Aligned):
            self._replaced.append(event.steps_replaced)


@dataclass(frozen=True, slots=True)
class Result:
    """What a case gave."""

    case: Case
    tally: Tally
    records: list[RoundRecord]

    @property
    def possible(self) -> float:
        """Steps that all learners could have taken."""
        return self.case.learners * self.case.duration / self.case.step_seconds

    @property
    def trained(self) -> float:
        """Part of the possible steps that were taken: chips that did something useful."""
        return self.tally.steps / self.possible

    @property
    def merged(self) -> float:
        """Part of the possible samples that a commit took in, over all fragments."""
        tokens = sum(part.tokens for record in self.records for part in record.participants)
        return tokens / self.case.algorithm.fragments / (self.possible * SAMPLES)

    @property
    def round_seconds(self) -> float:
        """Mean time from one commit to the next."""
        return self.case.duration / max(len(self.records), 1)

    @property
    def stale_steps(self) -> float:
        """Mean local steps between a snapshot and its commit's arrival, which it overwrites."""
        replaced = self.tally.replaced
        return sum(replaced) / len(replaced) if replaced else math.nan


def simulate(case: Case) -> Result:
    """Run a case to its end."""
    return run_virtual(lambda: World(case).run())
