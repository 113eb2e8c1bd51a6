"""A process of its own on a folder, for the tests of races and kills. Prints JSON lines.

store_process.py race   ROOT LINKS NUMBER     put 30 keys in a race, after a line on stdin
store_process.py write  ROOT LINKS FIRST      put large objects until killed
store_process.py steps  ROOT LINKS            be killed before every system call of a put
store_process.py limit  ROOT LINKS            put more than the size limit of files allows
"""

# ruff: noqa: PTH118, PTH208 - system calls are what is tested.

import asyncio
import json
import os
import resource
import signal
import sys
import threading
from typing import Any

from tests.mailbox.interleaving import SteppedOs

from gradientmail.mailbox import filesystem, listing, placing, staging
from gradientmail.mailbox.filesystem import FilesystemMailbox

LARGE_BYTES = 8 * 2**20
CONTENT = b"whole" * 1000


def open_mailbox(root: str, links: str) -> FilesystemMailbox:
    mailbox = FilesystemMailbox(root)
    assert mailbox._links is True
    mailbox._links = links == "links"
    return mailbox


def race(root: str, links: str) -> None:
    """Fork 16 processes that wait until the write end of a pipe is closed."""
    gate, opener = os.pipe()
    children = [_fork_racer(number, gate, opener, root, links) for number in range(16)]
    os.close(gate)
    os.close(opener)
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0


def _fork_racer(number: int, gate: int, opener: int, root: str, links: str) -> int:
    child = os.fork()
    if child:
        return child
    os.close(opener)
    mailbox = open_mailbox(root, links)
    os.read(gate, 1)

    async def main() -> list[int]:
        data = str(number).encode() * 10_000
        won = [await mailbox.put_if_absent(f"race/{key % 3}/{key}", data) for key in range(30)]
        return [key for key, created in enumerate(won) if created]

    os.write(1, json.dumps([number, asyncio.run(main())]).encode() + b"\n")
    os._exit(0)


def write(root: str, links: str, first: str) -> None:
    mailbox = open_mailbox(root, links)
    print("ready", flush=True)

    async def main() -> None:
        for number in range(int(first), 10**6):
            data = bytes([number % 251]) * LARGE_BYTES
            await mailbox.put_if_absent(f"large/{number:06d}", data)

    asyncio.run(main())


def steps(root: str, links: str) -> None:
    """Fork for every system call of a put: the child is killed there, this process looks."""
    seen: dict[str, int] = {"absent": 0, "whole": 0, "left over": 0}
    for number in range(1000):
        key = f"steps/{number}/key"
        child = os.fork()
        if child == 0:
            _put_until(number, root, links, key)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        temporary = os.listdir(os.path.join(root, ".tmp"))
        seen["left over"] += bool(temporary)
        mailbox = open_mailbox(root, links)
        found = mailbox._get(key)
        assert found is None or bytes(found) == CONTENT, number
        assert list(mailbox._list("steps/", "")) == ([key] if found is not None else []), number
        assert os.listdir(os.path.join(root, ".tmp")) == [], (number, temporary)
        seen["absent" if found is None else "whole"] += 1
        assert mailbox._put(key, CONTENT, threading.Event()) is (found is None), number
        mailbox._delete((key,))
        assert os.listdir(root) == [".tmp"], number
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, (number, status)
    print(json.dumps(seen | {"steps": number}))


def _put_until(last: int, root: str, links: str, key: str) -> None:
    mailbox = open_mailbox(root, links)
    taken = 0

    def step(what: str) -> None:
        nonlocal taken
        del what
        if taken == last:
            os.kill(os.getpid(), signal.SIGKILL)
        taken += 1

    stepped: Any = SteppedOs(step, "", names=(*dir(os),))
    filesystem.os = listing.os = placing.os = staging.os = stepped
    mailbox._put(key, CONTENT, threading.Event())


def limit(root: str, links: str) -> None:
    mailbox = open_mailbox(root, links)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    try:
        asyncio.run(mailbox.put_if_absent("too/large", bytes(2**21)))
    except OSError as error:
        print(json.dumps([error.errno, str(error), os.listdir(os.path.join(root, ".tmp"))]))


if __name__ == "__main__":
    {"race": race, "write": write, "steps": steps, "limit": limit}[sys.argv[1]](*sys.argv[2:])
