"""Events: each a frozen value and a plain sentence; callbacks cannot hurt each other."""

import logging
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest

from gradientmail import events
from gradientmail.event import shown_bytes
from gradientmail.events import (
    Announcer,
    BuffersStayLocal,
    Closed,
    Contribution,
    Event,
    GaveUp,
    LearnerLeft,
    LearnerLost,
    NeverClosed,
    RoundClaimed,
    RoundCommitted,
    TookOver,
    log_events,
)

COMMITTED = RoundCommitted(
    round=7,
    fragment=1,
    version=4,
    contributions=(
        Contribution(learner="a", steps=4, tokens=8, weight=16.0),
        Contribution(learner="b", steps=1, tokens=4, weight=16.0),
    ),
    rejected=(("c", "stale"),),
    cosine=0.25,
    quorum_seconds=1.5,
    grace_seconds=0.25,
    sync_seconds=0.125,
)

SENTENCES: list[tuple[Event, str]] = [
    (
        events.RunCreated(fragments=2, parameters=1234567),
        "created the run: 1,234,567 parameters in 2 fragments",
    ),
    (
        events.RunCreated(fragments=4, parameters=1153, asked=8, mailbox="S3Mailbox('b', 'p')"),
        (
            "created the run in S3Mailbox('b', 'p'): 1,153 parameters in 4 fragments (8 were asked "
            "for: no tensor is cut)"
        ),
    ),
    (
        events.Joined(learner="a", rounds_seen=3, mailbox="S3Mailbox('b', 'p')"),
        "a joined the run in S3Mailbox('b', 'p') at round 3",
    ),
    (events.Joined(learner="a", rounds_seen=-1), "a joined before the first round"),
    (events.Joined(learner="a", rounds_seen=3), "a joined at round 3"),
    (
        events.SnapshotPublished(
            round=3, fragment=0, steps=5, tokens=40, nbytes=2**21, seconds=0.5, final=False
        ),
        "round 3: published delta of 5 steps (2.0 MiB in 0.50 s)",
    ),
    (
        events.SnapshotPublished(
            round=3, fragment=0, steps=5, tokens=40, nbytes=2**21, seconds=0.5, final=True
        ),
        "round 3: published final delta of 5 steps (2.0 MiB in 0.50 s)",
    ),
    (
        events.SnapshotPublished(
            round=3, fragment=0, steps=0, tokens=0, nbytes=208, seconds=0.02, final=False
        ),
        "round 3: told the others that this learner contributes nothing (208 bytes in 0.02 s)",
    ),
    (RoundClaimed(round=2, claim=1), "round 2: this node closes it (claim 1)"),
    (
        TookOver(round=2, previous="b", reason="lease", after_seconds=3.0),
        "round 2: takes over from b, whose lease is gone, after 3.0 s",
    ),
    (
        TookOver(round=2, previous=None, reason="silence", after_seconds=3.0),
        "round 2: takes over from its closer, whose record has not come, after 3.0 s",
    ),
    (
        events.SnapshotRejected(round=2, learner="b", reason="stale", detail="too old"),
        "round 2: b's snapshot is rejected (stale): too old",
    ),
    (
        COMMITTED,
        (
            "round 7: committed version 4 of fragment 1 from a 50%, b 50%, cosine 0.250 "
            "(quorum 1.50 s, grace 0.25 s, merge and commit 0.12 s)"
        ),
    ),
    (
        events.RoundSuperseded(round=2),
        "round 2: another node committed it first; following that record",
    ),
    (
        events.RoundSeen(
            round=2, fragment=0, version=2, learners=("a", "b"), rejected=(), cosine=None
        ),
        "round 2: committed with a, b",
    ),
    (
        events.Aligned(round=2, fragment=0, version=2, steps_replaced=3, waited_seconds=0.0),
        "round 2: aligned with version 2 of fragment 0, replacing 3 local steps",
    ),
    (
        events.LeaseRenewed(beat=4, live=("a", "b")),
        "lease renewed (beat 4); live learners: a, b",
    ),
    (events.LearnerAppeared(learner="b"), "b is in the run"),
    (LearnerLeft(learner="b"), "b left the run"),
    (LearnerLost(learner="b"), "b has not renewed its lease"),
    (
        events.LeaseLost(learner="b"),
        "another session joined as b; this one publishes nothing more",
    ),
    (
        events.StoreUnavailable(operation="get", error="timed out", retry_seconds=0.5),
        "mailbox get failed, again in 0.5 s: timed out",
    ),
    (
        events.StoreUnavailable(operation="get", error="gone", retry_seconds=0.5, answered=False),
        (
            "no usable answer from the mailbox yet: check its address, or wait; it is asked "
            "again in 0.5 s, and Ctrl-C stops. gone"
        ),
    ),
    (
        events.TaskFailed(task="poll", error="ValueError()", round=4),
        "round 4: poll failed and is tried again: ValueError()",
    ),
    (
        events.TaskFailed(task="lease", error="ValueError()", times=8),
        "lease failed 8 times in a row and is tried again: ValueError()",
    ),
    (
        events.TaskFailed(task="lease", error="the disk is full", repeated=False),
        "leaves without deleting its lease, which runs out by itself: the disk is full",
    ),
    (
        events.ClosingWaits(rounds=(3, 4), at_most_seconds=150.2),
        (
            "closing waits for round 3, 4 to be committed, and leaves when no commit comes for "
            "150 s; Ctrl-C leaves now"
        ),
    ),
    (
        GaveUp(rounds=(3, 4), waited_seconds=150.2),
        "nothing was committed for 150 s; leaves without round 3, 4",
    ),
    (
        events.ParametersOutOfRange(round=3, tensors=("w",)),
        (
            "round 3: the outer step goes beyond the range of 1 tensor (w); the largest finite "
            "values are there instead. Some learner diverges, or the learning rates are too high"
        ),
    ),
    (
        events.MomentumLost(round=3, fragment=1, error="it is gone"),
        (
            "round 3: the outer state of fragment 1 cannot be read (it is gone); its momentum"
            " starts again at zero, and the parameters go on"
        ),
    ),
    (
        events.DeltasParallel(rounds=(3, 4, 6), cosine=0.9951),
        (
            "rounds 3 to 6: the learners' deltas are parallel (cosine 0.995 or more), so that"
            " several learn no more than one; probably all of them train on the same data in "
            "the same order: give each its own shard, or a seed of its own"
        ),
    ),
    (
        events.ParametersStandStill(learner="b", rounds=4),
        (
            "the last 4 deltas of b were the same as those before them: its parameters do not "
            "change from step to step, and it adds nothing to the run. Does the optimizer train "
            "the very model that the session was given?"
        ),
    ),
    (
        events.LearnerMissing(learner="b", rounds=(3, 4, 5), missed=6, rejected=(), why="too far"),
        "b holds its lease and was in none of the last 6 rounds (up to round 5): too far",
    ),
    (
        events.TrainsAlone(learner="a", rounds=8, mailbox="S3Mailbox(runs/one)"),
        (
            "a has been alone in all 8 rounds of the run. Whoever should take part needs the same "
            "mailbox address: here it is S3Mailbox(runs/one); any other address makes a run of its "
            "own"
        ),
    ),
    (
        events.TrainsAlone(learner="a", rounds=8),
        (
            "a has been alone in all 8 rounds of the run. Whoever should take part needs the same "
            "mailbox address; any other address makes a run of its own"
        ),
    ),
    (
        events.RoundWaits(
            round=3, seconds=30.4, accepted=("a",), rejected=(), missing=("b",), quorum_size=2
        ),
        (
            "round 3 has waited 30 s: accepted a, of 2 needed; rejected nobody; nothing yet "
            "from b. Who has died is given up when its lease runs out; who lives must call "
            "session.step, or leave the run"
        ),
    ),
    (
        events.RoundWaits(
            round=3, seconds=30.4, accepted=("a",), rejected=("b",), missing=(), quorum_size=2
        ),
        "round 3 has waited 30 s: accepted a, of 2 needed; rejected b",
    ),
    (
        events.NothingShared(learner="a", steps=0, every=13, fragments=4, of=4),
        (
            "a never called session.step, and its model was changed: that is dropped, and "
            "the model holds the run's parameters. Call it after every optimizer step"
        ),
    ),
    (
        events.NothingShared(learner="a", steps=1, every=13, fragments=4, of=4),
        (
            "no round has anything of the 1 step of a: that is dropped, and the model holds the "
            "run's parameters there. Rounds take a fragment each, are due every 13 steps and take "
            "some tenths of a second; train longer, or pass flush_on_close=True to DiLoCo"
        ),
    ),
    (
        events.NothingShared(learner="a", steps=30, every=13, fragments=2, of=4),
        (
            "in 2 of 4 fragments no round has anything of the 30 steps of a: that is dropped, and "
            "the model holds the run's parameters there. Rounds take a fragment each, are due "
            "every 13 steps and take some tenths of a second; train longer, or pass "
            "flush_on_close=True to DiLoCo"
        ),
    ),
    (
        events.StateRestored(local_step=9, kept=(0, 1), moved=(), steps_replaced=0),
        "goes on at local step 9, with the local parameters of 2 fragments",
    ),
    (
        events.StateRestored(local_step=9, kept=(0,), moved=(1,), steps_replaced=4),
        (
            "goes on at local step 9, with the local parameters of 1 fragments; the run went "
            "on in 1, replacing 4 local steps"
        ),
    ),
    (
        BuffersStayLocal(buffers=("mean", "var", "scale", "shift")),
        (
            "4 floating-point buffers stay this node's own (mean, var, scale, …); if training "
            'changes them, as it does batch norm\'s, give every node buffers="average"'
        ),
    ),
    (
        NeverClosed(learner="a"),
        (
            "the program ends and nobody has closed the session of a: its model was not set to the "
            "newest commit, and the steps since its last snapshot are in no round. Put `with` "
            "around the training loop, or call close()"
        ),
    ),
    (Closed(learner="a", rounds_seen=9, clean=True), "a left the run at round 9"),
    (
        Closed(learner="a", rounds_seen=-1, clean=True),
        "a left the run, before any round was committed: the run still has its first parameters",
    ),
    (
        Closed(learner="a", rounds_seen=9, clean=False),
        "a left the run without waiting at round 9",
    ),
]


