"""Memory that is kept and reused.

Touching fresh pages costs several times what copying into warm ones does, so the large buffers of
a node are pooled. A buffer goes back to its pool by itself when the last view of it is gone:
slices, tensors over it, and a view that a store or a cancelled upload still holds all keep it out.
Nobody returns anything by hand, so nothing can be overwritten while it is still read.
"""

import mmap
from collections import deque
from collections.abc import Callable
from itertools import count
from weakref import ref


def host_memory(nbytes: int) -> memoryview:
    """Fresh zeroed pages of ``nbytes`` bytes."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))


class _Lease(int):
    """One use of a buffer. The views of it hold it; their end gives the memory back.

    A number without attributes, so that the cyclic collector, which takes apart what it finds in a
    cycle before the views in it end, has nothing to take here: a memoryview held by the lease would
    come back to the pool released.
    """

    __slots__ = ()

    def __buffer__(self, flags: int, /) -> memoryview:
        return memoryview(_lent[self][1])

    def __release_buffer__(self, view: memoryview, /) -> None:
        view.release()
        found, memory = _lent.pop(self)
        pool = found()
        if pool is not None:
            pool._give_back(memory)  # noqa: SLF001


_lent: dict[int, tuple["ref[BufferPool]", memoryview]] = {}
"""By lease, the pool and the memory of it that is in use."""
_leases = count()


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
        lease = _Lease(next(_leases))
        _lent[lease] = ref(self), memory
        return memoryview(lease)[:nbytes]

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
