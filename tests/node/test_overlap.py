"""``overlap_steps``: at which step the learner waits, for which commit, and for how long."""

import pytest
from tests.node.bench import Bench

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.events import Aligned
from gradientmail.handoff import Handoff


class Waits:
    """Stands in for the wait: notes the step, and lets the awaited commits arrive."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.at: list[int] = []
        monkeypatch.setattr(Handoff, "wait", self.wait)

    def wait(self, seconds: float) -> bool:
        """What ``Handoff.wait`` does, with the next round's commit coming meanwhile."""
        assert seconds > 0
        self.at.append(self.bench.learner.local_step)
        self.bench.now += 10.0
        number = self.bench.learner.rounds_seen + 1
        self.bench.arrive(number, 1.0, {"me": (1, 4)})
        return self.bench.handoff.news


@pytest.mark.parametrize("overlap", [0, 1, 3, 9])
def test_step_waits_exactly_so_many_steps_after_publishing(
    overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one round in flight nothing else would make the learner look up."""
    algorithm = DiLoCo(sync_every=10, fragments=1, in_flight=1, overlap_steps=overlap)
    bench = Bench(algorithm)
    waits = Waits(bench, monkeypatch)
    bench.steps(10 + overlap - 1 if overlap else 9)
    assert waits.at == []
    bench.steps(1)
    assert waits.at == [10 + overlap]
    assert bench.learner.rounds_seen == 0
    (event,) = [e for e in bench.handoff.events if isinstance(e, Aligned)]
    assert event.waited_seconds == 10.0
    # The next is due a gap after this one was published, and waits as long.
    bench.steps(10)
    assert waits.at == [10 + overlap, 20 + overlap]


def test_each_round_in_flight_has_its_own_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = DiLoCo(sync_every=8, fragments=4, in_flight=4, overlap_steps=5)
    bench = Bench(algorithm)
    waits = Waits(bench, monkeypatch)
    bench.steps(20)
    # Published at 2, 4, 6, …; waited for at 7, 9, 11, ….
    assert waits.at == [7, 9, 11, 13, 15, 17, 19]
    assert [row[1] for row in bench.sent()] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]


def test_a_commit_in_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = DiLoCo(sync_every=10, fragments=1, in_flight=1, overlap_steps=3)
    bench = Bench(algorithm)
    waits = Waits(bench, monkeypatch)
    bench.steps(11)
    bench.arrive(0, 2.0, {"other": (5, 20)})  # closed without this learner, which is as good
    bench.steps(8)
    assert waits.at == []
    assert bench.learner.rounds_seen == 0


def test_none_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(DiLoCo(sync_every=4, fragments=1, in_flight=1))
    waits = Waits(bench, monkeypatch)
    bench.steps(100)
    assert waits.at == []


def test_the_time_waited_is_not_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = DiLoCo(sync_every=4, fragments=1, in_flight=1, overlap_steps=2)
    bench = Bench(algorithm)
    waits = Waits(bench, monkeypatch)
    bench.now = 1.0
    for _ in range(8):
        bench.now += 1.0
        bench.steps(1)
    assert waits.at == [6]
    assert [o.step_seconds for o in bench.handoff.outbox] == [1.0, 1.0]
