"""Warm memory for the next snapshot, so that ``step`` only copies."""

import asyncio
from collections.abc import Callable

from gradientmail.backend.base import Backend
from gradientmail.buffers import touch
from gradientmail.clock import Offload
from gradientmail.handoff import Blank, Handoff
from gradientmail.run import Run, arrays_over


class Blanks:
    """Puts one into the handoff as soon as the learner may need it. Used on the loop's thread."""

    def __init__(
        self,
        run: Run,
        handoff: Handoff,
        *,
        backend: Backend,
        take: Callable[[int], memoryview],
        offload: Offload,
    ) -> None:
        """``take`` gives the memory."""
        self._run = run
        self._handoff = handoff
        self._backend = backend
        self._take = take
        self._offload = offload
        self._preparing = asyncio.Lock()

    def next_round(self, seen: int) -> int | None:
        """The round that the learner publishes next, once it has seen ``seen``.

        None if it has to see another commit before.
        """
        number = max(self._handoff.publishing, seen) + 1
        ahead = min(self._run.algorithm.in_flight, len(self._run.fragments))
        return number if number <= seen + ahead else None

    async def prepare(self, seen: int) -> None:
        """Have a buffer ready for the round after ``seen``, which the learner has or is to get."""
        number = self.next_round(seen)
        if number is None:
            return  # it waits for a commit, and so does the memory
        fragment = self._run.schedule.fragment(number)
        blanks = self._handoff.blanks
        async with self._preparing:
            if fragment in blanks:
                return
            for other in tuple(blanks):  # a round went by that the learner did not publish
                blanks.pop(other, None)
            blanks[fragment] = await self._offload(self.make, fragment)

    def make(self, fragment: int) -> Blank:
        """A buffer for a fragment's parameters with every page touched. Any thread."""

        def warm(nbytes: int) -> memoryview:
            buffer = self._take(nbytes)
            touch(buffer)
            return buffer

        theta = self._run.fragments[fragment].theta
        buffer = theta.blank(warm)
        return Blank(buffer, arrays_over(self._backend, buffer, theta))
