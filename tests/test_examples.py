"""The example as a newcomer runs it: processes, a folder, a join, a kill, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import gradientmail as gm

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--width", "32", "--depth", "1"]
PATIENCE_SECONDS = 240.0
# Most of the time goes into importing torch in process after process; other work may slow it.
pytestmark = pytest.mark.timeout(1000)


def command(*arguments: str) -> list[str]:
    """The command line of the example with a tiny model."""
    return [sys.executable, str(EXAMPLES / "byte_lm.py"), *TINY, *arguments]


@contextmanager
def example(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The example, running in a process group of its own; ended with all its children."""
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def until[T](look: Callable[[], T | None], process: subprocess.Popen[str]) -> T:
    """What ``look`` finds, asked again until it finds something while ``process`` runs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        found = look()
        if found is not None:
            return found
        assert process.poll() is None, f"ended with {process.returncode}"
        time.sleep(0.05)
    pytest.fail(f"nothing within {PATIENCE_SECONDS} s")


def participants(run: Path, after: int = -1) -> Iterator[tuple[int, set[str]]]:
    """Round and learners of every commit after round ``after``."""
    for path in sorted(run.glob("rounds/*.json")):
        if int(path.stem) > after:
            record = json.loads(path.read_bytes())
            yield record["round"], {part["learner"] for part in record["participants"]}


def alive(pid: int) -> bool:
    """Whether the process runs (one that ended and was not waited for does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_training_together_is_compared_with_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shown = subprocess.run(
        command("--learners", "2", "--steps", "96", "--mailbox", str(run)),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    ).stdout

    assert shown.startswith(f"A new run in {run}\n")
    assert len(re.findall(r" 96/96 .* done$", shown, re.MULTILINE)) >= 3
    together, alone = re.findall(r"^  (?:together|alone) +(\d\.\d{3}) ", shown, re.MULTILINE)
    read = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes read", shown)]
    # 96 steps of 512 bytes; who is slow to start begins where the run is by then, or at its end.
    assert read[1] == 49_152 <= read[0] <= 98_304
    assert read[0] % 512 == 0
    difference = float(alone) - float(together)
    verdict = "helped" if difference > 0 else "did not help"
    word = "lower" if difference > 0 else "higher"
    assert re.search(rf"^Training together {verdict}: \d\.\d{{3}} {word}\.$", shown, re.MULTILINE)
    # An untrained model has 8 bits per byte. How much of the training is in a commit depends on how
    # many rounds there was time for.
    assert float(together) < 8.0
    assert float(alone) < 6.0

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import byte_lm

    model = byte_lm.Options(str(run), 2, 96, 32, 1).new_model()
    last = gm.align(model, mailbox=gm.FilesystemMailbox(run))
    assert f"after {last + 1} rounds:" in shown
    assert last >= 1
    assert byte_lm.held_out_loss(model) == pytest.approx(float(together), abs=1e-3)
    by_learner = {name for _, names in participants(run) for name in names}
    assert len(by_learner) == 2 or (len(by_learner) == 1 and read[0] < 98_304)  # one came late


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_others_join_and_go_on_after_a_kill_and_ctrl_c_ends_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = ["--steps", "1000000", "--mailbox", str(run), "--learners"]

    def committed_by(names: set[str], after: int = -1) -> int | None:
        return next((number for number, who in participants(run, after) if who == names), None)

    def learners(count: int) -> set[str] | None:
        names = {path.name for path in run.glob("leases/*")}
        return names if len(names) == count else None

    with example(*endless, "2") as first:
        founders = until(lambda: learners(2), first)
        until(lambda: committed_by(founders), first)
        with example(*endless, "1") as second:
            everyone = until(lambda: learners(3), second)
            joined = until(lambda: committed_by(everyone), second)

            victim = min(founders)
            os.kill(int(victim.rsplit("-", 1)[1]), signal.SIGKILL)
            until(lambda: committed_by(everyone - {victim}, after=joined), second)

            for process in (first, second):
                process.send_signal(signal.SIGINT)
            outputs = [
                process.communicate(timeout=PATIENCE_SECONDS)[0] for process in (first, second)
            ]
            assert [first.returncode, second.returncode] == [130, 130]
    assert outputs[0].startswith("A new run in")
    assert outputs[1].startswith("Joining the run in")
    assert all(output.endswith("\nStopped.\n") for output in outputs)
    assert [name for name in everyone if alive(int(name.rsplit("-", 1)[1]))] == []
    parts = {path.read_text() for path in run.glob("units/*")}
    assert parts == everyone


def test_twins_of_two_frameworks_join_one_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [str(run), "--rounds", "16", "--learners", "2"]
    processes = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / f"{name}_learner.py"), *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("torch", "mlx")
    ]
    try:
        shown = [process.communicate(timeout=2 * PATIENCE_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0]
    for framework, lines in zip(("PyTorch", "MLX"), shown, strict=True):
        found = re.fullmatch(
            r"[a-z0-9-]+ waits until 2 are there\n"
            rf"[a-z0-9-]+ trains in {framework}, from round 0 on\n"
            r"round (\d+): (\d\.\d{3}) bits per byte of held-out text\n",
            lines,
        )
        assert found, lines
        assert int(found[1]) >= 15
        assert float(found[2]) < 8.0
    # Who comes back when the run has its rounds trains no more.
    rounds = sorted(run.glob("rounds/*.json"))
    again = subprocess.run(
        [sys.executable, str(EXAMPLES / "mlx_learner.py"), str(run), "--rounds", "16"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert again.stdout.splitlines()[-1].startswith(f"round {len(rounds) - 1}: ")
    assert sorted(run.glob("rounds/*.json")) == rounds
    alone = [sys.executable, str(EXAMPLES / "torch_learner.py"), str(tmp_path / "b")]
    waiting = subprocess.Popen(
        [*alone, "--learners", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert waiting.stdout is not None
        assert "waits until 2 are there" in waiting.stdout.readline()
        time.sleep(1.0)  # Ctrl-C while an event loop is being made has Python itself say so
        waiting.send_signal(signal.SIGINT)
        said, errors = waiting.communicate(timeout=PATIENCE_SECONDS)
    finally:
        waiting.kill()
        waiting.communicate()
    assert waiting.returncode == 130
    assert said == "stopped; start it again with the same line to go on\n"
    assert "Traceback" not in errors
    twins = {lines.split(" ", 1)[0] for lines in shown}
    by_round = dict(participants(run))
    assert [by_round[number] for number in range(16)] == [twins] * 16


def test_one_script_on_every_machine_goes_on_after_a_kill(tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = [sys.executable, str(EXAMPLES / "learner.py"), f"file://{run}", *TINY, "--world", "2"]

    @contextmanager
    def learner(rank: int, *options: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [*script, "--rank", str(rank), *options], stdout=subprocess.PIPE, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    with learner(0, "--steps", "1000000") as stopped:
        shown: list[str] = []
        assert stopped.stdout is not None
        with learner(1, "--steps", "1000000"):
            # The record is there before this learner has read it: only its own words will do.
            for line in stopped.stdout:
                shown.append(line)
                if "is made of what rank-0 and rank-1 learned" in line:
                    break
        stopped.send_signal(signal.SIGINT)
        shown += stopped.communicate(timeout=PATIENCE_SECONDS)[0].splitlines(keepends=True)
        assert stopped.returncode == 130
    text = "".join(shown)
    assert re.match(rf"\d\d:\d\d:\d\d rank-0 looks for the run in file://{run}\n", text)
    assert "waits 60 s at most until all 2 have joined" in text
    assert "rank-0 of 2 learners is in the run, which begins" in text
    assert "is made of what rank-0 and rank-1 learned" in text
    assert text.endswith("stopped; start it again with the same line to go on\n")

    # Both go on to an end, and have the same parameters then.
    rounds = max(number for number, _ in participants(run)) + 4
    bounded = ("--steps", str(12 * rounds), "--wait", str(PATIENCE_SECONDS))
    ends = []
    with learner(0, *bounded) as one, learner(1, *bounded) as other:
        for rank, process in enumerate((one, other)):
            text = process.communicate(timeout=PATIENCE_SECONDS)[0]
            assert f"rank-{rank} of 2 learners is in the run, which has " in text
            end = re.search(r"done after (\d+) rounds: \d\.\d\d bits per byte of text", text)
            assert end, text
            ends.append(end)
            told = [int(n) for n in re.findall(r" round (\d+) is made of", text)]
            begun = re.search(r"which has (\d+) rounds already", text)
            assert begun is not None
            # Only what came after it joined is news.
            assert told == sorted(told)
            assert [number for number in told if number < int(begun[1])] == []
    assert ends[0][0] == ends[1][0]
    assert int(ends[0][1]) >= rounds
    with learner(0, *bounded, "--width", "64") as wider:
        text = wider.communicate(timeout=PATIENCE_SECONDS)[0]
    assert wider.returncode == 1
    assert re.search(r"^\d\d:\d\d:\d\d SchemaMismatch: ", text, re.MULTILINE), text
    with learner(0, *bounded, "--world", "3") as third:
        text = third.communicate(timeout=PATIENCE_SECONDS)[0]
    assert third.returncode == 1
    assert "quorum_size: 3 here, 2 in the run" in text
    assert text.endswith(" quorum_size is --world: give the one that the run was begun with\n")


def test_options_that_no_learner_can_have_are_named() -> None:
    for script in ("byte_lm.py", "learner.py memory://x"):
        name, *options = script.split()
        wrong = subprocess.run(
            [sys.executable, str(EXAMPLES / name), *options, "--width", "100"],
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert wrong.returncode == 2
        assert wrong.stderr.endswith("--width is a multiple of 32, not 100\n")
