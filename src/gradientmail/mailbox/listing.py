"""The keys below a folder, in order, reading only the folders that can hold them."""

import os
from collections.abc import Sequence

from gradientmail.mailbox.base import is_key
from gradientmail.mailbox.os_errors import NEVER_THERE


def list_keys(root: str, prefix: str, after: str) -> Sequence[str]:
    """The keys of the regular files below ``root``, as ``Mailbox.list`` orders and cuts them.

    Symbolic links are not followed, and names that no put could have made are left out. Folders
    that come and go meanwhile are no error; other ``OSError`` propagates.
    """
    keys: list[str] = []
    pending = [prefix[: prefix.rfind("/") + 1]]
    while pending:
        key = pending.pop()
        if key and not key.endswith("/"):
            keys.append(key)
        else:
            pending.extend(reversed(_children(root, key, prefix, after)))
    return keys


def _children(root: str, base: str, prefix: str, after: str) -> Sequence[str]:
    """Keys of the objects in the folder ``base``, and of its folders with ``/`` at the end.

    Sorted like that they are in the order of the whole keys below them: ``a-b`` comes before
    ``a.b`` and that before what is in ``a/``. Code points sort as their UTF-8 bytes do.
    """
    children: list[str] = []
    try:
        with os.scandir(f"{root}/{base}") as entries:
            for entry in entries:
                child = base + entry.name
                if not child.startswith(prefix) or not is_key(child):
                    continue
                if entry.is_file(follow_symlinks=False):
                    if child > after:
                        children.append(child)
                elif entry.is_dir(follow_symlinks=False):
                    child += "/"
                    if child > after or after.startswith(child):
                        children.append(child)
    except OSError as error:
        if error.errno not in NEVER_THERE:
            raise
    return sorted(children)
