"""The training half of a node: counts, decides what is due, snapshots, aligns.

Everything here runs on the training thread, does no I/O and knows no event loop. The decisions are
those of ``due``; ``step`` with nothing to do adds two integers and compares two.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.schedule import Schedule
from gradientmail.backend.base import Parameters
from gradientmail.due import NEVER, Standing, due_at, enough_others, next_round
from gradientmail.events import Aligned, ClosingWaits, ParametersNotFinite
from gradientmail.handoff import Arrival, Blank, Handoff, Outgoing, Version

DECAY = 0.1
"""Of the exponential moving average of the time between steps."""
TELL_SECONDS = 5.0
"""Closing says what it waits for when nothing has landed for so long."""


@dataclass(frozen=True, slots=True)
class Counts:
    """A learner's counters, as a checkpoint keeps them; a number for each fragment in tuples."""

    local_step: int
    since_published: int
    """Local steps since the last publish."""
    step_seconds: float
    steps: tuple[int, ...]
    tokens: tuple[int, ...]
    trained: tuple[int, ...]
    """Local steps since the fragment was overwritten; ``steps`` may count some that mixing kept."""


class Learner:
    """The training thread's state. Made and used by that thread alone."""

    def __init__(
        self,
        parameters: Parameters,
        versions: list[Version],
        *,
        learner: str,
        rounds_seen: int,
        algorithm: DiLoCo,
        schedule: Schedule,
        handoff: Handoff,
        make_blank: Callable[[int], Blank],
        now: Callable[[], float] = perf_counter,
    ) -> None:
        """``versions`` are what the model holds, one a fragment; ``now`` tells seconds."""
        fragments = len(versions)
        self._parameters = parameters
        self.versions = versions
        """The commits last aligned with, one a fragment."""
        self._learner = learner
        self._algorithm = algorithm
        self._schedule = schedule
        self._handoff = handoff
        self._make_blank = make_blank
        self._now = now
        self.rounds_seen = rounds_seen
        self.local_step = self.resumed_at = 0
        """Steps so far, and those of them that an earlier session has made."""
        self._tokens = 0
        # Counts of a fragment are differences to these: a step then adds to two numbers only.
        self._base_steps = [0] * fragments
        self._base_tokens = [0] * fragments
        self._overwritten_at = [0] * fragments
        self._last_published = self._furthest = -1
        """The round published last, less when that has to be done again; and the furthest ever."""
        self._published_at = 0
        self._published: deque[tuple[int, int]] = deque(maxlen=algorithm.in_flight)
        self._sending: Outgoing | None = None
        """A snapshot that was made, and perhaps not posted, should Ctrl-C have come between."""
        self._step_seconds = 0.0
        self._entered = 0.0
        self._waited = 0.0
        self._act_at: float = min(2, self._due_at())

    # Every step

    def step(self, samples: int) -> None:
        """Count one optimizer step over ``samples`` samples; align and publish when it is time."""
        entered = self._now()
        since = entered - self._entered
        if self._step_seconds:
            self._step_seconds += DECAY * (since - self._step_seconds)
        elif self._entered:
            self._step_seconds = since
        self._entered = entered
        self._tokens += samples
        self.local_step += 1
        if self.local_step >= self._act_at or self._handoff.news:
            self._act()

    def steps_to_count(self) -> float:
        """Steps, the last one included, until ``step`` does more than count unless news come."""
        return max(self._act_at - self.local_step, 1)

    def _act(self) -> None:
        self._send()
        self.take_news()
        if self.local_step >= self._due_at():
            self._publish(final=False)
        overlap_steps = self._algorithm.overlap_steps
        if overlap_steps is not None:
            self._wait_for_overlap(overlap_steps)
        self._act_at = due = self._due_at()
        if overlap_steps is not None:
            self._act_at = min(due, self._waits_at(overlap_steps))
        self._say_what_matters(due)

    def take_news(self) -> None:
        """Raise what the loop failed with, repair, align with what has arrived."""
        try:
            self._handoff.news = False
            self._take_all(self._handoff)
        except BaseException:  # also Ctrl-C, after which a notebook may train on
            self._handoff.news = True
            raise

    def _take_all(self, handoff: Handoff) -> None:
        if handoff.failure is not None:
            raise handoff.failure
        while handoff.repairs:
            self._repair(*handoff.repairs[0])
            handoff.repairs.popleft()  # only now, should Ctrl-C come between
        while (arrival := next(iter(tuple(handoff.arrivals)), None)) is not None:
            # It stays in the queue until it is in the model, should Ctrl-C come between. Meanwhile
            # the loop may replace it with a newer one, whose turn it is then.
            self._align(arrival)
            with contextlib.suppress(ValueError):
                handoff.arrivals.remove(arrival)

    # Publishing

    def _standing(self) -> Standing:
        return Standing(
            local_step=self.local_step,
            rounds_seen=self.rounds_seen,
            last_published=self._last_published,
            published_at=self._published_at,
            overwritten_at=tuple(self._overwritten_at),
        )

    def _due_at(self) -> float:
        standing = self._standing()
        number, others = self._handoff.others
        closing = number == next_round(standing) and others >= enough_others(
            self._algorithm.quorum_size, self._handoff.live
        )
        return due_at(standing, self._schedule, self._algorithm.in_flight, closing=closing)

    def _publish(self, *, final: bool) -> None:
        number = next_round(self._standing())
        fragment = self._schedule.fragment(number)
        started = perf_counter()
        self._handoff.publishing = number  # before its blank is gone, or another would be made
        blank = self._handoff.blanks.pop(fragment, None) or self._make_blank(fragment)
        ready = self._parameters.capture(blank.arrays)
        self._sending = Outgoing(
            round=number,
            fragment=fragment,
            local_step=self.local_step,
            steps=self.local_step - self._base_steps[fragment],
            tokens=self._tokens - self._base_tokens[fragment],
            rounds_seen=self.rounds_seen,
            step_seconds=self._step_seconds,
            final=final,
            anchor=self.versions[fragment],
            blank=blank,
            ready=ready,
            started=started,
        )
        self._send()

    def _send(self) -> None:
        """Post the snapshot that was made; after an interrupt perhaps again, which is noticed."""
        outgoing = self._sending
        if outgoing is None:
            return
        pair = (outgoing.round, outgoing.local_step)
        if pair not in self._published:
            self._published.append(pair)
        self._last_published, self._published_at = pair
        self._furthest = max(self._furthest, self._last_published)
        self._handoff.post(outgoing)
        self._sending = None

    def _say_what_matters(self, due: float) -> None:
        """Tell the loop which round is due next, and in how many seconds if steps come as before.

        Others' snapshots in it could make it due earlier.
        """
        self._handoff.step_seconds = self._step_seconds
        standing = self._standing()
        number = next_round(standing)
        steps = due - max(
            self.local_step, standing.overwritten_at[self._schedule.fragment(number)] + 1
        )
        wanted = number if math.isfinite(steps) else None
        self._handoff.due_seconds = steps * self._step_seconds if wanted is not None else 0.0
        if self._handoff.waits_for != wanted:
            self._handoff.waits_for = wanted
            self._handoff.wake()

    # Aligning

    def _align(self, arrival: Arrival) -> None:
        record, mixing = arrival.record, self._algorithm.mixing
        fragment = record.fragment
        mine = next((part for part in record.participants if part.learner == self._learner), None)
        if arrival.version is None:  # passed over; what it holds of this learner is counted
            self._base_steps[fragment] += mine.steps if mine else 0
            self._base_tokens[fragment] += mine.tokens if mine else 0
            self.rounds_seen = max(self.rounds_seen, record.round)
            return
        self._parameters.apply(arrival.staged, mixing=mixing)
        self.versions[fragment] = arrival.version
        steps = self.local_step - self._base_steps[fragment]
        tokens = self._tokens - self._base_tokens[fragment]
        left_steps = max(steps - (mine.steps if mine else 0), 0)
        left_tokens = max(tokens - (mine.tokens if mine else 0), 0)
        self._base_steps[fragment] = self.local_step - math.floor(mixing * left_steps)
        self._base_tokens[fragment] = self._tokens - math.floor(mixing * left_tokens)
        self._overwritten_at[fragment] = self.local_step
        self.rounds_seen = max(self.rounds_seen, record.round)  # what is hard to read comes late
        self._handoff.announce(
            Aligned(
                round=record.round,
                fragment=fragment,
                version=record.version,
                steps_replaced=left_steps,
                waited_seconds=self._waited,
            )
        )

    def _repair(self, number: int, found: tuple[str, ...]) -> None:
        """Put every fragment that is not finite back to its anchor, all at once.

        One alone would be undone by the next backward pass, which mixes all parameters. ``found``
        are names of tensors whose parameters or delta were not finite. The round is published again
        if it is still open then: one that nobody contributed to would stay open for good. A round
        published before an earlier repair tells of what that one has mended. Without ``found`` its
        snapshot was lost, and the next one is due at once.
        """
        fresh = any(number == published for published, _ in self._published)
        sick = set(self._parameters.not_finite())
        bad = sick | (set(found) if fresh else set())
        for fragment, version in enumerate(self.versions):
            if bad & version.arrays.keys():
                self._parameters.apply(self._parameters.stage(version.arrays))
                self._base_steps[fragment] = self.local_step
                self._base_tokens[fragment] = self._tokens
                self._overwritten_at[fragment] = self.local_step
        self._last_published = self._handoff.publishing = min(self._last_published, number - 1)
        for pair in [pair for pair in self._published if pair[0] >= number]:
            self._published.remove(pair)
            if not found:
                self._published_at = min(self._published_at, pair[1] - self._schedule.gap(pair[0]))
        if bad:
            # At once: an optimizer state that is sick, too, has to be reset before the next step.
            tensors, beyond = tuple(sorted(bad)), tuple(sorted(bad - sick))
            event = ParametersNotFinite(tensors=tensors, round=number, beyond=beyond)
            self._handoff.announce_in_step(event)

    # Stopping and going on later

    def counts(self) -> Counts:
        """The counters now."""
        return Counts(
            local_step=self.local_step,
            since_published=self.local_step - self._published_at,
            step_seconds=self._step_seconds,
            steps=tuple(self.local_step - base for base in self._base_steps),
            tokens=tuple(self._tokens - base for base in self._base_tokens),
            trained=tuple(self.local_step - at for at in self._overwritten_at),
        )

    def resume(self, counts: Counts) -> None:
        """Go on with ``counts``, before the first step.

        What was in flight is not: it may never have left. The next round is the one after the
        commits; its snapshot, if it did leave, is found then and counts.
        """
        self.local_step = self.resumed_at = counts.local_step
        self._published_at = counts.local_step - counts.since_published
        self._tokens = max(counts.tokens, default=0)
        self._base_steps = [counts.local_step - steps for steps in counts.steps]
        self._base_tokens = [self._tokens - tokens for tokens in counts.tokens]
        self._overwritten_at = [counts.local_step - trained for trained in counts.trained]
        self._step_seconds, self._entered = counts.step_seconds, self._now()
        self._act_at = 0

    # Waiting

    def _waits_at(self, overlap_steps: int) -> float:
        """The local step from which on ``step`` waits for a commit; infinity for none in flight."""
        sent = (at for number, at in self._published if number > self.rounds_seen)
        return min(sent, default=NEVER) + overlap_steps

    def is_ahead(self, overlap_steps: int) -> bool:
        """Whether a round published so many steps ago, or more, is not aligned with yet."""
        return self.local_step >= self._waits_at(overlap_steps)

    def _wait_for_overlap(self, overlap_steps: int) -> None:
        """Wait while a round published ``overlap_steps`` or more steps ago is not aligned with."""
        try:
            while self.is_ahead(overlap_steps):
                began = self._now()
                self._handoff.wait(1.0)
                self._waited += self._now() - began
                self.take_news()
        finally:  # Ctrl-C may end the wait, too; and what it counted must never count twice
            waited, self._waited = self._waited, 0.0
            self._entered += waited  # the time between steps does not count waiting in one

    # Leaving

    def in_flight(self) -> tuple[int, ...]:
        """The rounds that this learner published and that are not aligned with yet."""
        return tuple(number for number, _ in self._published if number > self.rounds_seen)

    def leave(self, patience: Callable[[], float]) -> tuple[int, ...]:
        """Publish final snapshots if the algorithm says so, and wait for all that is in flight.

        Stops when nothing has landed for ``patience()`` seconds; returns the rounds given up.
        """
        self._send()
        landed, seen = monotonic(), self.rounds_seen
        flush, last = self._algorithm.flush_on_close, self._furthest
        remaining, finals = len(self.versions) if flush else 0, set[int]()
        told = False
        while True:
            again = {number for number in finals if number > self._last_published}
            remaining, finals = remaining + len(again), finals - again  # their snapshots were lost
            while (
                remaining or next_round(self._standing()) <= last
            ) and self.local_step >= self._final_due():
                self._publish(final=flush)
                if flush:
                    remaining = max(remaining - 1, 0)
                    finals.add(self._last_published)
            if not self.in_flight():
                return ()
            self._handoff.wait(0.5)
            self.take_news()
            if self.rounds_seen != seen:
                landed, seen = monotonic(), self.rounds_seen
            waited, missing = monotonic() - landed, self.in_flight()
            if waited > patience():
                return missing
            if waited > TELL_SECONDS and missing and not told:
                told = True
                self._handoff.announce(ClosingWaits(rounds=missing, at_most_seconds=patience()))

    def _final_due(self) -> float:
        standing = self._standing()
        return due_at(standing, self._schedule, self._algorithm.in_flight, closing=True)

    def let_go(self) -> None:
        """Hold no memory any more; nothing but ``rounds_seen`` and the counts is of use then.

        On its own thread: elsewhere a step may be under way that needs them.
        """
        self.versions = list[Version]()
        self._sending = None

    def settle(self) -> None:
        """Set the model to the newest committed version that this node holds of each fragment."""
        for version in self.versions:
            self._parameters.apply(self._parameters.stage(version.arrays))
