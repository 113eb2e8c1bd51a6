"""A store in a folder: of one machine, or of a network mount that several machines share.

A key is the path of its object below the root, so that copying the folder copies the run. What
is written lies in ``.tmp`` under the root until it is whole and on the disk, and then gets its
name in one step that never replaces anything. POSIX systems.

Power loss: a put that has returned is on the disk, its bytes flushed before the object can be
seen and the names of it and of its folders after. A delete is not flushed; objects that come
back are deleted again by whoever sweeps.

Links: the root may be a symbolic link or lie behind one. Below it nothing is followed: a key
whose folder is a symbolic link is refused, and a file that is one is no object.
"""

# What matters here is each system call and its errno.
# ruff: noqa: PTH100, PTH102, PTH103, PTH106, PTH108, PTH112, PTH114, PTH118, PTH120

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Buffer, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from gradientmail.buffers import HOST
from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.base import POOLED_BYTES, RESERVED, check_key, check_size, flat, is_key
from gradientmail.mailbox.listing import list_keys
from gradientmail.mailbox.os_errors import NEVER_THERE, NOTHING_THERE, translated
from gradientmail.mailbox.placing import TRIES, can_link, link_once, rename_once
from gradientmail.mailbox.staging import Staging, flush_folder

KNOWN_FOLDERS = 4096
"""How many folders whose names are on the disk are remembered."""


