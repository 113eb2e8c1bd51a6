"""Runs the plan of a simulated world and checks every invariant, at each step and at the end.

``python -m gradientmail.testing.schedules --count 10000`` runs the plans of so many seeds; a seed
that fails is printed as the line that runs it again. Some payloads are compressed: zstandard has
to be installed.
"""

import argparse
import asyncio
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from gradientmail.algorithm.schedule import Schedule
from gradientmail.exchange.compression import require_zstandard
from gradientmail.exchange.lease_book import kept_seconds
from gradientmail.testing.lives import BUFFERS, MOST_A_STEP, Life
from gradientmail.testing.plans import Fault, NodePlan, Plan, long_plan, random_plan
from gradientmail.testing.recording import RecordingMailbox
from gradientmail.testing.simulated import SimulatedStore
from gradientmail.testing.striking import vandalism
from gradientmail.testing.vector import VectorBackend
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.verification import Violation

LIMIT_SECONDS = 20_000.0
CALM_SECONDS = 12.0
"""Nothing more is committed by nodes that do not train and have had nothing to do for so long."""
RETRY_SECONDS = 60.0
"""Two of the longest pauses between tries: one ends, and the try after it fails too."""
CALL_BYTES = 500
"""What a call moves, on average: records have some 700 bytes, most answers none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a world."""

    rounds: int
    operations: int
    """Writes and deletes that took effect."""
    calls: tuple[int, ...]
    """By node, calls of its first process, repeated looks left out."""
    work: tuple[int, ...]
    """By node, what its first process had other threads do once it had joined."""
    most_objects: int
    most_beats: int
    """The most that there were at one time, of all learners, the dead included."""
    history: str
    """A hash of all writes and deletes with their times: equal for equal plans."""
    violations: tuple[Violation, ...]


