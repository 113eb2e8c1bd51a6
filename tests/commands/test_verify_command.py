"""``gradientmail verify``: recorded runs, damaged ones, live ones; it writes nothing."""

import asyncio
import json
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import override

import pytest
from tests.exchange.wire import GOLDEN, RUNS
from tests.node.worlds import World

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.backend.torch import TorchBackend
from gradientmail.commands import main
from gradientmail.commands.verify import REMEDIES, as_text, check, choose, was_never_swept
from gradientmail.errors import MissingExtra
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.verification import INVARIANTS, Report, Violation


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below the folder, with its size and time."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A recorded run to damage."""
    return Path(shutil.copytree(GOLDEN / "f32-default", tmp_path / "run"))


@pytest.mark.parametrize("run", RUNS)
def test_a_recorded_run_holds_and_every_commit_is_computed_again(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(GOLDEN / run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is True
    assert found["recomputed"] == found["rounds"] > 4
    assert (found["violations"], found["strays"]) == ([], [])


def test_it_reads_what_it_may_not_write_and_leaves_it_as_it_was(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [copied, *(path for path in copied.rglob("*") if path.is_dir())]
    before = tree(copied)
    for folder in folders:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert main(["verify", str(copied)]) == 0
    finally:
        for folder in folders:
            folder.chmod(stat.S_IRWXU)
    assert tree(copied) == before
    assert capsys.readouterr().out.endswith("every invariant holds\n")


def test_a_folder_without_a_run_is_told_and_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradientmail.commands.verify.PAUSE_SECONDS", 0.0)
    assert main(["verify", str(tmp_path / "nothing")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
    assert main(["verify", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown == (
        f"there is no run in {tmp_path}; pass the address that its sessions have, or start one: "
        "the first session creates it\n"
    )
    assert main(["verify", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [row["invariant"] for row in told["violations"]] == ["manifest"]
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_manifest_is_gone_is_damaged(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradientmail.commands.verify.PAUSE_SECONDS", 0.0)
    (copied / "manifest.json").unlink()
    assert main(["verify", str(copied)]) == 1
    shown = capsys.readouterr().out
    assert "WRONG manifest: manifest.json: it is gone, and rounds are there" in shown


@pytest.mark.parametrize("command", [["verify"], ["doctor", "--large", "1", "--keys", "20"]])
def test_the_folder_above_a_run_or_within_it_names_the_run(
    command: list[str],
    copied: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradientmail.commands.verify.PAUSE_SECONDS", 0.0)
    main([*command, str(copied.parent)])
    assert f"runs are right below it: {copied}" in capsys.readouterr().out
    main([*command, str(copied / "rounds")])
    assert f"it is a part of the run in {copied}" in capsys.readouterr().out
    main([*command, str(copied)])
    shown = capsys.readouterr().out
    assert "right below" not in shown
    assert "a part of" not in shown


def test_a_wrong_path_is_told_before_any_framework_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr("gradientmail.commands.verify.choose", chosen.append)
    assert main(["verify", str(tmp_path / "nothing")]) == 1
    assert chosen == []


def test_a_violation_names_its_object_once() -> None:
    assert str(Violation("payloads", "a/b", "a/b: 3 bytes")) == "payloads: a/b: 3 bytes"
    assert str(Violation("payloads", "a/b", "a/bc is there")) == "payloads: a/b: a/bc is there"
    assert str(Violation("manifest", "a", "it does not exist")) == "manifest: a: it does not exist"


def test_damage_is_told_with_its_key_and_what_to_do(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradientmail.commands.verify.PAUSE_SECONDS", 0.0)
    payload = min((copied / "blobs" / "rounds" / "0000000004").iterdir())
    payload.write_bytes(payload.read_bytes()[:-1] + b"\x7f")
    (copied / "rounds" / "0000000003.json").unlink()
    (copied / "rounds" / "notes.txt").write_text("not ours")
    assert main(["verify", str(copied)]) == 1
    shown = capsys.readouterr().out
    key = payload.relative_to(copied).as_posix()
    assert f"WRONG payloads: {key}: the bytes do not hash" in shown
    assert "WRONG records: rounds/0000000003.json: missing, though round 4 is there" in shown
    assert "what to do: put the object back from a copy of the mailbox" in shown
    assert "objects that every node ignores: 1: 'rounds/notes.txt'" in shown
    assert main(["verify", str(copied), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is False
    assert {row["what_to_do"] for row in found["violations"]} <= set(REMEDIES.values())
    assert {row["invariant"] for row in found["violations"]} >= {"payloads", "records"}


@pytest.mark.parametrize("far", [9, 10**10 - 1])
def test_garbage_beyond_the_last_round_is_one_fault_and_costs_no_memory(
    far: int, copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradientmail.commands.verify.PAUSE_SECONDS", 0.0)
    count = len(list((copied / "rounds").iterdir()))
    key = f"rounds/{count + far if far < 10 else far:010d}.json"
    with (copied / key).open("wb") as file:
        os.truncate(file.fileno(), 2**40)
    main(["verify", str(copied), "--json"])
    found = json.loads(capsys.readouterr().out)
    told = [row for row in found["violations"] if row["invariant"] == "records"]
    assert [row["key"] for row in told] == [key]


def test_it_says_which_commits_it_could_compute_again() -> None:
    def computed(recomputed: int, consistent: int) -> str:
        report = Report(9, 40, 20, recomputed, consistent, (), ())
        return as_text("u", "numpy", report).splitlines()[2]

    assert computed(9, 0) == "commits, with numpy: 9 computed again from their deltas"
    assert computed(0, 4) == (
        "commits, with numpy: 4 compared with the version before only, because their deltas are "
        "swept; 5 older: swept but for their records"
    )


def test_every_invariant_has_a_remedy() -> None:
    assert REMEDIES.keys() == INVARIANTS.keys()


def test_backends_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose("none") == ("none", None)
    name, backend = choose("torch")
    assert name == "torch"
    assert isinstance(backend, TorchBackend)
    assert main(["verify", str(GOLDEN / RUNS[0]), "--backend", "none"]) == 0
    shown = capsys.readouterr().out
    assert "no number was looked at" in shown
    assert shown.endswith("\nevery invariant that can be checked without numbers holds\n")


def test_a_backend_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        __import__("gradientmail.commands.verify").commands.verify.BACKENDS,
        "mlx",
        ("gradientmail.backend.nowhere", "None"),
    )
    with pytest.raises(MissingExtra, match=r"gradientmail\[mlx\]"):
        choose("mlx")


class Paged(MemoryMailbox):
    """A listing that takes its time: what is committed meanwhile is in its later part only."""

    def __init__(self, inner: Mailbox, late: dict[str, bytes], gone: set[str]) -> None:
        super().__init__()
        self.inner, self.late, self.gone = inner, late, gone
        self.listings = 0

    @override
    async def get(self, key: str, /) -> bytes | None:
        if key in self.gone:
            return None
        data = await self.inner.get(key)
        return None if data is None else bytes(data)

    @override
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        self.listings += 1
        keys = await self.inner.list(prefix, after=after)
        return [key for key in keys if self.listings > 2 or key not in self.late]

    @override
    async def delete(self, keys: Iterable[str], /) -> None:
        raise AssertionError(tuple(keys))


def test_what_only_a_live_run_shows_for_a_moment_is_looked_at_again() -> None:
    """A record that was created behind the listing's back, before one that it still saw."""

    async def main() -> tuple[Report, Report]:
        world = World(DiLoCo(sync_every=4, fragments=2))
        node = world.node("a")
        await node.join()
        await node.train(40)
        await node.close()
        late = f"rounds/{world.archive.rounds() - 2:010d}.json"
        first = Paged(world.archive, {late: b""}, set())
        torn = await check(first, TorchBackend(), pause=0.0)
        gone = world.archive.now("blobs/rounds/")[-1]
        lost = await check(Paged(world.archive, {}, {gone}), TorchBackend(), pause=0.0)
        assert [one.key for one in lost.violations][:1] == [gone]
        return torn, lost

    torn, lost = run_virtual(main, limit_seconds=900)
    assert torn.violations == ()
    assert not lost.holds


def test_a_live_run_is_read_again_and_again_without_a_false_alarm() -> None:
    """At every moment of a run of three nodes, sweeps and commits between any two reads."""

    async def main() -> int:
        world = World(DiLoCo(sync_every=4, fragments=2), seed=3)
        nodes = [world.node(name) for name in "abc"]
        for node in nodes:
            await node.join()
        training = [asyncio.ensure_future(node.train(60)) for node in nodes]
        slow = world.store.view()
        looks = 0
        while not all(one.done() for one in training):
            slow.connection = type(slow.connection)(latency_seconds=[0.0, 0.03, 0.3][looks % 3])
            report = await check(slow, TorchBackend(), pause=0.5)
            assert report.holds, report.violations
            looks += 1
        await asyncio.gather(*training)
        for node in nodes:
            await node.close()
        return looks

    assert run_virtual(main, limit_seconds=900) >= 5


def test_a_young_run_is_no_recording() -> None:
    keys = [f"rounds/{r:010d}.json" for r in range(3)]
    assert not was_never_swept(keys)
    assert not was_never_swept([])
