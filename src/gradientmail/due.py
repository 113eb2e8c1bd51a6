"""When a learner publishes which round: pure functions over where it stands."""

import math
from dataclasses import dataclass

from gradientmail.algorithm.schedule import Schedule

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Standing:
    """What the decision to publish depends on."""

    local_step: int
    rounds_seen: int
    last_published: int
    published_at: int
    """``local_step`` at the last publish."""
    overwritten_at: tuple[int, ...]
    """By fragment, ``local_step`` when it was last overwritten."""


def next_round(standing: Standing) -> int:
    """The next round this learner can publish."""
    return max(standing.last_published, standing.rounds_seen) + 1


def due_at(standing: Standing, schedule: Schedule, in_flight: int, *, closing: bool) -> float:
    """The local step at which the next round is due, infinity while it waits for a commit.

    ``closing`` says that the round is about to close without this learner, which makes it due as
    soon as its fragment has been trained for a step. A model of few tensors has fewer
    fragments than were asked for, and one fragment cannot be in flight twice: the second snapshot
    would start from a version that the first replaces.
    """
    number = next_round(standing)
    if number > standing.rounds_seen + min(in_flight, schedule.fragments):
        return NEVER
    trained = standing.overwritten_at[schedule.fragment(number)] + 1
    if closing:
        return trained
    return max(standing.published_at + schedule.gap(number), trained)


def enough_others(quorum_size: int, live: int) -> int:
    """So many others' snapshots in a round say that it is about to close."""
    return max(min(quorum_size, live) - 1, 1)
