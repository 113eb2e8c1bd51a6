"""Four learner processes over a real store, and everything that can happen to both of them.

Bounded here; for hours: ``uv run pytest tests/processes/test_chaos.py --timeout 0 --chaos-seconds
7200 --chaos-seed 5``. Afterwards every commit of the run is computed again from the deltas that it
lists, which the nodes kept aside when they deleted them.
"""

import asyncio
import time
from pathlib import Path

import pytest
from tests.processes.chaos import LEARNERS, Chaos, Folder, Store
from tests.processes.chaos_bucket import Bucket
from tests.s3 import servers

from gradientmail.backend.torch import TorchBackend
from gradientmail.commands.verify import check
from gradientmail.exchange.layout import parse_round_key
from gradientmail.verification import Violation, verify

FRAGMENTS = 2


def planted(violation: Violation, count: int) -> bool:
    """Whether it is the garbage that chaos puts far beyond the run's end."""
    number = parse_round_key(violation.key)
    return violation.invariant == "records" and number is not None and number >= count + 5_000


def suffer(folder: Path, store: Store, seed: int, seconds: float) -> None:
    """Run, and check what is left."""
    print(f"seed {seed}, {seconds:g} seconds")
    with Chaos(folder, store, seed) as chaos:
        for learner in LEARNERS:
            chaos.start(learner)
        chaos.until_rounds(3)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            chaos.happen()
        # Quiet: every learner takes part again, and what crashes left behind is found.
        before = chaos.rounds()
        chaos.until_rounds(before + 4 * FRAGMENTS + 2)
        for process in tuple(chaos.alive):
            chaos.kill(process)
        last = chaos.start("last", 4 * FRAGMENTS + 2)
        assert chaos._ask(do="reap", pid=last.pid, wait=True) == 0, last.out.read_text()
        chaos.alive.remove(last)
        count = chaos.rounds()
        print(f"{count} rounds, {chaos.count} processes", *chaos.log, sep="\n  ")
        backend = TorchBackend()
        now = asyncio.run(check(chaos.box, backend, pause=0.0))
        assert [one for one in now.violations if not planted(one, count)] == []
        whole = asyncio.run(verify(chaos.history(), backend=backend, swept=False))
        assert whole.violations == ()
        assert whole.recomputed == count


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_over_a_folder(tmp_path: Path, chaos_seed: int, chaos_seconds: float) -> None:
    suffer(tmp_path, Folder(tmp_path / "run"), chaos_seed, chaos_seconds)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_over_seaweedfs(
    tmp_path: Path, chaos_seed: int, chaos_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with Bucket(tmp_path / "seaweedfs") as store:
        suffer(tmp_path, store, chaos_seed, chaos_seconds)
