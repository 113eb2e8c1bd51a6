"""What the tests of the algorithm share: a backend, its arrays, recorded runs."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import zstandard

from gradientmail.backend.torch import TorchBackend
from gradientmail.schema import BITS, TensorSpec

BACKEND = TorchBackend()
_HERE = Path(__file__).parents[1] / "golden"
GOLDEN = _HERE if _HERE.is_dir() else _HERE.parents[2] / "shared" / "fixtures"


def take(nbytes: int) -> memoryview:
    """A buffer with old content (0xff is NaN in every float format), as a pool gives it."""
    return memoryview(bytearray(b"\xff" * nbytes))


def blank(specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """Arrays for a payload, with old content."""
    return {spec.name: BACKEND.array(take(spec.nbytes), spec.dtype, spec.shape) for spec in specs}


def same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two arrays hold the same bytes; unlike ``equal``, NaN is itself and -0 is not 0."""
    if x.shape != y.shape:
        return False
    x, y = (z.reshape(-1).view(torch.uint8) if z.numel() else z for z in (x, y))
    return torch.equal(x, y)


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

    def payload(self, ref: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The arrays of a stored payload."""
        data = (self.root / ref["key"]).read_bytes()
        packed = ref["key"].endswith(".zst")
        if packed:
            data = zstandard.ZstdDecompressor().decompress(data)
        arrays = {}
        for name, tensor in safetensors.deserialize(data):
            dtype, raw = tensor["dtype"], bytes(tensor["data"])
            width = BITS[dtype] // 8
            if packed and width > 1:  # all first bytes, then all second bytes, …
                raw = b"".join(bytes(raw[i :: len(raw) // width]) for i in range(len(raw) // width))
            arrays[name] = BACKEND.array(memoryview(raw), dtype, tuple(tensor["shape"]))
        return arrays

    def before(self, round_: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Theta and outer state of a round's fragment before that round."""
        earlier = round_ - len(self.plan)
        if earlier < 0:
            return self.payload(self.manifest["init"][round_ % len(self.plan)]), {}
        record = self.rounds[earlier]
        return self.payload(record["theta"]), self.payload(record["outer"])

    def deltas(self, round_: int) -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
        """The contributions that a round counted: their payloads and what the record says."""
        found = []
        for participant in self.rounds[round_]["participants"]:
            snapshot = self.json(f"snapshots/{round_:010d}/{participant['learner']}.json")
            found.append((self.payload(snapshot["payload"]), participant))
        return found
