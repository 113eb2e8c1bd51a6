"""Two ways to give a whole file a name that nothing has, never replacing anything.

``link_once`` is a hard link, which every local file system of Unix and NFS can do.
``rename_once`` serves the others (FAT and exFAT, some SMB and FUSE mounts), with no more than
``mkdir`` and ``rename``, and with no lock that a killed process could leave closed.
"""

# What matters here is each system call and its errno.
# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH116, PTH118, PTH119, PTH120, PTH208

import errno
import os
from collections.abc import Callable
from contextlib import suppress

from gradientmail.errors import MailboxUnavailable
from gradientmail.mailbox.os_errors import NO_HARD_LINKS, UNAVAILABLE

type MakeFolder = Callable[[str], None]
"""Makes a folder that is missing, and those above it."""

TRIES = 1000
"""How often a step is repeated that others can undo; each repeat means that one of them got on."""


def can_link(source: str) -> bool:
    """Whether files can have hard links where ``source`` is, a file made to find out."""
    os.close(os.open(source, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        os.link(source, source + ".l")
    except OSError as error:
        if error.errno in NO_HARD_LINKS:
            return False
        raise
    finally:
        for path in (source, source + ".l"):
            with suppress(OSError):
                os.unlink(path)
    return True


def link_once(source: str, target: str, make_folder: MakeFolder) -> bool:
    """Link ``source`` to ``target``; False when something has that name already.

    An error may hide a success: an NFS client that gets no answer sends the request again, and
    the server then finds the link that the first one made. ``source`` has one link more if so.
    """
    for _ in range(TRIES):
        try:
            os.link(source, target)
        except FileNotFoundError:
            _require(source)
            make_folder(os.path.dirname(target))
        except OSError as error:
            if (error.errno == errno.EEXIST or error.errno in UNAVAILABLE) and _linked(source):
                return True
            if error.errno == errno.EEXIST:
                return False
            raise
        else:
            return True
    raise MailboxUnavailable(f"the folder of {target} is removed as fast as it is made")


def _linked(source: str) -> bool:
    try:
        return os.stat(source).st_nlink > 1
    except OSError:
        return False


def rename_once(source: str, target: str, turn: str, make_folder: MakeFolder) -> bool:
    """Move ``source`` to ``target``; False when something has that name already.

    ``turn`` is a folder name that belongs to this target alone, beside ``source``. A writer
    moves its file into a folder of its own and renames that folder to ``turn``. A folder can be
    renamed onto an empty one but not onto one with something in it, so at most one file is in
    ``turn``: it has the turn. Only then does its writer look whether ``target`` exists; if not it
    moves the file there, which ends the turn by publishing it.

    * Nothing is replaced. The next turn starts after the last one's file has left ``turn``, that
      is after it became ``target`` or its writer took it back, and looks after it has started.
    * A writer that dies with the turn blocks nobody: whoever finds a turn taken and no target
      moves the file in it for its writer. Only one of several such moves finds the file.
    * Others only ever move the file, its writer alone takes it back. So a writer that wants to
      take it back because a target exists, and finds it gone, has been published.
    """
    name = os.path.basename(source)
    own = source + ".d"
    os.mkdir(own)
    try:
        os.rename(source, os.path.join(own, name))
        for _ in range(TRIES):
            if os.path.lexists(target):
                return False
            if _take_turn(own, turn):
                return _settle(os.path.join(turn, name), target, make_folder)
            _finish(turn, target, make_folder)
    finally:
        for path in (os.path.join(own, name), source):
            with suppress(OSError):
                os.unlink(path)
        for folder in (own, turn):
            with suppress(OSError):
                os.rmdir(folder)
    raise MailboxUnavailable(f"others write {target} all the time; try again")


def _take_turn(own: str, turn: str) -> bool:
    """Rename the folder ``own`` to ``turn``; False when that one has something in it."""
    try:
        os.rename(own, turn)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        with suppress(OSError):
            os.rmdir(turn)  # some systems refuse to rename onto an empty folder, too
        return False
    return True


def _settle(waiting: str, target: str, make_folder: MakeFolder) -> bool:
    """End this writer's turn: True when its file ``waiting`` became ``target``."""
    for _ in range(TRIES):
        if os.path.lexists(target):
            return not _take_back(waiting)
        try:
            os.rename(waiting, target)
        except FileNotFoundError:
            if not os.path.lexists(waiting):
                return True
            make_folder(os.path.dirname(target))
        except OSError:
            if _take_back(waiting):
                raise
            return True
        else:
            return True
    raise MailboxUnavailable(f"the folder of {target} is removed as fast as it is made")


def _take_back(waiting: str) -> bool:
    """Remove this writer's file; False when another writer has published it."""
    try:
        os.unlink(waiting)
    except FileNotFoundError:
        return False
    return True


def _finish(turn: str, target: str, make_folder: MakeFolder) -> None:
    """Publish the file of whoever has the turn, unless its target exists."""
    try:
        names = os.listdir(turn)
    except FileNotFoundError:
        return
    for name in names:
        if os.path.lexists(target):
            return
        try:
            os.rename(os.path.join(turn, name), target)
        except FileNotFoundError:
            make_folder(os.path.dirname(target))


def _require(source: str) -> None:
    """Raise if ``source``, a file of this process, is gone: the staging folder was emptied."""
    if not os.path.lexists(source):
        raise MailboxUnavailable(f"{source} was removed while it was written; try again")
