"""Two nodes as processes over a bucket: they agree, and one goes on where the other was killed."""

from pathlib import Path

import pytest
from tests.processes.fleet import Fleet, check_folder, left_behind


@pytest.mark.timeout(300)
def test_two_processes_agree_and_take_over(endpoint: str, prefix: str, tmp_path: Path) -> None:
    with Fleet(tmp_path, f"{endpoint}/tests/{prefix}") as fleet:
        fleet.start("a", 4)
        fleet.start("b", 4)
        last = [fleet.ended("a"), fleet.ended("b")]
        assert {line[0] for line in last} == {"closed"}
        if last[0][1] == last[1][1]:
            assert last[0][2] == last[1][2]

        # Whoever closes is killed, and the other goes on; then it is killed, too.
        fleet.start("a")
        fleet.start("b")
        fleet.joined("a")
        fleet.joined("b")
        fleet.until_rounds(fleet.rounds() + 2)
        victim = "b" if fleet.closer() == "b" else "a"
        fleet.kill(victim)
        fleet.until_rounds(fleet.rounds() + 3)
        fleet.kill("a" if victim == "b" else "b")
        fleet.start("c", 4)
        line = fleet.ended("c")

        fleet.mirror()
        records = check_folder(fleet.root)
        assert int(line[1]) == len(records) - 1
        assert len(records) >= 10
        # What the killed ones had uploaded for commits that never came is swept some rounds later.
        committed = {record[kind]["key"] for record in records for kind in ("theta", "outer")}
        left = left_behind(fleet.root)
        assert [key for key in left if key in committed or key.startswith("claims")] == []
