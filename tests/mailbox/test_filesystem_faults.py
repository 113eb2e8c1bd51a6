"""The store in a folder when the system refuses: what is raised, and that nothing is left."""

# ruff: noqa: PTH108, PTH208 - system calls are what is tested.

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox import FilesystemMailbox, placing, staging
from gradientmail.mailbox.os_errors import ADVICE, CONFLICT, NAMING, UNAVAILABLE, translate
from gradientmail.testing.mailbox_races import content


def run[T](main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


def refuse(code: int) -> Callable[..., Any]:
    def call(*_arguments: Any, **_options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def test_what_was_done_is_said_without_a_path_to_end_with() -> None:
    error = translate(OSError(errno.EACCES, ""), "deleting in", "/the/path")
    assert "denied while deleting; this user" in str(error)
    away = translate(OSError(errno.EIO, ""), "deleting in", "/the/path")
    assert str(away).startswith("deleting in /the/path: ")


@pytest.mark.parametrize("code", sorted(errno.errorcode), ids=lambda code: errno.errorcode[code])
def test_every_errno_has_one_treatment(code: int) -> None:
    error = translate(OSError(code, os.strerror(code)), "putting", "/the/path")
    assert "/the/path" in str(error)
    assert os.strerror(code) in str(error) or code in CONFLICT
    kinds = [code in table for table in (UNAVAILABLE, NAMING, CONFLICT, ADVICE)]
    assert sum(kinds) <= 1
    if code in UNAVAILABLE:
        assert type(error) is MailboxUnavailable
    elif code in NAMING | CONFLICT:
        assert type(error) is ValueError
    else:
        assert isinstance(error, OSError)
        assert (error.errno, error.filename) == (code, "/the/path")
        assert ADVICE.get(code, "") in str(error)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("EIO", MailboxUnavailable),
        ("ESTALE", MailboxUnavailable),
        ("ETIMEDOUT", MailboxUnavailable),
        ("ENOTCONN", MailboxUnavailable),
        ("ENOSPC", OSError),
        ("EDQUOT", OSError),
        ("EFBIG", OSError),
        ("EROFS", OSError),
        ("EACCES", PermissionError),
        ("EMFILE", OSError),
        ("ENAMETOOLONG", ValueError),
    ],
)
@pytest.mark.parametrize("call", ["write", "fdatasync", "close", "link", "open", "mkdir", "lstat"])
def test_failed_put_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    name: str,
    expected: type[Exception],
) -> None:
    mailbox = FilesystemMailbox(tmp_path)
    real_close = os.close
    with monkeypatch.context() as patch:
        failing = refuse(getattr(errno, name))

        def close(descriptor: int) -> None:
            real_close(descriptor)
            failing()

        patch.setattr(os, call, close if call == "close" else failing)
        with pytest.raises(expected) as caught:
            mailbox._put("folder/key", b"data" * 1000, staging.threading.Event())
    assert type(caught.value) is type(translate(OSError(getattr(errno, name), ""), "", ""))
    assert os.listdir(tmp_path / ".tmp") == []
    assert run(mailbox.list("")) == []
    assert run(mailbox.put_if_absent("folder/key", b"data")) is True


@pytest.mark.parametrize("call", ["open", "readv", "scandir", "unlink"])
def test_other_operations_translate_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    mailbox = FilesystemMailbox(tmp_path)
    run(mailbox.put_if_absent("a/key", b"data"))

    async def operate() -> None:
        if call == "scandir":
            await mailbox.list("a/")
        elif call == "unlink":
            await mailbox.delete(["a/key"])
        else:
            await mailbox.get("a/key")

    for code, expected in ((errno.ESTALE, MailboxUnavailable), (errno.EACCES, PermissionError)):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse(code))
            with pytest.raises(expected, match=os.strerror(code)):
                run(operate())
    assert run(mailbox.list("a/")) == ["a/key"]


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_link_that_landed_unheard_is_a_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """NFS sends a request again when the answer is lost, and finds its own link."""
    mailbox = FilesystemMailbox(tmp_path)
    real = os.link

    def link(source: str, target: str) -> None:
        real(source, target)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(placing.os, "link", link)
        assert run(mailbox.put_if_absent("key", b"data")) is True
        assert run(mailbox.put_if_absent("key", b"other")) is False
    assert content(run(mailbox.get("key"))) == b"data"


