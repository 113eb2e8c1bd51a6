"""What fails again and again beside the training: tried ever more seldom, told ever more seldom."""

from collections.abc import Callable
from dataclasses import dataclass

from gradientmail.clock import Clock, Flag, Signal, wait_or_sleep
from gradientmail.event import Event
from gradientmail.events import TaskFailed

LONGEST_PAUSE_SECONDS = 30.0
SOON = 8
"""So many tries follow each other at the first pause: most faults are short."""


def in_words(error: BaseException) -> str:
    """An error as the last line of its traceback has it."""
    return f"{type(error).__name__}: {error}" if str(error) else repr(error)


@dataclass(slots=True)
class _Streak:
    """How often in a row a task has failed, and of what it was told last."""

    count: int = 0
    told: str = ""


class Failures:
    """Counts the failures in a row of each task of one part of a node.

    A failure is told the first time, the second, the fourth, and so on, and whenever its error is
    another one than the last told. Used on the loop's thread.
    """

    def __init__(self, announce: Callable[[Event], None], first_seconds: float) -> None:
        """``first_seconds`` is the pause after a first failure."""
        self._announce = announce
        self.first_seconds = first_seconds
        self._streaks: dict[str, _Streak] = {}

    def failed(self, task: str, error: Exception, number: int | None = None) -> float:
        """Tell of it if that is due; how many seconds to wait before the next try.

        ``number`` is the round that it was for. After some tries each pause is twice the one
        before, 30 s at most.
        """
        streak = self._streaks.setdefault(task, _Streak())
        streak.count += 1
        said = in_words(error)
        if streak.count & (streak.count - 1) == 0 or said != streak.told:
            streak.told = said
            self._announce(TaskFailed(task=task, error=said, round=number, times=streak.count))
        longest = max(LONGEST_PAUSE_SECONDS, self.first_seconds)
        return min(self.first_seconds * 2.0 ** min(max(streak.count - SOON, 0), 60), longest)

    async def wait(
        self, clock: Clock, seconds: float, changed: Signal, stopping: Flag | None = None
    ) -> None:
        """Wait ``seconds``, or until something has ``changed``, but not less than after a first.

        ``stopping`` ends it at once.
        """
        stopping = stopping or Flag()
        if not await wait_or_sleep(clock, self.first_seconds, stopping):
            await wait_or_sleep(clock, seconds - self.first_seconds, stopping, changed.next)

    def worked(self, task: str) -> None:
        """It has not failed this time: the next failure is a first one."""
        self._streaks.pop(task, None)
