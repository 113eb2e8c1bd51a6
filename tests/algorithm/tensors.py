"""What the tests of the algorithm share: arrays of a backend, recorded runs."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import zstandard
from tests.backend.arrays import Placed, put_bytes
from tests.backend.arrays import blank as blank_array

from gradientmail.backend.base import Array, Backend
from gradientmail.schema import BITS, TensorSpec

_HERE = Path(__file__).parents[1] / "golden"
GOLDEN = _HERE if _HERE.is_dir() else _HERE.parents[2] / "shared" / "fixtures"


def take(nbytes: int) -> memoryview:
    """A buffer with old content (0xff is NaN in every float format), as a pool gives it."""
    return memoryview(bytearray(b"\xff" * nbytes))


def blank(backend: Backend, specs: Iterable[TensorSpec]) -> dict[str, Placed]:
    """Arrays for a payload, with old content."""
    return {spec.name: blank_array(backend, spec.dtype, spec.shape) for spec in specs}


def arrays(placed: Mapping[str, Placed]) -> dict[str, Array]:
    """What the backend is given of them."""
    return {name: each.array for name, each in placed.items()}


class RecordedRun:
    """A recorded run of the published version under ``tests/golden``."""

    def __init__(self, name: str) -> None:
        self.root = GOLDEN / name
        self.manifest = self.json("manifest.json")
        self.specs = {
            row["name"]: TensorSpec(row["name"], row["dtype"], tuple(row["shape"]))
            for row in self.manifest["schema"]
        }
        self.plan = [[self.specs[name] for name in names] for names in self.manifest["plan"]]
        records = sorted((self.root / "rounds").glob("*.json"))
        self.rounds = [self.json(f"rounds/{path.name}") for path in records]

    def json(self, key: str) -> dict[str, Any]:
        return json.loads((self.root / key).read_bytes())

    def payload(self, backend: Backend, ref: Mapping[str, Any]) -> dict[str, Placed]:
        """The arrays of a stored payload, read-only."""
        data = (self.root / ref["key"]).read_bytes()
        packed = ref["key"].endswith(".zst")
        if packed:
            data = zstandard.ZstdDecompressor().decompress(data)
        found = {}
        for name, tensor in safetensors.deserialize(data):
            dtype, raw = tensor["dtype"], bytes(tensor["data"])
            width = BITS[dtype] // 8
            if packed and width > 1:  # all first bytes, then all second bytes, …
                raw = b"".join(bytes(raw[i :: len(raw) // width]) for i in range(len(raw) // width))
            found[name] = put_bytes(backend, raw, dtype, tuple(tensor["shape"]))
        return found

    def before(self, backend: Backend, round_: int) -> tuple[dict[str, Placed], dict[str, Placed]]:
        """Theta and outer state of a round's fragment before that round."""
        earlier = round_ - len(self.plan)
        if earlier < 0:
            return self.payload(backend, self.manifest["init"][round_ % len(self.plan)]), {}
        record = self.rounds[earlier]
        return self.payload(backend, record["theta"]), self.payload(backend, record["outer"])

    def deltas(
        self, backend: Backend, round_: int
    ) -> list[tuple[dict[str, Placed], dict[str, Any]]]:
        """The contributions that a round counted: their payloads and what the record says."""
        found = []
        for participant in self.rounds[round_]["participants"]:
            snapshot = self.json(f"snapshots/{round_:010d}/{participant['learner']}.json")
            found.append((self.payload(backend, snapshot["payload"]), participant))
        return found
