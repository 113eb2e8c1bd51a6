"""Words for tensors that every layer shares: names of formats, specs, the schema of a run."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

BITS = {"F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4}
"""Bits an element, by the safetensors name of the format."""

PARAMETER_DTYPES = ("F32", "F16", "BF16")
"""What a parameter of a run can be."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, format (a key of ``BITS``) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements; 1 for a 0-d tensor, 0 for an empty one."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data. ``F4`` packs two elements into one."""
        return self.count * BITS[self.dtype] // 8

    def __str__(self) -> str:
        """As error messages show it: ``F32[8, 24]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


type Schema = tuple[TensorSpec, ...]
"""The exchanged parameters of a run, sorted by name."""


def schema_digest(schema: Sequence[TensorSpec]) -> str:
    """sha256 (hex) of the compact JSON list of ``[name, dtype, shape]``."""
    rows = [[spec.name, spec.dtype, list(spec.shape)] for spec in schema]
    text = json.dumps(rows, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def schema_differences(ours: Schema, theirs: Schema) -> list[str]:
    """One line for each parameter that differs, empty when the schemas are equal."""
    mine = {spec.name: spec for spec in ours}
    run = {spec.name: spec for spec in theirs}
    lines = []
    for name in sorted(mine.keys() | run.keys()):
        if name not in run:
            lines.append(f"{name}: {mine[name]} here, not in the run")
        elif name not in mine:
            lines.append(f"{name}: {run[name]} in the run, not here")
        elif mine[name] != run[name]:
            lines.append(f"{name}: {mine[name]} here, {run[name]} in the run")
    return lines
