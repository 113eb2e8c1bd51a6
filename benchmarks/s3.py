"""Put and get of large payloads through S3Mailbox, beside plain boto3, on SeaweedFS.

Each figure comes from processes of their own, which keep one object in memory and move it several
times. The two take turns on a store made anew for each pair of them, and begin it by turns, too.
``seconds`` and ``cpu`` are medians over all moves, ``spread`` the least and the greatest ratio of
a pair; ``memory`` is the peak over what the process had before, divided by the object: for a put,
the source included. ``--folder /dev/shm`` keeps the disk out of it.

Like with like: both send checksums as they do by default, CRC-32 with every part. This package's
payloads of up to 32 MiB carry the sha256 that is in their key instead, and larger ones are not
hashed as a whole by either.
"""

import argparse
import asyncio
import contextlib
import hashlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import gradientmail as gm

MIB = 2**20
ROOT = Path(__file__).parents[1]
BUCKET = "bench"
KEY, SECRET = "testing", "testing-secret"  # as tests/s3/servers.py has them


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind")
    parser.add_argument("--folder", help="where the store keeps its objects: a temporary folder")
    parser.add_argument(
        "--endpoint", help="of a store with the bucket 'bench', instead of one here"
    )
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        kind, operation, size = args.one
        print(json.dumps(one(kind, operation, int(size), args.endpoint)))
        return
    from measure import show  # it imports torch, which the processes above do without

    rows = []
    for size in args.mib:
        for operation in ("put", "get"):
            pairs = []
            for number in range(args.repeats):
                order = ("mailbox", "boto3") if number % 2 else ("boto3", "mailbox")
                # Deleting frees nothing at once: a store of its own for each pair is never full.
                with (
                    contextlib.nullcontext(args.endpoint) if args.endpoint else _server(args.folder)
                ) as endpoint:
                    pairs.append(measured(operation, size * MIB, endpoint, order))
            rows.append(compared(f"{operation} {size} MiB", pairs))
    show("s3", rows, as_json=args.json)


@contextlib.contextmanager
def _server(folder: str | None) -> Generator[str]:
    sys.path.insert(0, str(ROOT))
    from tests.s3 import servers

    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        servers.seaweedfs(Path(name)) as endpoint,
    ):
        servers.make_bucket(endpoint, BUCKET)
        yield endpoint


type _Figures = dict[str, list[float]]


def measured(
    operation: str, nbytes: int, endpoint: str, order: tuple[str, str]
) -> dict[str, _Figures]:
    """The figures of one process of each kind, one after the other."""
    found: dict[str, _Figures] = {}
    for kind in order:
        command = [sys.executable, __file__, "--endpoint", endpoint]
        command += ["--one", kind, operation, str(nbytes)]
        secrets = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        shown = subprocess.run(
            command, env=os.environ | secrets, capture_output=True, text=True, check=False
        )
        if shown.returncode:
            raise SystemExit(shown.stderr)
        found[kind] = json.loads(shown.stdout)
    return found


def compared(what: str, pairs: list[dict[str, _Figures]]) -> dict[str, object]:
    """One row: this package's mailbox beside boto3's own transfer."""

    def median(kind: str, figure: str) -> float:
        return statistics.median(value for pair in pairs for value in pair[kind][figure])

    ratios = [
        statistics.median(pair["mailbox"]["seconds"]) / statistics.median(pair["boto3"]["seconds"])
        for pair in pairs
    ]
    return {
        "what": what,
        "seconds": round(median("mailbox", "seconds"), 3),
        "boto3 seconds": round(median("boto3", "seconds"), 3),
        "ratio": round(median("mailbox", "seconds") / median("boto3", "seconds"), 2),
        "spread": f"{min(ratios):.2f}–{max(ratios):.2f}",
        "cpu": round(median("mailbox", "cpu"), 3),
        "boto3 cpu": round(median("boto3", "cpu"), 3),
        "memory": round(median("mailbox", "memory"), 2),
        "boto3 memory": round(median("boto3", "memory"), 2),
    }


def one(kind: str, operation: str, nbytes: int, endpoint: str) -> _Figures:
    """Move an object of ``nbytes`` several times; the figures."""
    moves = _mailbox(endpoint) if kind == "mailbox" else _boto3(endpoint)
    put, get, remove = moves
    small = bytes(100_000)
    name = hashlib.sha256(small).hexdigest() + ".safetensors"
    put(name, small)  # warms up connections and code
    get(name)
    before = _rss()
    data: bytes | None = _content(nbytes)
    name = hashlib.sha256(_content(nbytes)).hexdigest() + ".safetensors"
    if operation == "get":
        put(name, _content(nbytes))
        data = None
        before = max(before, _rss())
    seconds: list[float] = []
    cpu: list[float] = []
    peak = _Peak()
    for _ in range(5 if nbytes < 512 * MIB else 2):
        began, cpu_began = time.perf_counter(), time.process_time()
        if data is None:
            get(name)
        else:
            put(name, data)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
        if data is not None:
            remove(name)
    memory = (peak.end() - before) / nbytes
    remove(name)
    return {"seconds": seconds, "cpu": cpu, "memory": [memory]}


def _content(nbytes: int) -> bytes:
    """The same bytes in every process; nothing of a store compresses them away."""
    return random.Random(1).randbytes(MIB) * (nbytes // MIB)


type _Moves = tuple[
    Callable[[str, bytes], object], Callable[[str], object], Callable[[str], object]
]


def _mailbox(endpoint: str) -> _Moves:
    box = gm.S3Mailbox(BUCKET, "bench", endpoint_url=endpoint, region="us-east-1")

    def put(name: str, data: bytes) -> None:
        asyncio.run(_returning(box.put_if_absent(name, data)))

    def get(name: str) -> None:
        asyncio.run(_returning(box.get(name)))

    def remove(name: str) -> None:
        asyncio.run(_returning(box.delete([name])))

    return put, get, remove


async def _returning(work: Coroutine[Any, Any, object]) -> None:
    await work


def _boto3(endpoint: str) -> _Moves:
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")

    def put(name: str, data: bytes) -> None:
        client.upload_fileobj(io.BytesIO(data), BUCKET, name)

    def get(name: str) -> None:
        client.download_fileobj(BUCKET, name, io.BytesIO())

    def remove(name: str) -> None:
        client.delete_object(Bucket=BUCKET, Key=name)

    return put, get, remove


class _Peak:
    """The largest memory of this process between its making and ``end``."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._peak = _rss()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            self._peak = max(self._peak, _rss())

    def end(self) -> int:
        """The peak, in bytes."""
        self._ended.set()
        self._thread.join()
        return self._peak


def _rss() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


if __name__ == "__main__":
    main()