class FilesystemMailbox:
    """Objects as files below ``path``. Safe from many processes, machines, threads and loops.

    I/O runs in the default executor of the running event loop. A cancelled put creates the
    object from the bytes as they were before the cancellation, or not at all.

    Raises ``MailboxUnavailable`` when the disk or the mount does not answer, or when the root is
    gone: it is never made again behind a running run's back. A full disk, missing permission and
    the like are ``OSError`` with the system's ``errno``. ``ValueError`` for a key that this store
    cannot hold: one that ``check_key`` refuses, one below ``.tmp``, a part longer than the file
    system's names, or an object where another key has a folder (``a`` beside ``a/b``).
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        """Open the store at ``path``, making the folder if there is none.

        Also removes what writers that were killed left unfinished. With ``create=False`` opening
        it changes nothing, for who only reads, and a folder that is missing is an error.
        """
        if not os.fspath(path):
            raise ValueError("FilesystemMailbox needs the path of a folder, got an empty one")
        if "://" in os.fspath(path):
            raise ValueError(f"FilesystemMailbox needs the path of a folder, not the URL {path!r}")
        if os.fspath(path).startswith("~"):
            raise ValueError(
                f"{os.fspath(path)!r}: ~ is expanded by a shell, not here; write the whole path (a "
                f"folder that is really called so is ./{os.fspath(path)})"
            )
        self.path = os.path.abspath(os.fspath(path))
        self._staging = Staging(self.path)
        self._pool = HOST
        self._known_folders: set[str] = set()
        self._links: bool | None = None
        found = self.path
        while not os.path.lexists(found) and found != os.path.dirname(found):
            found = os.path.dirname(found)
        if os.path.lexists(found) and not os.path.isdir(found):
            raise NotADirectoryError(
                errno.ENOTDIR, "a mailbox needs a folder, and something else is there", found
            )
        if not create:
            try:
                Path(self.path).stat()  # not ``isdir``: what may not be looked at is not missing
            except FileNotFoundError:
                missing = "there is no such folder"
                raise FileNotFoundError(errno.ENOENT, missing, self.path) from None
            return
        with translated("opening the mailbox", self.path):
            if not os.path.isdir(self.path):
                os.makedirs(self.path, exist_ok=True)
                with suppress(OSError):  # the folder above may be one that cannot be read
                    flush_folder(os.path.dirname(self.path))
            try:
                self._open_staging()
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                    raise  # with those it can still be read; a put will say why it cannot write

    def __repr__(self) -> str:
        """As the constructor is called."""
        return f"FilesystemMailbox({self.path!r})"

    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        """Create ``key`` with ``data``, on the disk when this returns; False when it exists."""
        abandoned = threading.Event()
        try:
            return await asyncio.to_thread(self._put, key, data, abandoned)
        finally:
            abandoned.set()

    async def get(self, key: str, /) -> Buffer | None:
        """The object, read-only; a large one in memory that is reused once no view is left."""
        return await asyncio.to_thread(self._get, key)

    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        """The keys of all regular files with this prefix and beyond ``after``.

        Only folders that can hold such keys are read. Names that are not UTF-8 are left out.
        """
        return await asyncio.to_thread(self._list, prefix, after)

    async def delete(self, keys: Iterable[str], /) -> None:
        """Remove ``keys``, all of them checked before the first is removed, and empty folders."""
        await asyncio.to_thread(self._delete, tuple(keys))

    # Everything below runs in a thread.

    def _put(self, key: str, data: Buffer, abandoned: threading.Event) -> bool:
        path = self._path(key)
        with translated("putting", path), flat(data) as view:
            self._check_folders(path)
            try:
                if self._exists(path):
                    return False
                source = self._write(view, abandoned)
                try:
                    created = self._place(source, path, key)
                finally:
                    _remove(source)
            except NotADirectoryError:
                self._check_root()
                raise
            if created:
                self._flush_names(path)
            return created

    def _write(self, view: memoryview, abandoned: threading.Event) -> str:
        for _ in range(TRIES):
            try:
                if self._links is None:
                    self._open_staging()
                return self._staging.write(view, abandoned)
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
        raise MailboxUnavailable(f"{self._staging.folder} is removed as fast as it is made")

    def _place(self, source: str, path: str, key: str) -> bool:
        """Give ``source`` its name; False when an object has it, or had it at that moment."""
        try:
            if self._links:
                created = link_once(source, path, self._make_folder)
            else:
                turn = self._staging.turn_path(key)
                created = rename_once(source, path, turn, self._make_folder)
        except FileNotFoundError as error:
            raise MailboxUnavailable(f"{source} was removed while it was written") from error
        if not created:
            _refuse_folder(path)
        return created

    def _exists(self, path: str) -> bool:
        """Whether ``path`` is an object. A left-over empty folder with its name is removed.

        It is opened because an NFS client may answer from memory when only asked for its status.
        """
        descriptor = _open_to_read(path)
        if descriptor is not None:
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    return True
            finally:
                os.close(descriptor)
            with suppress(OSError):
                os.rmdir(path)
        _refuse_folder(path)
        return False

    def _get(self, key: str) -> Buffer | None:
        path = self._path(key)
        with translated("reading", path):
            self._check_folders(path)
            descriptor = _open_to_read(path)
            if descriptor is None:
                self._look_again(path)
                descriptor = _open_to_read(path)
            if descriptor is None:
                self._check_root()
                return None
            try:
                return self._read(descriptor, key)
            finally:
                os.close(descriptor)

    def _read(self, descriptor: int, key: str) -> Buffer | None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if check_size(key, status.st_size) < POOLED_BYTES:
            buffer = memoryview(bytearray(status.st_size))
        else:
            buffer = self._pool.take(status.st_size)
        done = 0
        while done < buffer.nbytes:
            count = os.readv(descriptor, [buffer[done:]])
            if count == 0:
                break
            done += count
        return bytes(buffer[:done]) if done < POOLED_BYTES else buffer[:done].toreadonly()

    def _list(self, prefix: str, after: str) -> Sequence[str]:
        base = prefix[: prefix.rfind("/") + 1]
        if base and not is_key(base[:-1]):
            return ()
        with translated("listing", os.path.join(self.path, prefix)):
            folder = os.path.join(self.path, base)
            self._check_folders(folder)
            self._look_again(folder)
            keys = list_keys(self.path, prefix, after)
            if not keys:
                self._check_root()
            return keys

    def _delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        with translated("deleting in", self.path):
            for folder in {os.path.dirname(path) for path in paths}:
                self._check_folders(os.path.join(folder, ""))
            missing = [path for path in paths if not _remove(path)]
            for folder in {os.path.dirname(path) for path in missing}:
                self._look_again(os.path.join(folder, ""))
            for path in missing:
                _remove(path)
            for folder in {os.path.dirname(path) for path in paths}:
                self._prune(folder)
            if missing:
                self._check_root()

    def _path(self, key: str) -> str:
        """The path of a key; ``ValueError`` for a key that leaves the root or enters ``.tmp``."""
        if check_key(key).partition("/")[0].casefold() == RESERVED:
            raise ValueError(
                f"mailbox key {key!r} lies in {RESERVED}, which the store keeps to itself"
            )
        return os.path.join(self.path, key)

    def _folders(self, path: str) -> Sequence[str]:
        """The folders on the way from the root, which is the first, down to ``path``."""
        folders = [os.path.dirname(path)]
        while folders[-1] != self.path:
            folders.append(os.path.dirname(folders[-1]))
        return folders[::-1]

    def _check_folders(self, path: str) -> None:
        """Refuse a path that leads through a symbolic link below the root."""
        for folder in self._folders(path)[1:]:
            try:
                mode = os.lstat(folder).st_mode
            except OSError as error:
                if error.errno in NEVER_THERE:
                    return
                raise
            if stat.S_ISLNK(mode):
                raise ValueError(f"{folder} is a symbolic link, and keys must not leave the root")

    def _make_folder(self, folder: str) -> None:
        """Make ``folder`` and those above it, but never the root."""
        for each in self._folders(os.path.join(folder, ""))[1:]:
            with suppress(FileExistsError):
                try:
                    os.mkdir(each)
                    self._known_folders.discard(each)  # it may be there anew, its name unflushed
                except FileNotFoundError:  # the one above was empty again, and removed
                    self._check_root()
                    return

    def _flush_names(self, path: str) -> None:
        """Put on the disk that the folder of ``path`` names it, and that each above names the next.

        A folder's own name is flushed once, by every process that puts something into it: the one
        that made it may not have come to that yet.
        """
        folders = self._folders(path)
        if len(self._known_folders) > KNOWN_FOLDERS:
            self._known_folders.clear()
        with suppress(FileNotFoundError):  # deleted already, and the folder with it
            flush_folder(folders[-1])
            for above, folder in pairwise(folders):
                if folder not in self._known_folders:
                    flush_folder(above)
                    self._known_folders.add(folder)

    def _prune(self, folder: str) -> None:
        """Remove ``folder`` if it is empty, then the one above. A put that needs one remakes it."""
        while folder != self.path:
            try:
                os.rmdir(folder)
            except OSError:
                return
            self._known_folders.discard(folder)
            folder = os.path.dirname(folder)

    def _look_again(self, path: str) -> None:
        """Open the folders down to ``path``.

        An NFS client may answer from its memory that a name is missing; opening a folder makes
        it ask the server whether that folder has changed. On other systems this costs little.
        """
        with suppress(OSError):
            for folder in self._folders(path):
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def _open_staging(self) -> None:
        """Make ``.tmp``, find out whether it can have hard links, remove dead writers' files."""
        with suppress(FileExistsError):
            os.mkdir(self._staging.folder)
        self._links = can_link(self._staging.new_path())
        self._staging.clean()

    def _check_root(self) -> None:
        """Raise when the root that was opened is gone: deleted, or its file system not mounted.

        What is left then is no folder or an empty one, perhaps a bare mount point. Where objects
        are but no ``.tmp``, only that was removed.
        """
        if os.path.isdir(self.path if self._links is None else self._staging.folder):
            return
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            if next(entries, None) is not None:
                self._open_staging()
                return
        raise MailboxUnavailable(
            f"the mailbox folder {self.path} was deleted or is not mounted: bring it back, and the "
            f"run goes on; to begin a new one there, start all its processes again"
        )


def _refuse_folder(path: str) -> None:
    """Raise when something that is no object has the name ``path``."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def _open_to_read(path: str) -> int | None:
    """A descriptor, None when no object is there. Does not wait on a pipe, nor follow a link."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in NOTHING_THERE:
            return None
        raise


def _remove(path: str) -> bool:
    """Unlink ``path``; False when no file is there."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (IsADirectoryError, PermissionError):  # the first on Linux, the other on macOS
        if os.path.isdir(path) and not os.path.islink(path):
            return False
        raise
    return True
