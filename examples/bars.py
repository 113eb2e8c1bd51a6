"""Child processes and the bars that show how far they are. Nothing here is about GradientMail."""

import math
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait


@dataclass
class Progress:
    """What is shown of one process. It sends this through its pipe whenever something changed."""

    name: str = "starting"
    first_step: int = 0
    step: int = 0
    loss: float = math.nan
    round: int = -1
    participants: int = 0
    held_out: float = math.nan

    def send(self, pipe: Connection) -> None:
        """Report to the parent process, and end this one if the parent wants that or is gone."""
        try:
            pipe.send(self)
            stop = pipe.poll()
        except OSError:
            stop = True
        if stop:
            raise SystemExit


class Row[Options]:
    """A process that runs ``work(options, pipe)``, and the line that shows it.

    Each process has a pipe of its own: one that all share would be left locked by a process that
    is killed while it writes.
    """

    def __init__(
        self, work: Callable[[Options, Connection], None], options: Options, steps: int
    ) -> None:
        """Start the process. Ctrl-C, which reaches all processes of a terminal, passes it by."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(options, theirs))
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.process.start()
        signal.signal(signal.SIGINT, before)
        theirs.close()
        self.progress, self.running, self.steps = Progress(), True, steps

    def receive(self) -> None:
        """Take one report, or learn that the process has ended."""
        try:
            self.progress = self.pipe.recv()
        except (EOFError, OSError):
            self.running = False
            self.process.join()

    @property
    def state(self) -> str:
        """``running``, ``done``, ``killed`` or ``failed``."""
        code = self.process.exitcode
        if self.running or code is None:
            return "running"
        return "done" if code == 0 else "killed" if code < 0 else "failed"

    def __str__(self) -> str:
        """One line of text."""
        now = self.progress
        filled = min(20, 20 * now.step // max(self.steps, 1))
        words = [f"{now.name[-20:]:<20} [{'#' * filled:-<20}] {now.step:>4}/{self.steps}"]
        if now.step > now.first_step:
            words.append(f"{now.loss:.2f} bits/byte")
        if now.participants:
            words.append(f"round {now.round} by {now.participants}")
        return "  ".join([*words, *([] if self.running else [self.state])])


def follow[Options](rows: Sequence[Row[Options]]) -> None:
    """Show the rows until all processes have ended: bars on a terminal, else a report at times."""
    on_terminal, drawn_at, first = sys.stdout.isatty(), -math.inf, True
    while running := {row.pipe: row for row in rows if row.running}:
        for pipe in wait(list(running), timeout=1.0):
            if isinstance(pipe, Connection):
                running[pipe].receive()
        ended = not any(row.running for row in rows)
        if ended or time.monotonic() - drawn_at >= (0.2 if on_terminal else 10.0):
            up, clear = (
                ("" if first else f"\x1b[{len(rows)}A", "\x1b[K") if on_terminal else ("", "")
            )
            print(up + "".join(f"{row}{clear}\n" for row in rows), end="", flush=True)
            drawn_at, first = time.monotonic(), False


def stop[Options](rows: Sequence[Row[Options]]) -> None:
    """End all processes: a closed pipe asks them to leave; who has not after a second is killed."""
    for row in rows:
        row.pipe.close()
    deadline = time.monotonic() + 1.0
    for row in rows:
        row.process.join(max(0.0, deadline - time.monotonic()))
        row.process.kill()
