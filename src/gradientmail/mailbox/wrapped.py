"""A mailbox around a mailbox: one place through which all four operations go."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Buffer, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gradientmail.mailbox.base import Mailbox

type Operation = Literal["put_if_absent", "get", "list", "delete"]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation, as a wrapper sees it."""

    operation: Operation
    keys: tuple[str, ...]
    """The key; the prefix of a ``list``; every key of a ``delete``."""
    sent: int = 0
    """Bytes of the object, for ``put_if_absent``."""

    @property
    def key(self) -> str:
        """The first of ``keys``, empty when there is none."""
        return self.keys[0] if self.keys else ""


class WrappedMailbox(ABC):
    """Passes every operation to ``inner`` by way of ``around``."""

    def __init__(self, inner: Mailbox) -> None:
        """Wrap ``inner``."""
        self.inner = inner

    @abstractmethod
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Answer ``call``; ``await act()`` performs it on ``inner``, once each time."""

    # These hand out the coroutine of ``around`` instead of awaiting it: wrappers are stacked, and
    # each awaiting function is a frame more that every answer goes through.

    def put_if_absent(self, key: str, data: Buffer, /) -> Coroutine[Any, Any, bool]:
        """As ``Mailbox.put_if_absent``."""
        with memoryview(data) as view:
            call = Call("put_if_absent", (key,), view.nbytes)
        return self.around(call, partial(self.inner.put_if_absent, key, data))

    def get(self, key: str, /) -> Coroutine[Any, Any, Buffer | None]:
        """As ``Mailbox.get``."""
        return self.around(Call("get", (key,)), partial(self.inner.get, key))

    def list(self, prefix: str, /, *, after: str = "") -> Coroutine[Any, Any, Sequence[str]]:
        """As ``Mailbox.list``."""
        return self.around(Call("list", (prefix,)), partial(self.inner.list, prefix, after=after))

    def delete(self, keys: Iterable[str], /) -> Coroutine[Any, Any, None]:
        """As ``Mailbox.delete``. An iterator is read once, however often ``around`` acts."""
        wanted = tuple(keys)
        return self.around(Call("delete", wanted), partial(self.inner.delete, wanted))