@pytest.mark.parametrize(("event", "sentence"), SENTENCES, ids=lambda x: type(x).__name__)
def test_an_event_is_a_sentence(event: Event, sentence: str) -> None:
    assert str(event) == sentence


def test_a_long_list_of_tensors_is_cut() -> None:
    names = tuple(f"t{i}" for i in range(7))
    said = str(events.ParametersNotFinite(tensors=names, round=1))
    assert "not finite: 7 tensors (t0, t1, t2, t3, t4, …);" in said
    assert "optimizer state" in said
    assert "reset" in said
    assert "2 tensors (t0, t1);" in str(events.ParametersNotFinite(tensors=names[:2], round=1))
    assert "1 tensor (t0);" in str(events.ParametersNotFinite(tensors=names[:1], round=1))
    beyond = events.ParametersNotFinite(tensors=names[:2], round=1, beyond=names[:1])
    assert str(beyond).startswith(
        "round 1: not finite: 1 tensor (t1); the delta of 1 tensor (t0) was not finite, or beyond "
        "the range of delta_dtype; no delta was published"
    )
    only = events.ParametersNotFinite(tensors=("w",), round=1, beyond=("w",))
    assert str(only).startswith("round 1: the delta of 1 tensor (w) was not finite, or beyond")
    out = events.ParametersOutOfRange(round=1, tensors=names[:1])
    assert "range of 1 tensor (t0);" in str(out)


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (1_234_567, "1.2 MiB"),
        (3 * 2**29, "1.5 GiB"),
        (5 * 2**40, "5120.0 GiB"),
    ],
)
def test_a_size_is_never_shown_as_nothing(count: int, shown: str) -> None:
    assert shown_bytes(count) == shown


