"""What a mailbox is: four operations over immutable objects.

Guarantees that every implementation gives, and that the contract suite in
``gradientmail.testing`` checks:

* An object appears whole or not at all, and is never changed afterwards.
* Of any number of ``put_if_absent`` calls on one key exactly one returns True.
* Once a put has returned, every later ``get`` and ``list`` of any node sees it; the same holds
  for a delete. Nothing is atomic across keys.
* One instance may be driven from several event loops and threads at once.

A call that the store cannot serve now raises ``MailboxUnavailable``; it may have taken effect.
Anything else that is raised will be raised again by a repeated call.
"""

import sys
from collections.abc import Buffer, Iterable, Sequence
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from gradientmail.errors import ProtocolError

size_limit: ContextVar[int] = ContextVar("size_limit", default=sys.maxsize)
"""How many bytes the caller of ``get`` has use for at most.

A store that learns an object's size before its bytes calls ``check_size``, so that a huge object
under a key of the run costs no memory. Not an argument of ``get``: stores need not know of it.
"""


@runtime_checkable
class Mailbox(Protocol):
    """A store of immutable objects, shared by all nodes of a run."""

    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        """Create ``key`` with ``data``; False, changing nothing, when it exists.

        ``data`` is one contiguous buffer of bytes, the caller's again once the call has ended:
        an implementation that wants to keep it longer keeps a view or a copy of its own.
        """
        ...

    async def get(self, key: str, /) -> Buffer | None:
        """The whole object, None when there is none. The caller must not write to it."""
        ...

    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        """The keys that start with ``prefix`` and are strictly greater than ``after``.

        Ordered, and compared with ``after``, by the bytes of their UTF-8 form.
        """
        ...

    async def delete(self, keys: Iterable[str], /) -> None:
        """Remove these keys, any number of them; a missing one is no error."""
        ...


MAX_KEY_BYTES = 1024
"""The longest key, in UTF-8, as S3 has it."""

RESERVED = ".tmp"
"""The first part of keys that stores keep to themselves: what is being written, or tried out."""

POOLED_BYTES = 2**16
"""Objects from this size on are sent from the caller's memory and read into the pool's."""


def check_key(key: str) -> str:
    """Return ``key`` if every store can hold it, else raise ``ValueError`` saying why.

    A key is a relative path of non-empty parts separated by ``/``, none of them ``.`` or ``..``,
    without NUL, at most ``MAX_KEY_BYTES`` bytes long in UTF-8 and encodable in it.
    """
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise ValueError(f"mailbox key {key!r} cannot be encoded in UTF-8") from None
    if not key:
        raise ValueError("a mailbox key must not be empty")
    if size > MAX_KEY_BYTES:
        raise ValueError(
            f"mailbox key of {size} bytes is longer than {MAX_KEY_BYTES}: {key[:60]!r}…"
        )
    if "\0" in key:
        raise ValueError(f"mailbox key {key!r} contains NUL")
    for part in key.split("/"):
        if part in ("", ".", ".."):
            raise ValueError(f"mailbox key {key!r} is not a relative path of plain names")
    return key


def is_key(key: str) -> bool:
    """Whether a put could have made this key."""
    try:
        return check_key(key).partition("/")[0] != RESERVED
    except ValueError:
        return False


class Abandoned(Exception):
    """The caller was cancelled; nobody waits for the outcome of this put."""


def check_size(key: str, size: int, limit: int | None = None) -> int:
    """Return ``size`` if the caller of ``get`` has use for so many bytes, else ``ProtocolError``.

    Called before the object is read; outside the caller's context with the ``limit`` of there.
    """
    allowed = size_limit.get() if limit is None else limit
    if size > allowed:
        raise ProtocolError(f"{key} has {size} bytes, more than the {allowed} it may have")
    return size


async def get_at_most(mailbox: Mailbox, key: str, limit: int) -> Buffer | None:
    """``mailbox.get(key)``; ``ProtocolError`` when the object has more than ``limit`` bytes.

    A store that calls ``check_size`` does not read such an object.
    """
    token = size_limit.set(limit)
    try:
        data = await mailbox.get(key)
        if data is not None:
            check_size(key, memoryview(data).nbytes)
        return data
    finally:
        size_limit.reset(token)


def flat(data: Buffer) -> memoryview:
    """A view of the bytes of ``data``; ``ValueError`` when they are not one contiguous buffer.

    Release it (``with flat(data) as view``) so that the caller can resize its buffer again.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("a mailbox object must be one contiguous buffer of bytes; copy it first")
    return view.cast("B") if view.nbytes else memoryview(b"")
