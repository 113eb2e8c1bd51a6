"""One node as a process of a chaos run, and the process that forks such nodes.

Each line of standard input is a JSON object, each answer another. ``{"do": "start", …}`` forks a
node, ``{"do": "reap", "pid": …}`` tells its exit status once it has ended. All end with the input.
"""

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, override
from urllib.parse import quote

from tests.processes.learning import learn, warm

import gradientmail as gm
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.wrapped import Call, WrappedMailbox


class Archiving(WrappedMailbox):
    """Keeps what is deleted in a folder, so that every commit can be computed again afterwards.

    And refuses puts as a full disk does while there is a file ``full`` beside that folder.
    """

    def __init__(self, inner: Mailbox, folder: Path) -> None:
        super().__init__(inner)
        self.folder = folder

    @override
    async def around[T](self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if call.operation == "put_if_absent" and (self.folder.parent / "full").exists():
            raise OSError(28, "No space left on device (injected)", call.key)
        if call.operation == "delete":
            for key in call.keys:
                if key.startswith(("snapshots/", "blobs/")):
                    data = await self.inner.get(key)
                    if data is not None:
                        keep(self.folder, key, bytes(data))
        return await act()


def keep(folder: Path, key: str, data: bytes) -> None:
    """Put an object into the archive, where a key may have had several bodies."""
    body = folder / quote(key, safe="") / hashlib.sha256(data).hexdigest()
    body.parent.mkdir(parents=True, exist_ok=True)
    part = body.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.replace(body)


def open_store(store: dict[str, str]) -> Mailbox:
    """The mailbox that a description names."""
    if "folder" in store:
        return gm.FilesystemMailbox(store["folder"])
    return gm.S3Mailbox(
        store["bucket"], store["prefix"], endpoint_url=store["endpoint"], region="us-east-1"
    )


def live(store: dict[str, str], archive: str, learner: str, rounds: int) -> None:
    """Train until killed, or until so many rounds more are seen if ``rounds`` is not 0."""
    session, _ = learn(
        Archiving(open_store(store), Path(archive)),
        learner,
        rounds,
        pause=0.03,
        poll_interval=0.05,
        lease_every=0.4,
        lease_timeout=1.5,
    )
    print(f"closed {session.rounds_seen}", flush=True)


def start(row: dict[str, Any]) -> int:
    """Fork a node; its process id."""
    pid = os.fork()
    if pid == 0:
        os._exit(run(row))
    return pid


def run(row: dict[str, Any]) -> int:
    """Be a node; the exit status."""
    try:
        os.close(0)
        target = os.open(row["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 1)
        os.dup2(target, 2)
        live(row["store"], row["archive"], row["learner"], row["rounds"])
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def serve() -> None:
    """Answer until the input ends, then kill what is left."""
    warm()
    alive: set[int] = set()
    for line in sys.stdin:
        row = json.loads(line)
        answer: Any = None
        if row["do"] == "start":
            answer = start(row)
            alive.add(answer)
        elif row["do"] == "reap":
            pid, status = os.waitpid(row["pid"], 0 if row["wait"] else os.WNOHANG)
            if pid:
                alive.discard(pid)
                answer = os.waitstatus_to_exitcode(status)
        print(json.dumps(answer), flush=True)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