class Simulation:
    """One run of one plan."""

    def __init__(self, plan: Plan) -> None:
        """Nothing runs yet; call ``run`` under virtual time."""
        self.plan = plan
        self.store = SimulatedStore(seed=plan.seed)
        self.recording = RecordingMailbox(
            backend=VectorBackend(),
            now=self._now,
            most_a_step=MOST_A_STEP,
            averaged=BUFFERS if plan.formats.buffers else (),
        )
        self.store.mailbox = self.recording
        self.lives = [
            Life(plan, number, self.store, self.recording) for number in range(len(plan.nodes))
        ]
        for life in self.lives:
            life.peers = self.lives
        self._random = Random(f"vandal {plan.seed}")
        self._planted_bytes = 0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def run(self) -> Outcome:
        """Faults, calm, quiet, the end, and a node that finds what they left."""
        watching = asyncio.ensure_future(self._watch_progress())
        happening = [asyncio.ensure_future(self._join(life)) for life in self.lives]
        happening += [asyncio.ensure_future(self._strike(fault)) for fault in self.plan.faults]
        await asyncio.sleep(self.plan.seconds)
        for result in await asyncio.gather(*happening, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        if not any(life.alive() for life in self.lives):
            self.lives[0].start()
        if await self._next_commits(len(self.recording.records) + 2):
            self._check_old_beats()
            await self._quieten()
            await self._tidy()
        watching.cancel()
        for life in self.lives:
            await life.crash()
        return self._outcome()

    def _outcome(self) -> Outcome:
        recording = self.recording
        return Outcome(
            rounds=len(recording.records),
            operations=recording.operations,
            calls=tuple(life.calls.count if life.calls else 0 for life in self.lives),
            work=tuple(life.work.count if life.work else 0 for life in self.lives),
            most_objects=recording.most_objects,
            most_beats=recording.most_beats,
            history=recording.history,
            violations=tuple(recording.violations),
        )

    # What happens

    async def _join(self, life: Life) -> None:
        await asyncio.sleep(life.own.joins_at)
        life.start()

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_seconds)
        life = self.lives[fault.node]
        match fault.kind:
            case "crash" | "leave":
                await (life.crash() if fault.kind == "crash" else self._leave(life))
                await asyncio.sleep(fault.seconds)
                if fault.again and not life.alive():
                    life.start()
            case "pause":
                life.pause()
                await asyncio.sleep(fault.seconds)
                life.resume()
            case "partition" | "outage":
                cut = [life] if fault.kind == "partition" else self.lives
                for one in cut:
                    one.connect(connected=False)
                await asyncio.sleep(fault.seconds)
                for one in cut:
                    one.connect(connected=True)
            case "twin":
                if life.alive():
                    life.start()
            case "vandal":
                if self.recording.run is not None:
                    number = len(self.recording.records)
                    for key, data in vandalism(self.recording.run, number, self._random).items():
                        self.recording.plant(key, data)
                        self._planted_bytes += len(data)
            case "not_finite":
                life.spoil()

    async def _leave(self, life: Life) -> None:
        """It may be stopped or cut off while it leaves, and die of another fault."""
        await life.leave()

    # What must follow

    def bound_seconds(self) -> float:
        """How long a round takes at most while one node and the store live.

        That node makes some calls, and trains until its next snapshot is due; whoever died is
        waited for as long as his lease is trusted, which may begin anew when he is met for the
        first time; the closer's role is taken over; a call that failed is repeated after the
        longest pause; what a vandal has planted in the round is read twice, perhaps slowly. A delta
        that is not finite counts nothing: what was in flight then, ``in_flight`` snapshots at most,
        is trained for again.
        """
        plan, recording = self.plan, self.recording
        fragments = len(recording.run.fragments) if recording.run is not None else 1
        schedule = Schedule(plan.algorithm.sync_every, fragments)
        gap = max(schedule.gap(number) for number in range(fragments))
        step = max(one.step_seconds / one.clock_rate for one in plan.nodes)
        slow = min(one.clock_rate for one in plan.nodes)
        takeover = 30 * plan.poll_interval
        if recording.records:
            known = recording.records[-1].estimates
            timings = (known.step, known.quorum, known.sync)
            takeover = max(takeover, 3 * sum(value or 0.0 for value in timings))
        links = [one.connection for one in plan.nodes]
        calls = 41 * max(
            one.latency_seconds + one.jitter_seconds + CALL_BYTES / one.bytes_per_second
            for one in links
        )
        waits = 10 * plan.poll_interval + calls
        twins = any(fault.kind == "twin" for fault in plan.faults)
        if twins or len(plan.nodes) > 1:  # one alone finds its own claim again
            waits += 2 * plan.lease_timeout + takeover
        repairs = sum(fault.kind == "not_finite" for fault in plan.faults)
        waits += 2 * self._planted_bytes / min(one.bytes_per_second for one in links)
        training = (gap + 1 + gap * plan.algorithm.in_flight * repairs) * step
        return training + waits / slow + (RETRY_SECONDS if self._may_fail() else 0.0)

    def _may_fail(self) -> bool:
        """Whether calls of a node may fail, and wait for their next try."""
        plan = self.plan
        cut = any(fault.kind in ("partition", "outage", "pause") for fault in plan.faults)
        return cut or bool(plan.strikes) or any(one.connection.failures for one in plan.nodes)

    async def _watch_progress(self) -> None:
        told = -1
        while True:
            await asyncio.sleep(1.0)
            healthy = [one.healthy_since for one in self.lives if one.healthy_since is not None]
            resting = not all(life._training for life in self.lives)
            since = max(min(healthy, default=self._now()), self.recording.committed_at)
            late = self._now() - since > self.bound_seconds()
            if late and not resting and told != len(self.recording.records):
                told = len(self.recording.records)
                self.recording.tell(
                    "progress", f"round {told}", f"not committed for {self._now() - since:.0f} s"
                )

    async def _next_commits(self, goal: int) -> bool:
        """Wait for commits, as long as they may take; whether they have come."""
        while (number := len(self.recording.records)) < goal:
            ends = self._now() + self.bound_seconds() + 5.0
            while len(self.recording.records) == number:
                if self._now() > ends:
                    self.recording.tell("progress", f"round {number}", "never committed")
                    return False
                await asyncio.sleep(0.5)
        return True

    def _check_old_beats(self) -> None:
        """A closer that has listened for long has swept the beats of those who died long ago."""
        newest = len(self.recording.records) - 1
        for life in self.lives:
            syncer = life.node.node.syncer if life.node is not None else None
            closed = syncer._committed if syncer is not None else None
            if closed is None or closed[0] != newest or life.healthy_since is None:
                continue
            # Noticed by its own clock, in listings a few of its rounds apart.
            long = self._now() - 1.5 * kept_seconds(self.plan.lease_timeout)
            for key in self.recording.beats_before(long) if life.healthy_since < long else ():
                self.recording.tell("leases", key, "its learner died long ago")

    async def _quieten(self) -> None:
        """All stop training; they must come to hold the newest versions, and leave."""
        for life in self.lives:
            life.rest()
        began = calm = self._now()
        while True:
            behind, now = self._behind(), self._now()
            if behind or self.recording.committed_at > calm:
                calm = now
            late = now - max(began, self.recording.committed_at) > self.bound_seconds()
            if late or now - calm >= CALM_SECONDS:
                break
            await asyncio.sleep(1.0)
        for name, seen in behind.items():
            newest = len(self.recording.records) - 1
            self.recording.tell("convergence", name, f"holds round {seen}, not {newest}")
        await asyncio.gather(*(life.leave() for life in self.lives))

    def _behind(self) -> dict[str, int]:
        """The live nodes that do not hold all that is committed, and what they hold."""
        newest = len(self.recording.records) - 1
        seen = {one.own.name: one.node.learner.rounds_seen for one in self.lives if one.node}
        return {name: number for name, number in seen.items() if number != newest}

    async def _tidy(self) -> None:
        """One node that closes 4·P rounds and leaves finds all that the others left behind."""
        run = self.recording.run
        assert run is not None
        alone = NodePlan("tidy", step_seconds=0.5)
        plan = Plan(
            self.plan.algorithm,
            (alone,),
            seed=self.plan.seed,
            poll_interval=self.plan.poll_interval,
            lease_every=self.plan.lease_every,
            lease_timeout=self.plan.lease_timeout,
            formats=self.plan.formats,
        )
        life = Life(plan, 0, self.store, self.recording)
        life.fault_free = False  # vandals' objects are still there
        self.lives.append(life)
        life.start()
        if await self._next_commits(len(self.recording.records) + 4 * len(run.fragments) + 1):
            await life.leave()
            for key in self.recording.leftovers():
                self.recording.tell("tidy", key, "is left")


