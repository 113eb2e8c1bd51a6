"""Runs training scripts as processes that can be killed; torch is imported once, for all of them.

Lines of standard input: ``start <folder> <log>`` forks a child that runs ``train.py`` there and
answers its process id; ``wait <pid>`` answers how it ended; ``kill <pid>`` sends SIGKILL.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

from tests.processes.learning import warm


def child(folder: str, log: str) -> int:
    """Run the script; its exit status."""
    os.chdir(folder)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)
    try:
        exec(compile(Path("train.py").read_text(), "train.py", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve() -> None:
    """Answer line by line; at the end of the input, kill what is left."""
    warm()
    alive: set[int] = set()
    for line in sys.stdin:
        match line.split():
            case ["start", folder, log]:
                pid = os.fork()
                if not pid:
                    sys.stdin.close()
                    status = child(folder, log)
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
                alive.add(pid)
                print(pid, flush=True)
            case ["kill" | "wait" as what, number]:
                pid = int(number)
                if what == "kill":
                    os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                alive.discard(pid)
                print(os.waitstatus_to_exitcode(status), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
