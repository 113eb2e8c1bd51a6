"""What an error of the operating system means for a mailbox in a folder: one table.

* ``UNAVAILABLE``: the file system is away or in trouble; ``MailboxUnavailable``, retried above.
* ``NAMING``, ``CONFLICT``: the folder cannot hold an object of this name; ``ValueError``.
* everything else is an ``OSError`` with the same ``errno``, with ``ADVICE`` in its message.
"""

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager

from gradientmail.errors import MailboxUnavailable


def _codes(*names: str) -> frozenset[int]:
    """The numbers of those of ``names`` that this platform has."""
    return frozenset(getattr(errno, name) for name in names if hasattr(errno, name))


UNAVAILABLE = _codes(
    "EIO",
    "ESTALE",
    "ETIMEDOUT",
    "ENOTCONN",
    "ECONNREFUSED",
    "ECONNRESET",
    "ECONNABORTED",
    "EHOSTDOWN",
    "EHOSTUNREACH",
    "ENETDOWN",
    "ENETRESET",
    "ENETUNREACH",
    "ESHUTDOWN",
    "EPIPE",
    "ENODEV",
    "ENXIO",
    "EREMOTEIO",
    "ENOLINK",
    "ECOMM",
    "EPROTO",
    "EAGAIN",
    "EBUSY",
    "EINTR",
    "ENOLCK",
)
"""The disk, the mount or the server behind it does not answer now."""

NAMING = _codes("ENAMETOOLONG", "EILSEQ")
"""A part of the key is longer than the file system allows, or has characters it refuses."""

CONFLICT = _codes("ENOTDIR", "EISDIR", "ELOOP")
"""An object stands where a put needs a folder, or a folder or a link where it needs a name."""

NOTHING_THERE = _codes("ENOENT", "ENOTDIR", "ELOOP", "ENXIO")
"""What opening answers when no object has this name: none, below an object, a link, a socket."""

NEVER_THERE = NOTHING_THERE | {errno.ENAMETOOLONG}
"""What a folder answers that is not there or cannot be."""

NO_HARD_LINKS = _codes(
    "EPERM", "EACCES", "EOPNOTSUPP", "ENOTSUP", "ENOSYS", "EMLINK", "EINVAL", "ENOTTY"
)
"""What file systems without hard links answer to ``link`` in a folder that can be written."""

NO_FOLDER_FLUSH = _codes("EINVAL", "EOPNOTSUPP", "ENOTSUP", "ENOSYS", "EBADF", "ENOTTY")
"""What file systems that cannot flush a folder answer to ``fsync`` on one."""

ADVICE = {
    errno.ENOSPC: "the file system is full: free space there, or move the run",
    errno.EDQUOT: "the disk quota is used up: free space, or raise it",
    errno.EFBIG: "a file of this size is not allowed there: raise the limit (ulimit -f)",
    errno.EROFS: "the file system is read-only: mount it for writing",
    errno.EACCES: "this user may not do that: check the folder's owner and permissions",
    errno.EPERM: "the file system does not allow it: check the folder's owner and attributes",
    errno.EMFILE: "this process has too many files open: raise the limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open",
    errno.EXDEV: "a mailbox must lie in one file system: no mounts inside it",
}


def translate(error: OSError, doing: str, path: str) -> Exception:
    """The error to raise instead of ``error``, which came up while ``doing`` ``path``."""
    code = error.errno
    if code is None:
        return error
    reason = os.strerror(code)
    if code in UNAVAILABLE:
        return MailboxUnavailable(f"{doing} {path}: {reason}")
    if code in NAMING:
        return ValueError(f"{doing} {path}: {reason}; use a shorter key or plain characters")
    if code in CONFLICT:
        return ValueError(
            f"{doing} {path}: a folder store cannot hold an object and a folder, or a link, of one "
            f"name; use another key or remove what is there"
        )
    advice = f"; {ADVICE[code]}" if code in ADVICE else ""
    return OSError(code, f"{reason} while {doing.removesuffix(' in')}{advice}", path)


@contextmanager
def translated(doing: str, path: str) -> Generator[None]:
    """Raise the translation of every ``OSError`` that leaves the block."""
    try:
        yield
    except OSError as error:
        raise translate(error, doing, path) from error