def simulate(plan: Plan) -> Outcome:
    """Run a plan to its end. The same plan gives the same outcome, ``history`` included."""
    # What the collector frees, and when, must not depend on what ran before.
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return run_virtual(Simulation(plan).run, limit_seconds=LIMIT_SECONDS)
    finally:
        if enabled:
            gc.enable()


def main(
    arguments: Sequence[str] | None = None, say: Callable[[str], object] = sys.stdout.write
) -> int:
    """Run the plans of many seeds; 1 when one of them fails. ``MissingExtra`` without zstandard."""
    parser = argparse.ArgumentParser(
        prog="python -m gradientmail.testing.schedules", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many seeds")
    parser.add_argument(
        "--long", action="store_true", help="hours of learners that die, and that sleep for long"
    )
    chosen = parser.parse_args(arguments)
    if not chosen.long:
        require_zstandard()
    plan_of, option = (long_plan, "--long ") if chosen.long else (random_plan, "")
    failed = rounds = operations = 0
    for seed in range(chosen.first, chosen.first + chosen.count):
        try:
            outcome = simulate(plan_of(seed))
        except Exception as error:
            found, rounds_here = [repr(error)], 0
        else:
            found, rounds_here = [str(one) for one in outcome.violations], outcome.rounds
            operations += outcome.operations
        rounds += rounds_here
        if found:
            failed += 1
            again = f"python -m gradientmail.testing.schedules {option}--first {seed} --count 1"
            say(f"{again}  # {found[0]}\n")
    say(
        f"{chosen.count} schedules, {rounds} rounds, {operations} writes and deletes, "
        f"{failed} schedules failed\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
