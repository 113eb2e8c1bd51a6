"""Memory that is kept and reused.

Touching fresh pages costs several times what copying into warm ones does, so the large buffers of
a node are pooled. A buffer goes back to its pool by itself when the last view of it is gone:
slices, tensors over it, and a view that a store or a cancelled upload still holds all keep it out.
Nobody returns anything by hand, so nothing can be overwritten while it is still read.
"""

import mmap
from collections import deque
from collections.abc import Callable


def host_memory(nbytes: int) -> memoryview:
    """Fresh zeroed pages of ``nbytes`` bytes."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))


class _Lease:
    """One use of a buffer. The views of it hold it; their end gives the memory back."""

    __slots__ = ("_memory", "_pool")

    def __init__(self, memory: memoryview, pool: "BufferPool") -> None:
        self._memory = memory
        self._pool = pool

    def __buffer__(self, flags: int, /) -> memoryview:
        return memoryview(self._memory)

    def __release_buffer__(self, view: memoryview, /) -> None:
        view.release()
        pool = getattr(self, "_pool", None)  # gone when the collector broke a cycle around this
        if pool is not None:
            pool._give_back(self._memory)  # noqa: SLF001


class BufferPool:
    """Buffers of a few recurring sizes. Safe to use from several threads."""

    def __init__(
        self, *, allocate: Callable[[int], memoryview] = host_memory, idle_limit: int = 2**28
    ) -> None:
        """Keep at most ``idle_limit`` bytes of buffers that nobody uses; free the rest."""
        self._allocate = allocate
        self._idle: deque[memoryview] = deque()
        self.idle_limit = idle_limit

    def take(self, nbytes: int) -> memoryview:
        """A writable view of exactly ``nbytes`` bytes, with whatever content they had."""
        memory = self._kept(nbytes)
        if memory is None:
            memory = self._allocate(nbytes)
        return memoryview(_Lease(memory, self))[:nbytes]

    def _kept(self, nbytes: int) -> memoryview | None:
        """An idle buffer that is large enough and not much larger."""
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # another thread took the last one
                return None
            if nbytes <= memory.nbytes <= nbytes + nbytes // 4 + 4096:
                return memory
            self._idle.append(memory)
        return None

    def _give_back(self, memory: memoryview) -> None:
        self._idle.append(memory)
        while sum(buffer.nbytes for buffer in tuple(self._idle)) > self.idle_limit:
            try:
                self._idle.popleft()
            except IndexError:
                return
