"""Payloads: sealing, opening, codecs and the folder, each beside its bare floor.

``uv run benchmarks/payload.py [--json] [--mb 64] [--backend torch]``
"""

import argparse
import asyncio
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
import zstandard
from measure import Floor, median_seconds, show, wall_seconds

import gradientmail as gm
from gradientmail.backend import Backend, MlxBackend, NumpyBackend, TorchBackend
from gradientmail.buffers import HOST
from gradientmail.exchange import compression
from gradientmail.exchange.payload import PayloadLayout, sha256_hex
from gradientmail.mailbox.staging import flush
from gradientmail.schema import TensorSpec

BACKENDS: dict[str, type[Backend]] = {
    "torch": TorchBackend,
    "numpy": NumpyBackend,
    "mlx": MlxBackend,
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--backend", choices=BACKENDS, default="torch", help="of the codecs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    nbytes = args.mb * 10**6
    floor, pool, backend = Floor(nbytes), HOST, BACKENDS[args.backend]()
    layout = PayloadLayout([TensorSpec("w", "F32", (nbytes // 4,))])
    buffer = layout.blank(pool.take)
    slot = layout.slots["w"]
    memory = buffer[slot.start : slot.stop]
    np.frombuffer(memory, np.float32)[:] = np.random.default_rng(0).standard_normal(nbytes // 4)
    array = backend.array(memory, "F32", (nbytes // 4,))
    rows: list[dict[str, object]] = []

    def row(case: str, seconds: float, bare: float, limit: str) -> None:
        rows.append(
            {
                "case": case,
                "ms": round(seconds * 1e3, 1),
                "floor_ms": round(bare * 1e3, 1),
                "ratio": round(seconds / bare, 2),
                "floor": limit,
            }
        )

    row("hash", median_seconds(lambda: sha256_hex(buffer)), floor.hash, "sha256")
    with tempfile.TemporaryDirectory() as folder:
        mailbox, keys = gm.FilesystemMailbox(folder), iter(range(1000))
        run, path, warm = asyncio.Runner(), Path(folder) / "plain", bytearray(buffer.nbytes)

        def put() -> None:
            run.run(mailbox.put_if_absent(f"blob/{next(keys)}", buffer))

        def write(*, flushed: bool) -> None:
            with path.open("wb", buffering=0) as file:
                file.write(buffer)
                if flushed:
                    flush(file.fileno())

        def read() -> None:
            with path.open("rb", buffering=0) as file:
                file.readinto(warm)

        def tidy() -> None:
            path.unlink(missing_ok=True)
            run.run(mailbox.delete(run.run(mailbox.list("blob/"))))

        run.run(mailbox.put_if_absent("kept", buffer))
        took, flushed, kept = wall_seconds(
            put, partial(write, flushed=True), partial(write, flushed=False), after=tidy
        )
        row("folder put, wall", took, flushed, "write a file to the disk, wall")
        row("folder put, wall", took, kept, "write a file, not flushed, wall")
        write(flushed=False)
        got, bare = wall_seconds(lambda: run.run(mailbox.get("kept")), read)
        row("folder get, wall", got, bare, "read it, wall")
        run.close()
    for dtype, packed, scales in (("F8_E4M3", nbytes // 4, 4), ("F4", nbytes // 8, nbytes // 128)):
        shape = (nbytes // 4,)
        data = backend.array(pool.take(packed), dtype, shape)
        kind, count = ("F32", ()) if dtype == "F8_E4M3" else ("F8_E8M0", (scales,))
        scale = backend.array(pool.take(scales), kind, count)
        encode = median_seconds(lambda d=data, s=scale, t=dtype: backend.encode(array, t, d, s))
        row(f"encode {dtype}", encode, floor.copy, "copy of the fp32 tensor")
        out = backend.array(pool.take(nbytes), "F32", shape)
        decode = median_seconds(lambda d=data, s=scale, t=dtype, o=out: backend.decode(d, t, s, o))
        row(f"decode {dtype}", decode, floor.copy, "copy of the fp32 tensor")
    plain, shuffled = buffer[slot.start : slot.stop], pool.take(slot.nbytes)
    back, stored = pool.take(slot.nbytes), compression.compress(layout, buffer, pool.take)
    bare = median_seconds(lambda: np.copyto(np.asarray(back), np.asarray(plain)))
    shuffle = median_seconds(lambda: compression.shuffle(plain, shuffled, 4))
    row("shuffle", shuffle, bare, "copy into warm memory")
    unshuffle = median_seconds(lambda: compression.unshuffle(shuffled, back, 4))
    row("unshuffle", unshuffle, bare, "copy into warm memory")
    warm = pool.take(slot.nbytes + slot.nbytes // 256 + 1024)
    pack = median_seconds(lambda: compression.compress(layout, buffer, pool.take), repeats=3)
    bare = median_seconds(
        lambda: zstandard.ZstdCompressor(level=1).stream_reader(shuffled).readinto(warm), repeats=3
    )
    row("zstd without the shuffle", pack - shuffle, bare, "zstandard, into warm memory")
    unpack = median_seconds(lambda: compression.decompress(layout, stored, pool.take), repeats=3)
    bare = median_seconds(
        lambda: zstandard.ZstdDecompressor().stream_reader(stored).readinto(warm), repeats=3
    )
    row("unzstd without the unshuffle", unpack - unshuffle, bare, "zstandard, into warm memory")
    show("payload", rows, as_json=args.json)


if __name__ == "__main__":
    main()