def test_rename_that_landed_unheard_is_a_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hard links: the file is not there to be taken back, so it has its name."""
    mailbox = FilesystemMailbox(tmp_path)
    mailbox._links = False
    real = os.rename

    def rename(source: str, target: str) -> None:
        real(source, target)
        if target == str(tmp_path / "key"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(placing.os, "rename", rename)
        assert run(mailbox.put_if_absent("key", b"data")) is True
    assert content(run(mailbox.get("key"))) == b"data"


def test_turn_that_nobody_ends_is_no_hindrance(tmp_path: Path) -> None:
    """A writer elsewhere may die with its turn after an object came from another store."""
    (tmp_path / "turn").mkdir()
    for name in ("turn/elsewhere", "source", "target"):
        (tmp_path / name).write_bytes(name.encode())
    source, target, turn = (str(tmp_path / name) for name in ("source", "target", "turn"))
    assert placing.rename_once(source, target, turn, os.mkdir) is False
    assert (tmp_path / "target").read_bytes() == b"target"
    assert sorted(os.listdir(tmp_path)) == ["target", "turn"]


def test_names_that_nfs_remembers_as_missing_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client to which everything is missing until the folders above have been opened anew."""
    mailbox = FilesystemMailbox(tmp_path)
    opened: list[str] = []

    def remembering(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: str, *arguments: Any, **options: Any) -> Any:
            below = os.path.relpath(path, tmp_path)
            hidden = below == "a/b/key" or (name == "scandir" and below == "a/b")
            if hidden and opened[-3:] != [".", "a", "a/b"]:
                raise FileNotFoundError(errno.ENOENT, "remembered", path)
            if name == "open" and arguments[0] & os.O_DIRECTORY:
                opened.append(below)
            return real(path, *arguments, **options)

        return call

    run(mailbox.put_if_absent("a/b/key", b"data"))
    for name in ("open", "scandir", "unlink"):
        monkeypatch.setattr(os, name, remembering(name))
    assert content(run(mailbox.get("a/b/key"))) == b"data"
    opened.clear()
    assert run(mailbox.list("a/b/")) == ["a/b/key"]
    opened.clear()
    run(mailbox.delete(["a/b/key"]))
    assert not (tmp_path / "a").exists()


def assert_unavailable(mailbox: FilesystemMailbox) -> None:
    operations: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: mailbox.put_if_absent("new/key", b""),
        lambda: mailbox.get("a/key"),
        lambda: mailbox.list("a/"),
        lambda: mailbox.list(""),
        lambda: mailbox.delete(["a/key"]),
    ]
    for operation in operations:
        with pytest.raises(
            MailboxUnavailable, match="was deleted or is not mounted: bring it back"
        ):
            run(operation())


def test_lost_root_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "run"
    mailbox = FilesystemMailbox(root)
    run(mailbox.put_if_absent("a/key", b"data"))
    root.rename(tmp_path / "elsewhere")
    assert_unavailable(mailbox)
    assert not root.exists()
    root.mkdir()  # as an empty mount point is
    assert_unavailable(mailbox)
    assert os.listdir(root) == []
    root.rmdir()
    root.write_bytes(b"a file")
    assert_unavailable(mailbox)
    root.unlink()
    (tmp_path / "elsewhere").rename(root)
    assert content(run(mailbox.get("a/key"))) == b"data"
    assert run(mailbox.put_if_absent("new/key", b"")) is True


def test_lost_staging_folder_is_made_again(tmp_path: Path) -> None:
    mailbox = FilesystemMailbox(tmp_path)
    run(mailbox.put_if_absent("a/key", b"data"))
    shutil.rmtree(tmp_path / ".tmp")
    assert run(mailbox.get("missing")) is None
    shutil.rmtree(tmp_path / ".tmp")
    assert run(mailbox.put_if_absent("b/key", b"data")) is True
    assert run(mailbox.list("")) == ["a/key", "b/key"]


def test_staging_file_removed_during_a_put_is_transient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox = FilesystemMailbox(tmp_path)
    real = os.link

    def link(source: str, target: str) -> None:
        os.unlink(source)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(placing.os, "link", link)
        with pytest.raises(MailboxUnavailable, match="removed while it was written"):
            run(mailbox.put_if_absent("key", b"data"))
    assert run(mailbox.put_if_absent("key", b"data")) is True


def test_read_only_folder_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_bytes(b"data")
    monkeypatch.setattr(os, "mkdir", refuse(errno.EROFS))
    mailbox = FilesystemMailbox(tmp_path)
    assert content(run(mailbox.get("key"))) == b"data"
    assert run(mailbox.get("missing")) is None
    assert run(mailbox.list("")) == ["key"]
    with pytest.raises(OSError, match=r"Read-only file system.*mount it for writing"):
        run(mailbox.put_if_absent("new", b"data"))


def test_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    FilesystemMailbox(tmp_path)
    folder = tmp_path / ".tmp"
    host = staging._host()
    old = time.time() - staging.OLD_SECONDS - 60
    dead = 2**22 + 1  # above the largest id that Linux gives
    kept = [f"{host}-{os.getpid()}-a", f"other-{dead}-b", f"{host}-x-c", "stray"]
    gone = [f"{host}-{dead}-d", f"other-{dead}-e", f"{host}-{os.getpid()}-f", "old stray"]
    for name in kept + gone:
        (folder / name).write_bytes(b"half")
    for name in gone[1:]:
        os.utime(folder / name, (old, old))
    for name in (f"turn-1/{gone[0]}", f"turn-2/{kept[0]}", f"{gone[0]}.d/{gone[0]}"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"half")
    (folder / f"{kept[0]}.d").mkdir()
    (folder / "turn-3").mkdir()
    FilesystemMailbox(tmp_path)
    assert sorted(os.listdir(folder)) == sorted([*kept, f"{kept[0]}.d", "turn-2"])
    assert os.listdir(folder / "turn-2") == [kept[0]]
