"""The page's example of stopping and starting again, as processes that are killed."""

import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "your-training-loop.md"
PATIENCE = 200.0


HELD_AT = 50
"""The step at which the example waits for a file ``last``, so that a kill finds it at work."""


def example() -> str:
    """The page's lines, slowed down, and held up near their end."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    named = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
    pattern = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    first, second = (
        pattern.findall(named[heading])[0] for heading in ("", "Stopping and starting again")
    )
    slow = "        position += 1\n"
    assert second.count(slow) == 1
    quick = """
        import gradientmail as gm
        gm.Session.__init__.__kwdefaults__.update(poll_interval=0.05)
    """
    told = """
        print("ended at", position, session.rounds_seen, flush=True)
    """
    return (
        textwrap.dedent(quick)
        + first
        + second.replace(slow, HELD + slow).replace(
            "from pathlib import Path",
            "import logging\nimport time\nfrom pathlib import Path\n\n"
            "logging.basicConfig(level=logging.INFO)",
        )
        + textwrap.dedent(told)
    )


HELD = f"""
        time.sleep(0.02)
        while position == {HELD_AT} and not Path("last").exists():
            time.sleep(0.02)
"""


def until(reached: Callable[[], object]) -> None:
    """Poll until it is so."""
    ends = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < ends, "nothing happens"
        time.sleep(0.01)


class Scripts:
    """The processes of a test."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self.server = server

    def ask(self, line: str) -> int:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(line, file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def start(self, folder: Path, script: str, log: Path) -> int:
        """Run ``script`` in ``folder``; the process id."""
        (folder / "train.py").write_text(script)
        return self.ask(f"start {folder} {log}")


@pytest.fixture
def scripts() -> Iterator[Scripts]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.processes.script_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PAGE.parents[1],
    )
    yield Scripts(server)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()  # it kills what is left
    server.wait(PATIENCE)
    server.stdout.close()


def position(folder: Path) -> int:
    path = folder / "checkpoint.pt"
    found: int = torch.load(path, weights_only=True)["position"] if path.exists() else 0
    return found


@pytest.mark.timeout(240)
def test_the_example_goes_on_after_a_kill_with_its_steps_data_and_schedule(
    tmp_path: Path, scripts: Scripts
) -> None:
    """Twice killed, it trains on every batch and goes on at once under its own name."""
    for turn, enough in enumerate((10, 30)):
        log = tmp_path / f"killed{turn}.log"
        process = scripts.start(tmp_path, example(), log)
        until(lambda enough=enough: position(tmp_path) >= enough)
        assert scripts.ask(f"kill {process}") == -signal.SIGKILL
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["session"]["local_step"] == saved["position"] == saved["scheduler"]["last_epoch"]
    (tmp_path / "last").touch()
    log = tmp_path / "last.log"
    process = scripts.start(tmp_path, example(), log)
    assert scripts.ask(f"wait {process}") == 0, log.read_text()
    said = log.read_text()
    assert "ended at 60" in said
    assert f"goes on at local step {saved['position']}, with the local parameters" in said
    assert position(tmp_path) == 60
    paths = sorted((tmp_path / "runs/example/rounds").glob("*.json"))
    records = [json.loads(path.read_bytes()) for path in paths]
    assert len(records) >= 2
    steps = [row["local_step"] for record in records for row in record["participants"]]
    # Local steps go on across the processes; a kill loses a checkpoint's worth at most.
    assert max(steps) > 40
    assert all(later > earlier - 20 for earlier, later in pairwise(steps))
    assert list((tmp_path / "runs/example").glob("leases/*/*.json")) == []


@pytest.mark.timeout(240)
def test_of_two_live_processes_with_one_id_the_newer_goes_on(
    tmp_path: Path, scripts: Scripts
) -> None:
    """The older one's next step says so, and it writes nothing more."""
    settings = "poll_interval=0.05, lease_every=0.2, lease_timeout=60.0"
    script = (
        example()
        .replace("poll_interval=0.05", settings)
        .replace("while position < len(loader):", "while True:")
        .replace(HELD, "        time.sleep(0.02)\n")
        .replace("loader[position]", "loader[position % 60]")
        .replace('"runs/example"', repr(str(tmp_path / "run")))
    )
    logs = [tmp_path / f"{name}.log" for name in ("older", "newer")]
    processes = []
    for log in logs:
        folder = log.with_suffix("")
        folder.mkdir()
        processes.append(scripts.start(folder, script, log))
        until(lambda log=log: log.exists() and "joined" in log.read_text())
    assert scripts.ask(f"wait {processes[0]}") == 1
    said = logs[0].read_text()
    assert "LearnerReplaced" in said
    assert "'node-1'" in said
    assert "learner_id of its own" in said
    rounds = tmp_path / "run" / "rounds"
    count = len(list(rounds.glob("*.json")))
    until(lambda: len(list(rounds.glob("*.json"))) >= count + 2)
    assert "Replaced" not in logs[1].read_text()
