"""What fails again and again beside the training is told ever more seldom."""

from collections.abc import Callable
from dataclasses import dataclass

from gradientmail.event import Event
from gradientmail.events import TaskFailed


def in_words(error: BaseException) -> str:
    """An error as the last line of its traceback has it."""
    return f"{type(error).__name__}: {error}" if str(error) else repr(error)


def _exits(error: Exception) -> bool:
    """Whether it is only that the interpreter exits, and no thread can be started any more.

    From Python 3.13 on that is a ``PythonFinalizationError``, with the same words.
    """
    return isinstance(error, RuntimeError) and "interpreter shutdown" in str(error)


@dataclass(slots=True)
class _Streak:
    """How often in a row a task has failed, and of what it was told last."""

    count: int = 0
    told: str = ""


def called(store: object) -> str:
    """What a store calls itself; nothing of one that has no words for it, or fails to say them."""
    if type(store).__repr__ is object.__repr__:
        return ""
    try:
        return repr(store)
    except Exception:
        return ""


class Failures:
    """Counts the failures in a row of each task of one part of a node.

    A failure is told the first time, the second, the fourth, and so on, and whenever its error is
    another one than the last told. Used on the loop's thread.
    """

    def __init__(self, announce: Callable[[Event], None]) -> None:
        """``announce`` is given the events."""
        self._announce = announce
        self._streaks: dict[str, _Streak] = {}

    def failed(self, task: str, error: Exception, number: int | None = None) -> None:
        """Tell of it if that is due; ``number`` is the round that it was for."""
        if _exits(error):
            return
        streak = self._streaks.setdefault(task, _Streak())
        streak.count += 1
        said = in_words(error)
        if streak.count & (streak.count - 1) == 0 or said != streak.told:
            streak.told = said
            self._announce(TaskFailed(task=task, error=said, round=number, times=streak.count))

    def worked(self, task: str) -> None:
        """It has not failed this time: the next failure is a first one."""
        self._streaks.pop(task, None)
