"""A mailbox around a mailbox: one place through which all four operations go."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Buffer, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

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

    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        """As ``Mailbox.put_if_absent``."""
        with memoryview(data) as view:
            call = Call("put_if_absent", (key,), view.nbytes)
        return await self.around(call, partial(self.inner.put_if_absent, key, data))

    async def get(self, key: str, /) -> Buffer | None:
        """As ``Mailbox.get``."""
        return await self.around(Call("get", (key,)), partial(self.inner.get, key))

    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        """As ``Mailbox.list``."""
        return await self.around(
            Call("list", (prefix,)), partial(self.inner.list, prefix, after=after)
        )

    async def delete(self, keys: Iterable[str], /) -> None:
        """As ``Mailbox.delete``. An iterator is read once, however often ``around`` acts."""
        wanted = tuple(keys)
        await self.around(Call("delete", wanted), partial(self.inner.delete, wanted))
