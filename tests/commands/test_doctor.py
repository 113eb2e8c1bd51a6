"""The doctor over stores that keep their promises, and over one for each way of breaking one."""

import asyncio
import json
from collections.abc import Awaitable, Buffer, Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import override

import pytest

from gradientmail.commands import main
from gradientmail.commands.base import UNREACHED
from gradientmail.commands.bill import Plan, Prices, monthly_dollars, requests_of
from gradientmail.commands.checks import Examination, Finding
from gradientmail.commands.examining import Extent, Report, cleaned, examine
from gradientmail.errors import MailboxRefused, MailboxUnavailable
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox
from gradientmail.testing.faults import FaultyMailbox, HangingMailbox, fail_randomly

SMALL = Extent(large_bytes=2**17, keys=1050, samples=3, seconds=60.0)


class Overwrites(MemoryMailbox):
    """Ignores the condition of a put."""

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        await self.delete([key])
        return await super().put_if_absent(key, data)


class LooksThenWrites(MemoryMailbox):
    """Honours the condition unless two come at the same moment."""

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        exists = await self.get(key) is not None
        await asyncio.sleep(0)
        if exists:
            return False
        await self.delete([key])
        return await super().put_if_absent(key, data)


class NobodyWins(MemoryMailbox):
    """Creates objects and denies it when they are many."""

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        return await super().put_if_absent(key, data) and "race" not in key


class RemembersNothing(MemoryMailbox):
    """Once it has said that there is no such object it goes on saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.missed: set[str] = set()

    @override
    async def get(self, key: str, /) -> bytes | None:
        found = await super().get(key)
        if found is None:
            self.missed.add(key)
        return None if key in self.missed else found


class StaleLists(MemoryMailbox):
    """A listing shows what the one before it should have shown."""

    last: Sequence[str] = ()

    @override
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        stale = tuple(key for key in self.last if key.startswith(prefix) and key > after)
        self.last = await super().list("")
        return stale


class Unsorted(MemoryMailbox):
    @override
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return (await super().list(prefix, after=after))[::-1]


class FolderOrder(MemoryMailbox):
    """Lists ``a/b`` before ``a-b``, as some S3 stores do."""

    @override
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return sorted(await super().list(prefix, after=after), key=lambda key: key.split("/"))


class IgnoresAfter(MemoryMailbox):
    @override
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return await super().list(prefix)


class OnePage(MemoryMailbox):
    """Lists a thousand keys and not that there are more."""

    @override
    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        return (await super().list(prefix, after=after))[:1000]


class LosesDeletes(MemoryMailbox):
    @override
    async def delete(self, keys: Iterable[str], /) -> None:
        del keys


class ReadsTheDeleted(MemoryMailbox):
    """What was deleted is not listed and can still be read."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        self.kept.setdefault(key, bytes(data))
        return await super().put_if_absent(key, data)

    @override
    async def get(self, key: str, /) -> bytes | None:
        return self.kept.get(key)


class Truncates(MemoryMailbox):
    """Cuts off what is large."""

    @override
    async def get(self, key: str, /) -> bytes | None:
        found = await super().get(key)
        return None if found is None else found[: 2**16]


class NothingEmpty(MemoryMailbox):
    """An empty object is none."""

    @override
    async def get(self, key: str, /) -> bytes | None:
        return await super().get(key) or None


class Refuses(WrappedMailbox):
    """Raises ``error`` for one operation."""

    def __init__(self, operation: str, error: Exception) -> None:
        super().__init__(MemoryMailbox())
        self.operation = operation
        self.error = error

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if call.operation == self.operation:
            raise self.error
        return await act()


def examined(box: Mailbox, extent: Extent = SMALL) -> Report:
    """What the doctor finds over two connections to ``box``."""

    async def main() -> Report:
        store = Examination((box, box))
        report = await examine(store, extent)
        return Report((*report.findings, *await cleaned(store)), report.latency)

    return asyncio.run(main())


def faults(report: Report) -> dict[str, Finding]:
    return {finding.check: finding for finding in report.findings if finding.state == "fault"}


def test_a_store_that_keeps_its_promises() -> None:
    box = MemoryMailbox()
    report = examined(box)
    assert report.usable
    assert report.verdict == "This store can be used."
    assert {finding.state for finding in report.findings} == {"ok"}
    assert [one.operation for one in report.latency] == ["put", "get", "list", "delete"]
    assert all(0 <= one.median <= one.p95 for one in report.latency)
    assert asyncio.run(box.list("")) == ()


