"""A store in this process's memory, for tests and for runs of one process."""

from bisect import bisect_left, insort
from collections.abc import Buffer, Iterable, Sequence

from gradientmail.forking import lock_over_forks
from gradientmail.mailbox.base import check_key, flat


class MemoryMailbox:
    """Objects in a dictionary. Safe from several threads and event loops at once.

    It keeps a copy of what is put and gives out read-only ``bytes``. No call waits for anything.
    """

    def __init__(self) -> None:
        """Make an empty store."""
        self._lock = lock_over_forks()
        self._objects: dict[str, bytes] = {}
        self._keys: list[str] = []

    async def put_if_absent(self, key: str, data: Buffer, /) -> bool:
        """Create ``key`` with a copy of ``data``; False when it exists."""
        check_key(key)
        with flat(data) as view:
            copied = data if isinstance(data, bytes) else bytes(view)
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = copied
            insort(self._keys, key)
            return True

    async def get(self, key: str, /) -> bytes | None:
        """The object, None when there is none."""
        return self._objects.get(check_key(key))

    async def list(self, prefix: str, /, *, after: str = "") -> Sequence[str]:
        """The keys below ``prefix`` and beyond ``after``.

        Strings compare by code points, which is the order of their UTF-8 bytes.
        """
        with self._lock:
            start = bisect_left(self._keys, prefix)
            if after >= prefix:
                start = bisect_left(self._keys, after)
                start += self._keys[start : start + 1] == [after]
            # Those that start with the prefix come first from here on.
            stop = bisect_left(
                self._keys, True, lo=start, key=lambda key: not key.startswith(prefix)
            )
            return tuple(self._keys[start:stop])

    async def delete(self, keys: Iterable[str], /) -> None:
        """Remove ``keys``; all of them are checked before the first is removed."""
        wanted = [check_key(key) for key in keys]
        with self._lock:
            for key in wanted:
                if self._objects.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]
