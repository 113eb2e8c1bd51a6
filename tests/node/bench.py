"""A learner over a handoff that the test itself works."""

from collections.abc import Mapping
from dataclasses import replace

from tests.node.history import record
from tests.node.worlds import Tiny

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.schedule import Schedule
from gradientmail.backend import backend_for
from gradientmail.buffers import BufferPool
from gradientmail.exchange.records import Participant, Ref
from gradientmail.exchange.sealing import Payload
from gradientmail.handoff import Arrival, Blank, Handoff, Version
from gradientmail.learner import Learner
from gradientmail.node import planned
from gradientmail.run import arrays_over


class Bench:
    """A learner over a handoff that the test itself works."""

    def __init__(self, algorithm: DiLoCo, seconds: list[float] | None = None) -> None:
        self.model = Tiny()
        self.backend = backend_for(self.model)
        self.parameters = self.backend.bind(self.model)
        self.pool = BufferPool()
        self.algorithm = algorithm
        self.fragments = planned(self.parameters.schema, algorithm)
        self.schedule = Schedule(algorithm.sync_every, len(self.fragments))
        self.woken = 0
        self.handoff = Handoff(wake=self._wake)
        self.seconds = iter(seconds) if seconds else None
        self.now = 0.0
        self.learner = Learner(
            self.parameters,
            [self.version(p, 0, 0.0) for p in range(len(self.fragments))],
            learner="me",
            rounds_seen=-1,
            algorithm=algorithm,
            schedule=self.schedule,
            handoff=self.handoff,
            make_blank=self.blank,
            now=lambda: next(self.seconds) if self.seconds else self.now,
        )

    def _wake(self) -> None:
        self.woken += 1

    def blank(self, fragment: int) -> Blank:
        theta = self.fragments[fragment].theta
        buffer = theta.blank(self.pool.take)
        return Blank(buffer, arrays_over(self.backend, buffer, theta))

    def version(self, fragment: int, number: int, value: float) -> Version:
        blank = self.blank(fragment)
        for array in blank.arrays.values():
            array.fill_(value)
        kind = "rounds" if number else "init"
        index = f"{(number - 1) * len(self.fragments) + fragment:010d}" if number else "000"
        digest = f"{number:064x}"
        ref = Ref(f"blobs/{kind}/{index}/{digest}.safetensors", digest, blank.buffer.nbytes)
        payload = Payload(ref, blank.buffer, self.fragments[fragment].theta.slots)
        return Version(number, payload, blank.arrays)

    def arrive(self, number: int, value: float, took: Mapping[str, tuple[int, int]]) -> None:
        """A commit that sets all of its fragment to ``value``."""
        p, version_number = self.schedule.fragment(number), self.schedule.version(number)
        version = self.version(p, version_number, value)
        ref = version.payload.ref
        commit = replace(
            record(number),
            step=self.schedule.due_step(number),
            fragment=p,
            version=version_number,
            participants=tuple(
                Participant(name, 1, steps, tokens, tokens**2 / steps)
                for name, (steps, tokens) in sorted(took.items())
            ),
            theta=ref,
            outer=ref,
        )
        self.handoff.arrivals.append(Arrival(commit, version, version.arrays))
        self.handoff.tell()

    def steps(self, count: int, samples: int = 4) -> None:
        for _ in range(count):
            self.learner.step(samples)

    def sent(self) -> list[tuple[int, int, int, int]]:
        """Round, local step, steps and tokens of what was published since the last look."""
        found = [(o.round, o.local_step, o.steps, o.tokens) for o in self.handoff.outbox]
        self.handoff.outbox.clear()
        return found
