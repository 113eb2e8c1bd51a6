"""What a run asks of its store, and what that costs: a model of the requests, fitted to counts.

``tests/node/test_requests.py`` holds it against nodes that are counted in a simulated world. It is
of a run that goes as it should: nodes that step evenly, a closer that stays. Rates are for the
whole run.
"""

from dataclasses import dataclass, field

from gradientmail.mailbox.s3_parts import WHOLE_BYTES, cut
from gradientmail.rhythm import LONGEST_PAUSE_SECONDS, SOONER_POLLS

MONTH_SECONDS = 730 * 3600.0
BITS = {"F32": 32.0, "F16": 16.0, "BF16": 16.0, "F8_E4M3": 8.0, "F4": 4.25}
"""Of a value in a payload, scales included."""
PARAMETERS = ("F32", "F16", "BF16")
"""What the parameters of a model can be."""
GB = 1e9


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that is to be made. Bytes follow from ``parameters`` and the precisions."""

    nodes: int = 2
    parameters: int = 100_000_000
    sync_every: int = 100
    fragments: int = 8
    step_seconds: float = 1.0
    poll: float = 1.0
    dtype: str = "F32"
    delta_dtype: str | None = None
    commit_dtype: str | None = None
    lease_every: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what no run can be."""
        for name in ("nodes", "parameters", "sync_every", "fragments", "step_seconds", "poll"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive, not {getattr(self, name)!r}")
        if self.fragments > self.sync_every:
            raise ValueError(
                f"fragments is at most sync_every, and {self.fragments} is more than "
                f"{self.sync_every}"
            )
        for name, choices in (
            ("dtype", PARAMETERS),
            ("delta_dtype", (None, *BITS)),
            ("commit_dtype", (None, *BITS)),
        ):
            if (value := getattr(self, name)) not in choices:
                listed = ", ".join(map(str, choices))
                raise ValueError(f"{name} must be one of {listed}, not {value!r}")

    @property
    def round_seconds(self) -> float:
        """The time from one round to the next."""
        return self.sync_every / self.fragments * self.step_seconds

    def fragment_bytes(self, dtype: str | None) -> float:
        """Of one payload of a fragment, None for the parameters' own precision."""
        return self.parameters / self.fragments * BITS[dtype or self.dtype] / 8


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars: a million writes (PUT, LIST, parts of uploads), a million GETs, GB a month, GB out.

    The defaults are those of AWS S3 Standard in us-east-1, to nodes in the same region.
    """

    writes: float = 5.0
    reads: float = 0.4
    storage: float = 0.023
    egress: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no price."""
        for name in ("writes", "reads", "storage", "egress"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"a price must be 0 or more, not {getattr(self, name)!r} ({name})")


@dataclass(frozen=True, slots=True)
class Requests:
    """Of all nodes together, in one round."""

    puts: float
    lists: float
    gets: float
    received_bytes: float = field(default=0.0)
    stored_bytes: float = field(default=0.0)


def requests_of(plan: Plan) -> Requests:
    """What one round asks of the store."""
    others, seconds = plan.nodes - 1, plan.round_seconds
    delta, theta = plan.fragment_bytes(plan.delta_dtype), plan.fragment_bytes(None)
    update = plan.fragment_bytes(plan.commit_dtype) if plan.commit_dtype else 0.0
    outer = plan.parameters / plan.fragments * (8 if update or plan.dtype != "F32" else 4)
    beats = plan.nodes * seconds / plan.lease_every
    payload_puts = plan.nodes * _puts(delta) + _puts(theta) + _puts(outer)
    # A snapshot's record each; the round's record and the claim on the next round.
    puts = payload_puts + (_puts(update) if update else 0) + plan.nodes + 2 + beats
    # One look around before closing, sweeps of three listings every 4·P rounds, leases; who renews
    # one reads the beat before.
    leases = beats + (plan.nodes / 2 if 2 * seconds < plan.lease_every else 0)
    lists = 1 + 3 / (4 * plan.fragments) + leases
    looks = polls_of_round(plan)
    commit = update or theta
    gets = (
        # Followers: the next record, some looks for snapshots, two for claims, the commit.
        others * (looks + SEEKS + 2 + _gets(commit))
        # The closer: the record now and then, a third of the missing snapshots, all, the deltas.
        + (CLOSER_RECORDS + looks * -(-others // 3) + 2 * others + others * _gets(delta))
    )
    kept = 2 * (theta + outer + update) * plan.fragments + theta * plan.fragments
    return Requests(
        puts=puts,
        lists=lists,
        gets=(gets if others else CLOSER_RECORDS) + beats,
        received_bytes=others * (commit + delta),
        stored_bytes=kept + 2 * plan.nodes * delta,
    )


SEEKS = 4.0
"""How often a follower looks for others' snapshots in a round: only when a commit is due."""
CLOSER_RECORDS = 3.0
"""How often a closer asks for the record that it will make itself."""
HURRIED = 4.0
"""Polls at a quarter of the interval, from the own snapshot to the commit."""


def polls_of_round(plan: Plan) -> float:
    """How often a follower asks for the next record, as ``rhythm`` spreads it."""
    seconds, poll = plan.round_seconds, plan.poll
    pause = max(poll, min(seconds / 8, LONGEST_PAUSE_SECONDS))
    sparse = max(seconds - SOONER_POLLS * poll, 0.0) / pause
    return sparse + min(SOONER_POLLS, seconds / poll) + HURRIED


def monthly_dollars(plan: Plan, prices: Prices) -> dict[str, float]:
    """Dollars in 730 hours of training, by what is paid for."""
    round_ = requests_of(plan)
    rounds = MONTH_SECONDS / plan.round_seconds
    return {
        "PUT": round_.puts * rounds * prices.writes / 1e6,
        "LIST": round_.lists * rounds * prices.writes / 1e6,
        "GET": round_.gets * rounds * prices.reads / 1e6,
        "storage": round_.stored_bytes / GB * prices.storage,
        "egress": round_.received_bytes * rounds / GB * prices.egress,
    }


def _puts(nbytes: float) -> float:
    """Requests to upload a payload: one, or begin, parts and end."""
    return 1 if nbytes <= WHOLE_BYTES else 2 + _parts(nbytes)


def _gets(nbytes: float) -> float:
    return 1 if nbytes <= WHOLE_BYTES else _parts(nbytes)


def _parts(nbytes: float) -> int:
    return len(cut(int(nbytes), 8))