def test_a_run_that_is_there_is_told() -> None:
    box = MemoryMailbox()
    asyncio.run(box.put_if_absent("manifest.json", b"{}"))
    told = {finding.check: finding.detail for finding in examined(box).findings}
    assert told["run"] == "one is here already: sessions with this address join it"
    assert asyncio.run(box.list("")) == ("manifest.json",)


@pytest.mark.parametrize(
    ("box", "check", "detail"),
    [
        (Overwrites(), "create once", "an object that existed was written again"),
        (LooksThenWrites(), "create once", "that created one object at the same moment"),
        (NobodyWins(), "create once", "none of 16"),
        (RemembersNothing(), "read after write", "another reader got nothing"),
        (StaleLists(), "list after write", "lacks 1 of 1 keys, 'list/000' for one"),
        (Unsorted(), "order", "not in byte order"),
        (FolderOrder(), "order", "not in byte order"),
        (IgnoresAfter(), "order", "a listing after"),
        (OnePage(), "many keys", "lacks 50 of 1050 keys, 'many/01000' for one"),
        (LosesDeletes(), "list after write", "has 'list/005', which is not there"),
        (ReadsTheDeleted(), "many keys", "a deleted object can still be read"),
        (Truncates(), "large object", "of 131072 bytes came back as 65536 bytes"),
        (NothingEmpty(), "read and write", "an object of 0 bytes came back as nothing"),
        (
            Refuses("put_if_absent", MailboxRefused("it ignores If-None-Match")),
            "read and write",
            "it ignores If-None-Match",
        ),
        (Refuses("delete", PermissionError(13, "denied")), "read and write", "denied"),
        (Refuses("get", MailboxRefused("no bucket 'b'")), "reachable", "no bucket 'b'"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_each_way_of_lying_is_found(box: Mailbox, check: str, detail: str) -> None:
    report = examined(box)
    assert not report.usable
    assert report.verdict == "This store cannot be used from here."
    found = faults(report)
    assert check in found
    assert detail in found[check].detail
    assert next(iter(found)) == check


def test_a_store_that_is_away_and_one_that_hangs() -> None:
    soon = Extent(seconds=0.6)
    away = examined(Refuses("get", MailboxUnavailable("connection refused")), soon)
    assert faults(away)["reachable"].detail == "no usable answer: connection refused"
    assert faults(away)["reachable"].advice == UNREACHED

    async def hanging() -> Report:
        box = HangingMailbox(MemoryMailbox())
        box.hang()
        return await examine(Examination((box, box)), soon)

    hangs = asyncio.run(hanging())
    assert faults(hangs)["reachable"].detail.startswith("no answer within")
    assert len(hangs.findings) == 1


def test_calls_that_fail_now_and_then_are_repeated_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradientmail.commands.checks.PAUSE_SECONDS", 0.0)
    store = MemoryMailbox()
    report = examined(FaultyMailbox(store, fail_randomly(Random(5), 0.02)))
    assert report.usable
    assert report.verdict == "This store can be used. See the warnings above."
    warning = report.findings[-1]
    assert (warning.check, warning.state) in [("failures", "warning"), ("tidy", "warning")]


class Slow(WrappedMailbox):
    """Takes its time, and does what was asked even when nobody waits for it any more."""

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(0.2)
        return await act()


def test_what_was_out_of_time_is_not_called_fit_and_leaves_nothing() -> None:
    store = MemoryMailbox()

    async def main() -> tuple[Report, Sequence[str]]:
        box = Slow(store)
        examination = Examination((box, box))
        report = await examine(examination, Extent(keys=10, large_bytes=10, seconds=0.3))
        assert await cleaned(examination) == ()
        await asyncio.sleep(0.5)  # whatever would still land
        return report, await store.list("")

    report, left = asyncio.run(main())
    assert left == ()
    assert not report.usable
    assert report.verdict == "It could not be told in time whether this store can be used."
    states = [(finding.check, finding.state) for finding in report.findings]
    assert states[:3] == [
        ("reachable", "ok"),
        ("read and write", "skipped"),
        ("create once", "skipped"),
    ]


class ReadOnly(MemoryMailbox):
    """Whose credentials may not write."""

    @override
    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        raise MailboxRefused("403 AccessDenied")

    @override
    async def delete(self, keys: Iterable[str], /) -> None:
        raise MailboxRefused("403 AccessDenied")


def test_what_was_never_written_need_not_be_removed() -> None:
    report = examined(ReadOnly())
    assert not report.usable
    assert "tidy" not in {finding.check for finding in report.findings}


def test_what_cannot_be_removed_is_named() -> None:
    report = examined(LosesDeletes())
    tidy = report.findings[-1]
    assert (tidy.check, tidy.state) == ("tidy", "warning")
    assert "objects below doctor-" in tidy.detail


def test_a_folder_is_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--large", "1", "--keys", "20", "--samples", "2"]
    new = tmp_path / "not" / "there"
    assert main(["doctor", str(new), *small]) == 0
    assert list(tmp_path.iterdir()) == []
    shown = capsys.readouterr().out
    assert "This store can be used.\n" in shown
    assert "clock             ok" in shown
    assert "run               ok  none is here yet: the first session makes it" in shown
    assert "Estimate for a month of training: $31.96 (" in shown
    assert "if the store charges by request and gigabyte" in shown

    run = tmp_path / "run"
    (run / "rounds").mkdir(parents=True)
    record = run / "rounds" / "0000000000.json"
    record.write_bytes(b"{}")
    before = record.stat().st_mtime_ns
    assert main(["doctor", f"file://{run}", "--json", *small]) == 0
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "run",
        "run/rounds",
        "run/rounds/0000000000.json",
    ]
    assert (record.read_bytes(), record.stat().st_mtime_ns) == (b"{}", before)
    told = json.loads(capsys.readouterr().out)
    assert told["usable"] is True
    rest = {finding["check"]: finding for finding in told["findings"] if finding["state"] != "ok"}
    assert set(rest) == {"run"}
    assert rest["run"]["detail"] == "rounds of one are here, and its manifest.json is gone"
    assert set(told["monthly_dollars"]) == {"PUT", "LIST", "GET", "storage", "egress"}


def test_a_store_that_cannot_be_used_is_an_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert main(["doctor", str(tmp_path / "file")]) == 1
    assert "gradientmail: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--params", "many"], "not a number like 350M"),
        (["--params", "0"], "not 1 or more"),
        (["--nodes", "0"], "not 1 or more"),
        (["--precision", "F12"], "invalid choice"),
        (["--dtype", "F8_E4M3"], "argument --dtype: invalid choice"),
        (["--large", "x"], "argument --large: x is not a whole number"),
        (
            ["--step-seconds", "nan"],
            "argument --step-seconds: nan is not a number of seconds over 0",
        ),
        (["--poll", "0"], "argument --poll: 0 is not a number of seconds over 0"),
        (["--seconds", "-1"], "argument --seconds: -1 is not"),
        (["again"], "usage: gradientmail doctor"),
    ],
)
def test_wrong_options(options: list[str], advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "memory://x", *options])
    assert ended.value.code == 2
    assert advice in capsys.readouterr().err


