"""One PyTorch and one MLX node, two processes over one folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.processes.fleet import check_folder

ROOT = Path(__file__).parents[2]
RUNS = ("float32-none-none", "bfloat16-none-none", "float32-F4-F4")
PATIENCE = 250.0

# Most of the time goes into importing torch; other work may slow it.
pytestmark = pytest.mark.timeout(300)


def lines_of(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    shown = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, shown
    return [json.loads(line) for line in shown.splitlines()]


def test_both_take_part_both_close_rounds_and_end_equal(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in RUNS]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes.framework_node", framework, *folders],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for framework in ("torch", "mlx")
    ]
    try:
        by_torch, by_mlx = map(lines_of, processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [line["run"] for line in by_mlx] == list(RUNS)
    for number, name in enumerate(RUNS):
        before, again, other = *by_torch[2 * number : 2 * number + 2], by_mlx[number]
        assert [line["failed"] for line in (before, again, other)] == [[], [], []]
        records = check_folder(tmp_path / name)
        assert before["closed"] == list(range(len(before["closed"])))
        assert other["closed"] == list(range(len(before["closed"]), len(records)))
        assert min(len(before["closed"]), len(other["closed"])) >= 8
        who = [{part["learner"] for part in record["participants"]} for record in records]
        assert who[:8] == [{"torch", "mlx"}] * 8
        assert who[-6:] == [{"torch-again", "mlx"}] * 6
        assert again["seen"] == other["seen"] == len(records) - 1
        assert again["digest"] == other["digest"]
