"""How long things take in a run, as its records tell, and how long a round stays open for it."""

from collections.abc import Sequence

from gradientmail.exchange.records import Estimates

DECAY = 0.1

RECENT = 3
"""Rounds after which what none of them took is no longer expected, whatever the average says."""


def moving_average(old: float | None, value: float | None) -> float | None:
    """Exponential, decay 0.1, the first value as it is; unknown values change nothing."""
    if value is None:
        return old
    return value if old is None else (1 - DECAY) * old + DECAY * value


def outlived(average: float | None, recent: Sequence[float]) -> float | None:
    """An average, or the most of the ``recent`` values if none of enough of them comes near it.

    One slow round, such as a first one that waits for imports, stays in an average for dozens.
    """
    if average is None or len(recent) < RECENT:
        return average
    return min(average, max(recent))


def grace_seconds(estimates: Estimates, *, gap: int, in_flight: int, overlap: int | None) -> float:
    """How long a round stays open after its quorum, 0 while an estimate is missing.

    Half of the time in which the learners can train on without the commit, less what closing
    takes, and never longer than the learners need to the next round.
    """
    step, quorum, sync = estimates.step, estimates.quorum, estimates.sync
    if step is None or quorum is None or sync is None:
        return 0.0
    ahead = in_flight * gap if overlap is None else min(in_flight * gap, overlap)
    return min(max(ahead * step - (quorum + sync), 0.0) / 2, gap * step)