def test_options_that_no_run_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "memory://x", "--fragments", "8", "--sync-every", "4"]) == 2
    assert main(["doctor", "memory://x", "--price-egress", "nan"]) == 2
    assert "fragments is at most sync_every" in capsys.readouterr().err


def test_what_moves_the_bill() -> None:
    usual = Plan(nodes=4, parameters=350_000_000, sync_every=100, fragments=10, step_seconds=1.0)
    dollars = sum(monthly_dollars(usual, Prices()).values())
    for cheaper in (
        Plan(4, 350_000_000, sync_every=400, fragments=10, step_seconds=1.0),
        Plan(4, 350_000_000, sync_every=100, fragments=5, step_seconds=1.0),
        Plan(4, 350_000_000, sync_every=100, fragments=10, step_seconds=1.0, poll=5.0),
        Plan(4, 350_000_000, sync_every=100, fragments=10, delta_dtype="F4", commit_dtype="F4"),
        Plan(2, 350_000_000, sync_every=100, fragments=10, step_seconds=1.0),
    ):
        assert sum(monthly_dollars(cheaper, Prices()).values()) < dollars
    away = monthly_dollars(usual, Prices(egress=0.09))
    # 3 followers read 140 MB of commits and the closer 3 deltas of 140 MB, every 10 s.
    assert away["egress"] == pytest.approx(6 * 0.14 * 262_800 * 0.09)


def test_large_payloads_are_several_requests() -> None:
    small, large = (
        requests_of(Plan(2, parameters, sync_every=40, fragments=4))
        for parameters in (4_000_000, 400_000_000)
    )
    # 400 MB go in 16 parts of 25 MiB (8 at a time, twice), with one request to begin, one to end.
    assert large.puts - small.puts == 4 * (2 + 16 - 1)
    assert large.gets - small.gets == pytest.approx(2 * (16 - 1))
