"""What records and keys show by themselves, without a payload being read."""

from collections import Counter
from collections.abc import Iterable, Iterator

from gradientmail.algorithm.merge import contribution_weight
from gradientmail.exchange import layout
from gradientmail.exchange.records import RoundRecord
from gradientmail.run import Run
from gradientmail.sweeping import stale
from gradientmail.verification.report import Violation

MOST_BEATS = 8
"""Beats of one learner: two while one is renewed, for this process and those that were killed.

Each of these leaves one or two, which the next one deletes; a few may be killed before they can.
"""


def most_leftover_rounds(fragments: int) -> int:
    """Rounds that objects may be left of: a thorough sweep comes once in 4·P, and some are late."""
    return 4 * fragments + 8


def record_violations(run: Run, number: int, record: RoundRecord) -> Iterator[Violation]:
    """What is wrong with the record of a round, taken by itself."""
    key, schedule = layout.round_key(number), run.schedule
    place = (record.round, record.fragment, record.version, record.step)
    expected = (
        number,
        schedule.fragment(number),
        schedule.version(number),
        schedule.due_step(number),
    )
    if place != expected:
        yield Violation(
            "versions", key, f"round, fragment, version, step are {place}, expected {expected}"
        )
    if (record.update is None) != (run.algorithm.commit_dtype is None):
        yield Violation("theta", key, "an update is there exactly if the run has a commit_dtype")
    yield from _participant_violations(key, record)


def _participant_violations(key: str, record: RoundRecord) -> Iterator[Violation]:
    if not record.participants:
        yield Violation("participants", key, "nobody contributed")
    for one in record.participants:
        weight = contribution_weight(one.tokens, one.steps)
        if weight <= 0 or one.weight != weight:
            yield Violation(
                "participants",
                key,
                f"{one.learner} has weight {one.weight!r} for {one.tokens} tokens in {one.steps} "
                f"steps, expected {weight!r}",
            )
    names = [one.learner for one in record.participants] + [who for who, _ in record.rejected]
    for learner, times in Counter(names).items():
        if times > 1:
            yield Violation("participants", key, f"{learner} is listed {times} times")
    cosine, few = record.cosine, len(record.participants) < 2
    if (cosine is None) != few or (cosine is not None and abs(cosine) > 1):
        yield Violation(
            "participants", key, f"cosine {cosine!r} of {len(record.participants)} contributions"
        )


def leftover_violations(keys: Iterable[str], last: int, fragments: int) -> Iterator[Violation]:
    """Whether more is left than the sweeps to come will find; ``last`` round is committed."""
    left: dict[int, list[str]] = {}
    for key in keys:
        if stale(key, last, fragments):
            left.setdefault(_round_of(key), []).append(key)
    if len(left) > most_leftover_rounds(fragments):
        oldest = left[min(left)][0]
        yield Violation(
            "leftovers",
            oldest,
            f"objects of {len(left)} rounds, {min(left)} to {max(left)}, are left that nobody "
            f"needs after round {last}; expected at most {most_leftover_rounds(fragments)}",
        )


def _round_of(key: str) -> int:
    snapshot, claim = layout.parse_snapshot_key(key), layout.parse_claim_key(key)
    blob = layout.parse_blob_key(key)
    if snapshot is not None:
        return snapshot[0]
    if claim is not None:
        return -1 if claim[0] is None else claim[0]
    return -1 if blob is None else blob.index


def lease_violations(keys: Iterable[str]) -> Iterator[Violation]:
    """Whether beats pile up."""
    beats = Counter(beat[0] for key in keys if (beat := layout.parse_beat_key(key)) is not None)
    for learner, count in sorted(beats.items()):
        if count > MOST_BEATS:
            yield Violation(
                "leases",
                layout.beats_prefix(learner),
                f"{count} beats, expected at most {MOST_BEATS}",
            )
