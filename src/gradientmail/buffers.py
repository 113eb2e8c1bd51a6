"""Memory that is kept and reused.

Touching fresh pages costs several times what copying into warm ones does, so the large buffers of
a node come from a pool that hands out pages it has handed out before, whatever the sizes: always
the first gap that is large enough. A buffer goes back by itself when the last view of it is gone:
slices, tensors over it, and a view that a store or a cancelled upload still holds all keep it out.
Nobody returns anything by hand, so nothing can be overwritten while it is still read.
"""

import contextlib
import mmap
import sys
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from itertools import count
from weakref import ref

PAGE = mmap.PAGESIZE
SMALL = 2**16
"""Buffers below this many bytes are not pooled."""
RESERVED = 2**34
"""Bytes of address space that host memory is reserved in at a time; memory only once touched."""
KEPT = 2**26
"""Bytes that a pool keeps warm at least; half of what is in use if that is more."""


class _Block:
    """A stretch of memory with the gaps in it that nobody uses, in order, none touching another."""

    __slots__ = ("gaps", "mapping", "memory", "touched")

    def __init__(self, memory: memoryview, mapping: mmap.mmap | None) -> None:
        self.memory = memory
        self.mapping = mapping
        self.gaps = [(0, memory.nbytes)]
        self.touched = 0
        """No byte from here on has been handed out since it was last given to the system."""

    def carve(self, nbytes: int) -> int | None:
        """Take the start of the first gap of ``nbytes`` or more; its offset, None without one."""
        for index, (start, stop) in enumerate(self.gaps):
            if stop - start >= nbytes:
                if stop - start == nbytes:
                    del self.gaps[index]
                else:
                    self.gaps[index] = (start + nbytes, stop)
                self.touched = max(self.touched, start + nbytes)
                return start
        return None

    def mend(self, start: int, stop: int) -> None:
        """Put a stretch back, joined with the gaps that it touches."""
        insort(self.gaps, (start, stop))
        index = self.gaps.index((start, stop))
        if index + 1 < len(self.gaps) and self.gaps[index + 1][0] == stop:
            stop = self.gaps.pop(index + 1)[1]
        if index and self.gaps[index - 1][1] == start:
            start = self.gaps.pop(index - 1)[0]
            index -= 1
        self.gaps[index] = (start, stop)

    def trim(self, keep: int) -> None:
        """Give the system back what was touched beyond the last use, but for ``keep`` bytes."""
        if self.mapping is None or not self.gaps or self.gaps[-1][1] != self.memory.nbytes:
            return
        first = self.gaps[-1][0] + keep // PAGE * PAGE
        if first < self.touched and hasattr(self.mapping, "madvise"):
            self.mapping.madvise(mmap.MADV_DONTNEED, first, self.touched - first)
            self.touched = first


class Shown:
    """Stands for a buffer towards others, and knows when none of them looks at it any more."""

    __slots__ = ("_memory", "ended")

    def __init__(self, memory: memoryview) -> None:
        """Show ``memory``, read-only: ``memoryview(self)`` gives a view of it, once."""
        self._memory = memory.toreadonly()
        self.ended = False
        """Whether the view that was given, and all that were made from it, are gone."""

    def __buffer__(self, flags: int, /) -> memoryview:
        return memoryview(self._memory)

    def __release_buffer__(self, view: memoryview, /) -> None:
        view.release()
        self.ended = True


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
        found, _, block, start, stop = _lent.pop(self)
        pool = found()
        if pool is not None:
            # Perhaps called by the collector inside ``take``: no lock here, and no list is touched.
            pool._returned.append((block, start, stop))  # noqa: SLF001


_lent: dict[int, tuple["ref[BufferPool]", memoryview, _Block, int, int]] = {}
"""By lease: the pool, the memory in use, and where that lies."""
_leases = count()


class BufferPool:
    """Buffers of any size. Safe to use from several threads."""

    def __init__(self, *, allocate: Callable[[int], memoryview] | None = None) -> None:
        """``allocate`` gives blocks of special memory (pinned, say); plain host memory without."""
        self._allocate = allocate
        self._blocks: list[_Block] = []
        self._returned: deque[tuple[_Block, int, int]] = deque()
        self._lock = threading.Lock()
        self._in_use = 0

    def take(self, nbytes: int) -> memoryview:
        """A writable view of exactly ``nbytes`` bytes, with whatever content they had."""
        if nbytes < SMALL and self._allocate is None:
            return memoryview(bytearray(nbytes))
        size = max(-(-nbytes // PAGE), 1) * PAGE
        with self._lock:
            self._mend()
            block, start = self._carve(size)
            self._in_use += size
        lease = _Lease(next(_leases))
        memory = block.memory[start : start + nbytes]
        _lent[lease] = ref(self), memory, block, start, start + size
        return memoryview(lease)

    def _carve(self, size: int) -> tuple[_Block, int]:
        for block in self._blocks:
            start = block.carve(size)
            if start is not None:
                return block, start
        block = _reserve(size) if self._allocate is None else _Block(self._allocate(size), None)
        self._blocks.append(block)
        block.carve(size)
        return block, 0

    def _mend(self) -> None:
        """Take back what has been returned."""
        while self._returned:
            block, start, stop = self._returned.popleft()
            self._in_use -= stop - start
            block.mend(start, stop)
        keep = max(KEPT, self._in_use // 2)
        for block in self._blocks:
            block.trim(keep)
        if self._allocate is not None and len(self._blocks) > 1:
            self._drop_unused(keep)

    def _drop_unused(self, keep: int) -> None:
        """Free whole blocks of special memory that nobody uses, beyond ``keep`` bytes."""
        for block in tuple(self._blocks):
            if block.gaps == [(0, block.memory.nbytes)]:
                keep -= block.memory.nbytes
                if keep < 0:
                    self._blocks.remove(block)


def _reserve(size: int) -> _Block:
    """Address space for host memory of ``size`` bytes or far more; pages come when touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    for nbytes in (max(size, RESERVED), max(size, RESERVED // 64)):
        with contextlib.suppress(OSError, OverflowError):  # a limit on address space
            mapping = mmap.mmap(-1, nbytes, flags=flags)
            return _Block(memoryview(mapping), mapping)
    mapping = mmap.mmap(-1, size, flags=flags)
    return _Block(memoryview(mapping), mapping)


_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Python names this flag from 3.13 on; the number is Linux's on x86 and Arm."""


HOST = BufferPool()
"""The process's pool of plain host memory, which mailboxes and sessions share."""
