"""Child processes and the bars that show how far they are. Nothing here is about GradientMail."""

import math
import multiprocessing
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext


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


def process_context() -> ForkServerContext | SpawnContext:
    """How processes are started.

    Importing torch, and what its optimizers import when the first is made, takes most of a start:
    where the system can fork, one server does it for all.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    # Ctrl-C reaches all processes of a terminal; those that inherit this leave it to their parent.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)
    return context


class Row[Options]:
    """A process that runs ``work(options, pipe)``, and the line that shows it.

    Each process has a pipe of its own: one that all share would be left locked by a process that
    is killed while it writes.
    """

    def __init__(
        self, work: Callable[[Options, Connection], None], options: Options, steps: int
    ) -> None:
        """Start the process."""
        context = process_context()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(options, theirs))
        self.process.start()
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
        filled = min(16, 16 * now.step // max(self.steps, 1))
        words = [f"{now.name[-18:]:<18} [{'#' * filled:-<16}] {now.step:>4}/{self.steps}"]
        if now.step > now.first_step:
            words.append(f"{now.loss:.2f} bits/byte")
        if not self.running:
            words.append(self.state)
        elif now.participants:
            words.append(f"round {now.round} by {now.participants}")
        return "  ".join(words)


def follow[Options](rows: Sequence[Row[Options]]) -> None:
    """Show the rows until all processes have ended: bars on a terminal, else a report at times."""
    pause, drawn_at = (0.2 if sys.stdout.isatty() else 10.0), -math.inf
    while running := {row.pipe: row for row in rows if row.running}:
        for pipe in wait(list(running), timeout=1.0):
            if isinstance(pipe, Connection):
                running[pipe].receive()
        if time.monotonic() - drawn_at >= pause or not any(row.running for row in rows):
            draw(rows, again=drawn_at > 0)
            drawn_at = time.monotonic()


def draw[Options](rows: Sequence[Row[Options]], *, again: bool) -> None:
    """Print the rows; on a terminal over those of the last time."""
    if sys.stdout.isatty():
        up, width = f"\x1b[{len(rows)}A" if again else "", shutil.get_terminal_size().columns - 1
        print(up + "".join(f"{str(row)[:width]}\x1b[K\n" for row in rows), end="", flush=True)
    else:
        print(*rows, "", sep="\n", flush=True)


def stop[Options](rows: Sequence[Row[Options]]) -> None:
    """End the processes: a closed pipe asks them to leave; who does not soon is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressing it again makes it no faster
    for row in rows:
        row.pipe.close()
    deadline = time.monotonic() + 0.8
    for row in rows:
        row.process.join(max(0.0, deadline - time.monotonic()))
        row.process.kill()
