"""Writes in progress: whole, durable files that have no key yet, and the tidying of dead ones.

They lie in the folder ``.tmp`` under a mailbox's root and are named for their writer,
``{host}-{pid}-{random}``, so that those of a process that was killed can be told from those of
one that is still writing.
"""

# What matters here is each system call and its errno.
# ruff: noqa: PTH106, PTH108, PTH116, PTH118

import hashlib
import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress

from gradientmail.mailbox.base import RESERVED, Abandoned
from gradientmail.mailbox.os_errors import NO_FOLDER_FLUSH

OLD_SECONDS = 86_400.0
"""Age after which a file is taken for abandoned, wherever its writer ran."""

CHUNK_BYTES = 8 * 2**20
"""How much is written between two looks at whether the caller still wants it."""

TURN = "turn-"
"""First part of the names of the folders in which ``placing.rename_once`` takes turns."""


class Staging:
    """The folder of writes in progress below ``root``."""

    def __init__(self, root: str) -> None:
        """Name the folder; nothing is touched."""
        self.folder = os.path.join(root, RESERVED)
        self._host = _host()

    def new_path(self) -> str:
        """A path in the folder that nothing has, named for this process."""
        return os.path.join(self.folder, f"{self._host}-{os.getpid()}-{secrets.token_hex(8)}")

    def turn_path(self, key: str) -> str:
        """The folder of ``placing.rename_once`` for ``key``, the same on every machine."""
        return os.path.join(self.folder, TURN + hashlib.sha256(key.encode()).hexdigest())

    def write(self, data: memoryview, abandoned: threading.Event) -> str:
        """Write ``data`` to a new file here, flushed to the disk; its path.

        Nothing is left behind when this raises. ``Abandoned`` when the event is set before all
        is written: so what comes out was read from ``data`` while the caller was still waiting,
        and is never mixed with what the caller wrote into its buffer afterwards.
        """
        path = self.new_path()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                _write(descriptor, data, abandoned)
                flush(descriptor)
            finally:
                os.close(descriptor)  # NFS reports a full disk here
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        return path

    def clean(self) -> None:
        """Remove what dead writers left: of this host when the process is gone, else when old."""
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                dead = self._is_dead(entry)
                if entry.is_dir(follow_symlinks=False) and (dead or entry.name.startswith(TURN)):
                    self._clean_folder(entry.path)
                elif dead:
                    with suppress(OSError):
                        os.unlink(entry.path)

    def _clean_folder(self, folder: str) -> None:
        """The same inside a folder of ``placing.rename_once``, then the folder if it is empty."""
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if self._is_dead(entry):
                    with suppress(OSError):
                        os.unlink(entry.path)
        with suppress(OSError):
            os.rmdir(folder)

    def _is_dead(self, entry: os.DirEntry[str]) -> bool:
        host, _, rest = entry.name.partition("-")
        pid = rest.partition("-")[0]
        if host == self._host and pid.isascii() and pid.isdigit() and not _is_running(int(pid)):
            return True
        try:
            return time.time() - entry.stat(follow_symlinks=False).st_mtime > OLD_SECONDS
        except OSError:
            return False


def flush(descriptor: int) -> None:
    """Return when the file's data, and what is needed to read it again, is on the disk.

    On macOS ``fsync`` leaves the data in the drive's own cache; ``F_FULLFSYNC`` does not.
    """
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
        return
    import fcntl

    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
        except OSError:  # network mounts do not know it
            pass
        else:
            return
    os.fsync(descriptor)


def flush_folder(folder: str) -> None:
    """Return when the names in ``folder`` are on the disk, as far as the file system can tell."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_FLUSH:
            raise
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: memoryview, abandoned: threading.Event) -> None:
    """Write all of ``data``, a chunk at a time.

    Telling Linux that a chunk is not needed makes it start writing that chunk out while the next
    one is copied; dirty pages stay cached, so that readers on this machine still find them.
    """
    advise = getattr(os, "posix_fadvise", None)
    done = 0
    while done < data.nbytes:
        written = os.write(descriptor, data[done : done + CHUNK_BYTES])
        if advise is not None and data.nbytes > CHUNK_BYTES:
            with suppress(OSError):
                advise(descriptor, done, written, os.POSIX_FADV_DONTNEED)
        done += written
        if abandoned.is_set():
            raise Abandoned


def _host() -> str:
    """The host's name, and on Linux the number of the namespace that its process ids belong to.

    Containers that share a host's name do not share process ids.
    """
    name = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())[:100]
    try:
        return f"{name}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return name


def _is_running(pid: int) -> bool:
    """Whether a process of this host has this id; True when that cannot be told."""
    if os.name != "posix":
        return True  # there, signal 0 would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return pid > 0
