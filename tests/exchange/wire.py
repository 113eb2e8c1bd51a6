"""What the tests of the wire format share: recorded objects, random tensors, a reference writer."""

import ctypes
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
from hypothesis import strategies as st

from gradientmail.exchange.payload import PayloadLayout
from gradientmail.schema import BITS, TensorSpec

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())

# What the library's serializer calls our formats. It counts bytes of F4, not elements.
LIBRARY_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}


def recorded(run: str, pattern: str) -> dict[str, bytes]:
    """The objects of a recorded run whose keys match, by key."""
    root = GOLDEN / run
    found = {path.relative_to(root).as_posix(): path for path in sorted(root.glob(pattern))}
    assert found, f"no {pattern} in {run}"
    return {key: path.read_bytes() for key, path in found.items()}


def take(nbytes: int) -> memoryview:
    """A buffer full of old content, as a pool gives it."""
    return memoryview(bytearray(b"\xa5" * nbytes))


def names() -> st.SearchStrategy[str]:
    """Any name that UTF-8 can hold, with a liking for what JSON escapes."""
    awkward = st.text('"\\/\b\f\n\r\t\0\x1f\x7f\u2028é😀', max_size=4)
    return (awkward | st.text(max_size=8)).filter(lambda name: name != "__metadata__")


@st.composite
def specs(draw: st.DrawFn, max_size: int = 6) -> list[TensorSpec]:
    """Distinct tensors of every format, scalars and empty ones among them."""
    chosen = draw(st.lists(names(), max_size=max_size, unique=True))
    result = []
    for name in chosen:
        dtype = draw(st.sampled_from(sorted(BITS)))
        sizes = st.integers(0, 5)
        shape = draw(st.lists(sizes, min_size=1 if dtype == "F4" else 0, max_size=3))
        if dtype == "F4":
            shape[-1] *= 2
        result.append(TensorSpec(name, dtype, tuple(shape)))
    return result


def random_data(specs: list[TensorSpec], seed: int = 0) -> dict[str, bytes]:
    """Bytes for each tensor."""
    source = random.Random(seed)
    return {spec.name: source.randbytes(spec.nbytes) for spec in specs}


def library_bytes(specs: list[TensorSpec], data: Mapping[str, bytes]) -> bytes:
    """What the safetensors library itself writes."""
    held = []
    tensors = {}
    for spec in specs:
        shape = list(spec.shape)
        if spec.dtype == "F4":
            shape[-1] //= 2
        memory = ctypes.create_string_buffer(data[spec.name], max(spec.nbytes, 1))
        held.append(memory)
        tensors[spec.name] = safetensors.TensorSpec(
            dtype=LIBRARY_DTYPES[spec.dtype],
            shape=shape,
            data_ptr=ctypes.addressof(memory),
            data_len=spec.nbytes,
        )
    return bytes(safetensors.serialize(tensors))


def own_bytes(layout: PayloadLayout, data: Mapping[str, bytes]) -> memoryview:
    """The same through ``PayloadLayout``."""
    buffer = layout.blank(take)
    for name, slot in layout.slots.items():
        buffer[slot.start : slot.stop] = data[name]
    return buffer


def foreign_bytes(
    specs: list[TensorSpec],
    data: Mapping[str, bytes],
    change: Callable[[dict[str, object]], object] = lambda entries: entries,
    *,
    pad: int = 0,
    more: int = 0,
) -> bytes:
    """A payload as another writer may make it: tensors in the order given, any padding.

    ``change`` may alter the header's object or return another value in its place. The data is
    ``more`` bytes longer than its tensors.
    """
    entries: dict[str, object] = {}
    end = 0
    for spec in specs:
        start, end = end, end + spec.nbytes
        offsets = [start, end]
        entries[spec.name] = {
            "data_offsets": offsets,
            "shape": list(spec.shape),
            "dtype": spec.dtype,
        }
    header = json.dumps(change(entries), indent=1).encode() + b" " * pad
    content = b"".join(data[spec.name] for spec in specs)
    content = content + bytes(more) if more >= 0 else content[:more]
    return len(header).to_bytes(8, "little") + header + content