def every_kind() -> list[type[Event]]:
    return [
        kind
        for kind in vars(events).values()
        if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
    ]


def test_every_event_is_a_frozen_value_with_a_sentence_and_a_test() -> None:
    tested = {type(event) for event, _ in SENTENCES} | {events.ParametersNotFinite}
    assert set(every_kind()) == tested
    for kind in every_kind():
        assert is_dataclass(kind)
        assert "__str__" in vars(kind)
        assert kind.__doc__
        assert "level" not in {field.name for field in fields(kind)}
    with pytest.raises(FrozenInstanceError):
        COMMITTED.round = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("event", "level"),
    [
        (COMMITTED, logging.INFO),
        (TookOver(round=2, previous="b", reason="lease", after_seconds=3.0), logging.INFO),
        (LearnerLost(learner="b"), logging.WARNING),
        (events.ParametersNotFinite(tensors=("w",), round=1), logging.ERROR),
        (events.LeaseLost(learner="b"), logging.ERROR),
        (events.LeaseRenewed(beat=4, live=()), logging.DEBUG),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_event_is_logged_at_its_level(
    event: Event, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="gradientmail")
    log_events(event)
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == ("gradientmail", level, str(event))


def test_callbacks_are_called_in_order_and_one_that_raises_hurts_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[tuple[str, Event]] = []

    def bad(event: Event) -> None:
        calls.append(("bad", event))
        raise ValueError("mine")

    announce = Announcer(
        (lambda event: calls.append(("first", event)), bad, lambda e: calls.append(("last", e)))
    )
    first, second = RoundClaimed(round=1, claim=1), RoundClaimed(round=2, claim=1)
    announce(first)
    announce(second)
    assert calls == [
        (name, event) for event in (first, second) for name in ("first", "bad", "last")
    ]
    assert len(caplog.records) == 2
    assert all("ValueError: mine" in (record.exc_text or "") for record in caplog.records)
