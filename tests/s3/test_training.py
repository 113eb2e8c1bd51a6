"""Two sessions that train over a bucket while the way to it is broken again and again."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from tests.processes.fleet import Fleet, check_folder
from tests.s3.fault_proxy import TRANSIENT, Fault, FaultProxy, Message

import gradientmail as gm
from gradientmail.events import Event, StoreUnavailable
from gradientmail.mailbox import retrying

ALGORITHM = gm.DiLoCo(sync_every=4, fragments=2, in_flight=2, quorum_size=2)
ANSWERS = [*TRANSIENT, (409, "ConditionalRequestConflict")]
BREAKS = ("drop before", "drop after", "reset", "truncate", "delay")


def broken_at_random(random: Random, probability: float) -> Callable[[Message], Fault | None]:
    """Break so many of the requests, in every way that is transient."""

    def decide(request: Message) -> Fault | None:
        del request
        if random.random() >= probability:
            return None
        if random.random() < 0.5:
            return Fault("answer", *random.choice(ANSWERS))
        return Fault(random.choice(BREAKS))  # type: ignore[arg-type]

    return decide


class Trainer:
    """A session and the thread that trains in it until ``goal`` rounds are seen."""

    def __init__(self, box: gm.Mailbox, learner: str) -> None:
        self.events: list[Event] = []
        self.failures: list[tuple[float, StoreUnavailable]] = []
        """And when they were told."""
        self.steps = 0
        self.goal = 10**9
        self.error: BaseException | None = None
        self.model = torch.nn.Linear(20, 10)
        self.box, self.learner = box, learner
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.seen = -1

    def _run(self) -> None:
        try:
            with gm.Session(
                self.model,
                algorithm=ALGORITHM,
                mailbox=self.box,
                learner_id=self.learner,
                poll_interval=0.1,
                lease_timeout=60.0,
                callbacks=[self._note],
            ) as session:
                while session.rounds_seen < self.goal:
                    with torch.no_grad():
                        self.model.weight += 0.01 * len(self.learner)
                    session.step(samples=4)
                    self.steps += 1
                    self.seen = session.rounds_seen
                    time.sleep(0.01)
            self.seen = session.rounds_seen
        except BaseException as error:
            self.error = error

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, StoreUnavailable):
            self.failures.append((time.monotonic(), event))

    def until(self, reached: Callable[[], object]) -> None:
        """Wait until it is so, or this trainer has failed."""
        while not reached():
            if self.error is not None:
                raise self.error
            time.sleep(0.02)


@pytest.fixture
def fault_seconds(request: pytest.FixtureRequest) -> float:
    """How long the longer run through faults lasts at least."""
    return float(request.config.getoption("--fault-seconds"))


@pytest.fixture
def outage_seconds(request: pytest.FixtureRequest) -> float:
    """How long the store is away."""
    return float(request.config.getoption("--outage-seconds"))


@pytest.fixture(autouse=True)
def _short_pauses(
    monkeypatch: pytest.MonkeyPatch, fault_seconds: float, outage_seconds: float
) -> None:
    """Half a minute of backoff is for real outages; in short ones a second stands for it."""
    if max(fault_seconds, outage_seconds) < 60:
        monkeypatch.setattr(retrying, "FIRST_DELAY_SECONDS", 0.02)
        monkeypatch.setattr(retrying, "LAST_DELAY_SECONDS", 1.0)


def mailbox(endpoint: str, prefix: str) -> gm.S3Mailbox:
    return gm.S3Mailbox("tests", prefix, endpoint_url=endpoint, region="us-east-1")


def run_two(
    proxy: FaultProxy, prefix: str, while_running: Callable[[list[Trainer]], None]
) -> list[Trainer]:
    """Start two trainers, do something, and have both end well."""
    trainers = [Trainer(mailbox(proxy.endpoint, prefix), learner) for learner in ("a", "bb")]
    for trainer in trainers:
        trainer.thread.start()
    while_running(trainers)
    goal = max(trainer.seen for trainer in trainers) + 2
    for trainer in trainers:
        trainer.goal = goal
    for trainer in trainers:
        trainer.thread.join()
        if trainer.error is not None:
            raise trainer.error
    return trainers


def check_run(upstream: str, prefix: str, folder: Path) -> int:
    """From the first round to the last that both were there, each has what both did; how many."""
    fleet = Fleet(folder, f"{upstream}/tests/{prefix}")
    fleet.mirror()
    records = check_folder(fleet.root)
    learners = [[one["learner"] for one in record["participants"]] for record in records]
    both = [number for number, names in enumerate(learners) if names == ["a", "bb"]]
    assert both == list(range(both[0], both[-1] + 1))  # before and after, one was alone
    assert [record["rejected"] for record in records] == [[]] * len(records)
    return len(both)


def through_faults(
    seaweedfs: str,
    prefix: str,
    folder: Path,
    *,
    seed: int,
    rounds: int,
    probability: float,
    seconds: float = 0.0,
) -> None:
    print(f"seed {seed}")
    with FaultProxy(seaweedfs) as proxy:
        proxy.decide = broken_at_random(Random(seed), probability)
        ends = time.monotonic() + seconds

        def wait(trainers: list[Trainer]) -> None:
            for trainer in trainers:
                trainer.until(
                    lambda t=trainer: t.seen >= rounds and time.monotonic() >= ends  # type: ignore[misc]
                )
                trainer.until(lambda: set(proxy.struck) == {*BREAKS, "answer"})

        trainers = run_two(proxy, prefix, wait)
    both = check_run(seaweedfs, prefix, folder)
    assert both >= rounds // 2
    steps = [trainer.steps for trainer in trainers]
    print(f"{len(proxy.requests)} requests, {dict(proxy.struck)}; {both} rounds, {steps} steps")


@pytest.mark.timeout(300)
def test_two_nodes_lose_nothing(seaweedfs: str, prefix: str, tmp_path: Path) -> None:
    through_faults(seaweedfs, prefix, tmp_path, seed=1, rounds=12, probability=0.15)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_nodes_lose_nothing_for_longer(
    seaweedfs: str, prefix: str, tmp_path: Path, fault_seconds: float
) -> None:
    through_faults(
        seaweedfs, prefix, tmp_path, seed=2, rounds=12, probability=0.3, seconds=fault_seconds
    )


@pytest.mark.timeout(600)
def test_a_store_that_goes_away_stops_nothing(
    seaweedfs: str, prefix: str, tmp_path: Path, outage_seconds: float
) -> None:
    with FaultProxy(seaweedfs) as proxy:

        def outage(trainers: list[Trainer]) -> None:
            for trainer in trainers:
                trainer.until(lambda t=trainer: t.seen >= 3)  # type: ignore[misc]
            proxy.stop()
            steps = [trainer.steps for trainer in trainers]
            time.sleep(outage_seconds)
            for trainer, before in zip(trainers, steps, strict=True):
                trainer.until(lambda t=trainer, n=before: t.steps >= n + 100)  # type: ignore[misc]
                trainer.until(lambda t=trainer: t.failures)  # type: ignore[misc]
            print("away:", [t.steps - n for t, n in zip(trainers, steps, strict=True)], "steps")
            asked: list[float] = []

            def note(_: Message) -> None:
                asked.append(time.monotonic())

            proxy.decide = note
            proxy.start()
            back, seen = time.monotonic(), max(trainer.seen for trainer in trainers)
            for trainer in trainers:
                trainer.until(lambda t=trainer: t.seen > seen)  # type: ignore[misc]
                print(f"{trainer.learner}: {time.monotonic() - back:.1f} s until its next round")
                print(f"  {asked[0] - back:.1f} s until the first request")
                # What waits tries again once, and that succeeds: nobody is told of a failure again,
                # but for what was on its way when the store came back.
                told = [event.retry_seconds for at, event in trainer.failures if at <= back]
                assert len(trainer.failures) - len(told) <= 8
                print(
                    f"  told {len(told)} times, the last waits:", *map("{:.1f} s".format, told[-6:])
                )

        run_two(proxy, prefix, outage)
    assert check_run(seaweedfs, prefix, tmp_path) >= 3


@pytest.mark.timeout(300)
def test_what_is_refused_in_the_middle_is_told_and_stops_nobody(
    seaweedfs: str, prefix: str, tmp_path: Path
) -> None:
    """Rights that were taken away, say: words that say what to do, and on when they are back."""
    with FaultProxy(seaweedfs) as proxy:

        def refused(trainers: list[Trainer]) -> None:
            for trainer in trainers:
                trainer.until(lambda t=trainer: t.seen >= 3)  # type: ignore[misc]
            began = time.monotonic()
            proxy.decide = lambda _: Fault("answer", 403, "AccessDenied")
            for trainer in trainers:
                trainer.until(lambda t=trainer: "s3:ListBucket" in str(t.events))  # type: ignore[misc]
                print(f"{trainer.learner} told after {time.monotonic() - began:.1f} s")
                steps = trainer.steps
                trainer.until(lambda t=trainer, n=steps: t.steps >= n + 50)  # type: ignore[misc]
            proxy.decide = lambda _: None
            seen = max(trainer.seen for trainer in trainers)
            for trainer in trainers:
                trainer.until(lambda t=trainer: t.seen > seen)  # type: ignore[misc]

        run_two(proxy, prefix, refused)
    assert check_run(seaweedfs, prefix, tmp_path) >= 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("lie"), "ignores If-None-Match"),
        (Fault("answer", 404, "NoSuchBucket"), "create it"),
        (Fault("answer", 403, "AccessDenied"), "s3:ListBucket"),
        (Fault("answer", 403, "RequestTimeTooSkewed"), "clock is wrong"),
        (Fault("answer", 400, "ExpiredToken"), "renew them"),
    ],
    ids=lambda value: value.code if isinstance(value, Fault) else "",
)
def test_who_cannot_join_is_told_at_once(
    fault: Fault, words: str, seaweedfs: str, prefix: str
) -> None:
    with FaultProxy(seaweedfs) as proxy:
        proxy.decide = lambda _: fault
        with pytest.raises(gm.MailboxRefused, match=words):
            gm.Session(
                torch.nn.Linear(2, 2),
                algorithm=ALGORITHM,
                mailbox=mailbox(proxy.endpoint, prefix),
                callbacks=(),
            )
        assert len(proxy.requests) <= 12


def test_a_wrong_bucket_is_said_once(moto: str, caplog: pytest.LogCaptureFixture) -> None:
    """By the exception alone: there is nothing to leave."""
    box = gm.open_mailbox(f"s3://no-such-bucket/p?endpoint={moto}&region=us-east-1")
    with pytest.raises(gm.MailboxRefused, match="check the name, the endpoint and the region"):
        gm.Session(torch.nn.Linear(2, 1), algorithm=ALGORITHM, mailbox=box)
    assert [one.message for one in caplog.records if one.name == "gradientmail"] == []
