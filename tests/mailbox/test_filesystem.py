"""The store in a folder: the contract, and what is special about folders."""

# ruff: noqa: PTH115, PTH208 - system calls are what is tested.

import asyncio
import errno
import os
import threading
from collections.abc import Buffer, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradientmail.buffers import BufferPool
from gradientmail.mailbox import FilesystemMailbox, filesystem, listing, placing, staging
from gradientmail.testing.mailbox_contract import MailboxContract
from gradientmail.testing.mailbox_races import OpenMailbox, content, fill


def run[T](main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


def refuse(code: int) -> Callable[..., Any]:
    """A system call that fails."""

    def call(*_arguments: Any, **_options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


class TestFilesystemMailbox(MailboxContract):
    @pytest.fixture
    def open_mailbox(self, tmp_path: Path) -> OpenMailbox:
        return lambda: FilesystemMailbox(tmp_path)


class TestWithoutHardLinks(MailboxContract):
    """As on FAT, where ``link`` is not permitted."""

    @pytest.fixture
    def open_mailbox(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenMailbox:
        monkeypatch.setattr(placing.os, "link", refuse(errno.EPERM))
        return lambda: FilesystemMailbox(tmp_path)

    def test_no_folders_stay_behind(self, open_mailbox: OpenMailbox, tmp_path: Path) -> None:
        async def main() -> None:
            mailbox = open_mailbox()
            await fill(mailbox, ["a", "b/c"])
            assert await mailbox.put_if_absent("a", b"") is False

        run(main())
        assert os.listdir(tmp_path / ".tmp") == []


def test_key_is_the_path_and_deleting_leaves_no_folders(tmp_path: Path) -> None:
    async def main() -> None:
        mailbox = FilesystemMailbox(tmp_path)
        assert await mailbox.put_if_absent("a/b/c.json", b"data")
        assert (tmp_path / "a/b/c.json").read_bytes() == b"data"
        (tmp_path / "copied").mkdir()
        (tmp_path / "copied/in").write_bytes(b"from another store")
        assert content(await mailbox.get("copied/in")) == b"from another store"
        await mailbox.delete(["a/b/c.json"])

    run(main())
    assert sorted(os.listdir(tmp_path)) == [".tmp", "copied"]


def test_object_and_folder_of_one_name(tmp_path: Path) -> None:
    """A clear refusal; an empty folder left by somebody else is no hindrance."""

    async def main() -> None:
        mailbox = FilesystemMailbox(tmp_path)
        await fill(mailbox, ["object", "folder/object"])
        for key in ("object/below", "object/below/deep", "folder"):
            with pytest.raises(ValueError, match=r"an object and a folder.*one name"):
                await mailbox.put_if_absent(key, b"")
            assert await mailbox.get(key) is None
        await mailbox.delete(["folder", "object/below"])
        assert list(await mailbox.list("")) == ["folder/object", "object"]
        (tmp_path / "empty").mkdir()
        assert await mailbox.put_if_absent("empty", b"x")
        assert content(await mailbox.get("empty")) == b"x"

    run(main())
    assert os.listdir(tmp_path / ".tmp") == []


def test_names_that_the_file_system_does_not_allow(tmp_path: Path) -> None:
    async def main() -> None:
        mailbox = FilesystemMailbox(tmp_path)
        for key in ("k" * 256, "folder/" + "é" * 128, "k" * 256 + "/object"):
            with pytest.raises(ValueError, match="File name too long; use a shorter key"):
                await mailbox.put_if_absent(key, b"")
            with pytest.raises(ValueError, match="File name too long"):
                await mailbox.get(key)
        for key in (".tmp", ".tmp/file", ".TMP/file"):
            with pytest.raises(ValueError, match="keeps to itself"):
                await mailbox.put_if_absent(key, b"")
        longest = "k" * 255 + "/" + "é" * 127
        assert await mailbox.put_if_absent(longest, b"x")
        assert list(await mailbox.list("k")) == [longest]
        assert list(await mailbox.list(".tmp/")) == list(await mailbox.list(".t")) == []

    run(main())


def test_what_does_not_belong_is_no_object(tmp_path: Path) -> None:
    """Links, pipes, empty folders and names in other encodings; other files are listed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    mailbox = FilesystemMailbox(root)
    (root / ".DS_Store").write_bytes(b"")
    (root / ".tmp/half-written").write_bytes(b"")
    (root / "link").symlink_to(outside / "secret")
    (root / "dangling").symlink_to("nowhere")
    (root / "folder").symlink_to(outside)
    (root / "empty/empty").mkdir(parents=True)
    os.mkfifo(root / "pipe")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe")).write_bytes(b"")

    async def main() -> None:
        assert list(await mailbox.list("")) == [".DS_Store"]
        for key in ("link", "dangling", "pipe", "empty", "empty/empty"):
            assert await mailbox.get(key) is None, key
        refusal = pytest.raises(ValueError, match=r"symbolic link.*must not leave the root")
        with refusal:
            await mailbox.get("folder/secret")
        with refusal:
            await mailbox.put_if_absent("folder/new", b"")
        with refusal:
            await mailbox.delete(["folder/secret"])
        with refusal:
            await mailbox.list("folder/")
        for key in ("link", "dangling", "pipe"):
            with pytest.raises(ValueError, match="cannot hold an object and a folder, or a link"):
                await mailbox.put_if_absent(key, b"")

    run(main())
    assert [path.name for path in outside.iterdir()] == ["secret"]


def test_root_may_be_a_link_a_relative_path_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        relative = FilesystemMailbox("link")
        monkeypatch.chdir("/")
        assert await relative.put_if_absent("key", b"x")
        assert content(await FilesystemMailbox(str(tmp_path / "real")).get("key")) == b"x"
        assert await FilesystemMailbox(tmp_path / "new/deep").put_if_absent("key", b"y")
        assert repr(relative) == f"FilesystemMailbox('{tmp_path}/link')"

    run(main())
    with pytest.raises(NotADirectoryError, match=r"needs a folder.*real/key"):
        FilesystemMailbox(tmp_path / "real/key")
    with pytest.raises(NotADirectoryError, match=r"needs a folder.*real/key'$"):
        FilesystemMailbox(tmp_path / "real/key/deeper/run")
    with pytest.raises(ValueError, match="empty"):
        FilesystemMailbox("")
    with pytest.raises(ValueError, match="URL 's3://bucket/run'"):
        FilesystemMailbox("s3://bucket/run")


def test_a_home_folder_is_not_expanded_and_no_folder_is_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("~/runs", Path("~/runs"), "~"):
        with pytest.raises(ValueError, match="expanded by a shell"):
            FilesystemMailbox(path)
    assert list(tmp_path.iterdir()) == []
    FilesystemMailbox("./~/runs")
    assert [path.name for path in tmp_path.iterdir()] == ["~"]


def test_large_objects_are_read_into_kept_memory(tmp_path: Path) -> None:
    allocated: list[int] = []

    def allocate(nbytes: int) -> memoryview:
        allocated.append(nbytes)
        return memoryview(bytearray(nbytes))

    async def main() -> None:
        mailbox = FilesystemMailbox(tmp_path)
        mailbox._pool = BufferPool(allocate=allocate)
        for number in range(4):
            await mailbox.put_if_absent(f"large/{number}", bytes([number]) * 2**20)
        for number in range(4):
            found = await mailbox.get(f"large/{number}")
            assert isinstance(found, memoryview)
            assert found.readonly
            assert found == bytes([number]) * 2**20
            del found
        held = [await mailbox.get(f"large/{number}") for number in range(2)]
        assert [content(data)[:1] for data in held] == [b"\0", b"\1"]
        await mailbox.put_if_absent("small", b"small")
        assert type(await mailbox.get("small")) is bytes

    run(main())
    assert allocated == [2**20, 2**20]


def test_no_object_is_copied_on_its_way_to_the_disk_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system writes from the very memory that was given, and reads into what is returned."""
    written, read = list[range](), list[range]()
    write, readv = os.write, os.readv

    def place(data: Buffer) -> range:
        found = np.frombuffer(data, np.uint8)
        return range(found.ctypes.data, found.ctypes.data + found.nbytes)

    def writes(descriptor: int, data: Buffer) -> int:
        written.append(place(data))
        return write(descriptor, data)

    def reads(descriptor: int, buffers: Sequence[Buffer]) -> int:
        read.extend(map(place, buffers))
        return readv(descriptor, buffers)

    async def main() -> None:
        mailbox = FilesystemMailbox(tmp_path)
        monkeypatch.setattr(staging, "CHUNK_BYTES", 2**20)
        monkeypatch.setattr(os, "write", writes)
        monkeypatch.setattr(os, "readv", reads)
        data = memoryview(bytearray(range(256)) * 10_000)[8:]
        assert await mailbox.put_if_absent("key", data)
        found = await mailbox.get("key")
        assert found is not None
        monkeypatch.undo()
        whole = place(data)
        assert written == [whole[: 2**20], whole[2**20 : 2**21], whole[2**21 :]]
        assert found == data
        assert read == [place(found)]

    run(main())


def test_nothing_blocks_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox = FilesystemMailbox(tmp_path)
    threads: set[int] = set()
    called: set[str] = set()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            threads.add(threading.get_ident())
            called.add(name)
            return getattr(os, name)

    for module in (filesystem, listing):
        monkeypatch.setattr(module, "os", Watched())

    async def main() -> None:
        await mailbox.put_if_absent("a/b", b"x")
        await mailbox.get("a/b")
        await mailbox.list("a/")
        await mailbox.delete(["a/b"])

    run(main())
    assert {"lstat", "readv", "scandir", "unlink", "rmdir"} <= called
    assert threading.get_ident() not in threads


def test_listing_reads_only_folders_that_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox = FilesystemMailbox(tmp_path)
    run(fill(mailbox, [f"snapshots/{r:03d}/a.json" for r in range(20)] + ["rounds/1.json"]))
    scanned: list[str] = []
    real = os.scandir

    def scandir(path: str) -> Any:
        scanned.append(os.path.relpath(path, tmp_path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert list(run(mailbox.list("rounds/"))) == ["rounds/1.json"]
    assert scanned == ["rounds"]
    scanned.clear()
    assert len(run(mailbox.list("snapshots/00", after="snapshots/007/a.json"))) == 2
    assert scanned == ["snapshots", "snapshots/007", "snapshots/008", "snapshots/009"]


def test_putting_what_exists_does_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox = FilesystemMailbox(tmp_path)
    run(fill(mailbox, ["key"]))
    monkeypatch.setattr(os, "write", refuse(errno.ENOSPC))
    assert run(mailbox.put_if_absent("key", bytes(2**20))) is False


def test_the_callers_buffer_is_let_go(tmp_path: Path) -> None:
    async def main() -> None:
        mailbox, data = FilesystemMailbox(tmp_path), bytearray(b"data")
        for created in (True, False):
            assert await mailbox.put_if_absent("key", data) is created
            data.extend(b"more")
        assert content(await mailbox.get("key")) == b"data"
        with pytest.raises(ValueError, match="contiguous"):
            await mailbox.put_if_absent("other", memoryview(b"abcdef")[::2])

    run(main())


def test_every_name_is_flushed_before_the_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file before it can be seen; then its folder, and each new folder in the one above."""
    log: list[str] = []
    mailbox = FilesystemMailbox(tmp_path)

    def record(name: str, real: Callable[..., Any]) -> None:
        def call(*arguments: Any) -> Any:
            what = arguments[-1] if name == "link" else os.readlink(f"/proc/self/fd/{arguments[0]}")
            log.append(f"{name} {os.path.relpath(what, tmp_path)}".partition(".tmp/")[0])
            return real(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("fdatasync", "fsync", "link"):
        record(name, getattr(os, name))
    run(fill(mailbox, ["a/b/one"]))
    assert log == ["fdatasync ", "link a/b/one", "link a/b/one", "fsync a/b", "fsync .", "fsync a"]
    log.clear()
    run(fill(mailbox, ["a/b/two"]))
    assert log == ["fdatasync ", "link a/b/two", "fsync a/b"]
    run(mailbox.delete(["a/b/one", "a/b/two"]))
    log.clear()
    run(fill(mailbox, ["a/b/one"]))
    assert log[-3:] == ["fsync a/b", "fsync .", "fsync a"]


def test_the_name_of_a_folder_that_another_process_removed_is_flushed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep of a closer removes it when it is empty."""
    flushed: list[str] = []
    real = filesystem.flush_folder

    def record(folder: str) -> None:
        flushed.append(os.path.relpath(folder, tmp_path))
        real(folder)

    monkeypatch.setattr(filesystem, "flush_folder", record)
    learner, closer = FilesystemMailbox(tmp_path), FilesystemMailbox(tmp_path)
    for number in range(3):
        flushed.clear()
        run(fill(learner, [f"snapshots/{number}/a"]))
        assert sorted(flushed) == [".", "snapshots", f"snapshots/{number}"]
        run(closer.delete([f"snapshots/{number}/a"]))
        assert not (tmp_path / "snapshots").exists()
