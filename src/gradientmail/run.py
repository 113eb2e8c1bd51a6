"""What never changes in a run: schema, plan, options, and the layout of every payload."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.precision import QUANTIZED, delta_specs, outer_specs, update_specs
from gradientmail.algorithm.schedule import Schedule
from gradientmail.backend.base import Array, Backend
from gradientmail.errors import ProtocolError, RunConfigMismatch, SchemaMismatch
from gradientmail.exchange.payload import PayloadLayout
from gradientmail.exchange.records import Manifest
from gradientmail.exchange.sealing import Payload
from gradientmail.schema import Schema, TensorSpec, schema_differences, schema_digest


@dataclass(frozen=True)
class Fragment:
    """One fragment's tensors and how its payloads look."""

    index: int
    specs: tuple[TensorSpec, ...]
    theta: PayloadLayout
    delta: PayloadLayout
    outer: PayloadLayout
    update: PayloadLayout | None
    fp32: PayloadLayout
    """How a quantized delta lies in memory once it is decoded, and a sum of deltas."""
    is_quantized: bool
    """Whether deltas have to be decoded."""

    @property
    def is_fp32(self) -> bool:
        """Whether theta may be written where a delta was decoded, or deltas were summed."""
        return self.fp32.slots == self.theta.slots


def fragment_of(index: int, specs: Sequence[TensorSpec], algorithm: DiLoCo) -> Fragment:
    """Lay out the payloads of one fragment."""
    update = None
    if algorithm.commit_dtype is not None:
        update = PayloadLayout(update_specs(specs, algorithm.commit_dtype))
    return Fragment(
        index=index,
        specs=tuple(specs),
        theta=PayloadLayout(specs),
        delta=PayloadLayout(delta_specs(specs, algorithm.delta_dtype)),
        outer=PayloadLayout(outer_specs(specs, commit_dtype=algorithm.commit_dtype)),
        update=update,
        fp32=PayloadLayout(replace(spec, dtype="F32") for spec in specs),
        is_quantized=algorithm.delta_dtype in QUANTIZED,
    )


def fragments_of(
    schema: Schema, plan: Sequence[Sequence[str]], algorithm: DiLoCo
) -> tuple[Fragment, ...]:
    """Lay out all fragments of a plan."""
    by_name = {spec.name: spec for spec in schema}
    return tuple(
        fragment_of(index, [by_name[name] for name in names], algorithm)
        for index, names in enumerate(plan)
    )


class Run:
    """A run as its manifest describes it."""

    def __init__(self, manifest: Manifest, algorithm: DiLoCo) -> None:
        """``algorithm`` is the manifest's, read."""
        self.manifest = manifest
        self.algorithm = algorithm
        self.schema = manifest.schema
        self.averaged = frozenset(manifest.averaged)
        """The tensors that are buffers: merged by the weighted mean, moved by just that."""
        self.digest = schema_digest(manifest.schema)
        self.fragments = fragments_of(manifest.schema, manifest.plan, algorithm)
        self.schedule = Schedule(algorithm.sync_every, len(self.fragments))


def read_run(manifest: Manifest) -> Run:
    """The run of a manifest; ``ProtocolError`` when its options or its plan cannot be used."""
    try:
        return Run(manifest, DiLoCo.from_json(manifest.algorithm))
    except ValueError as error:
        raise ProtocolError(
            f"the run's manifest has options this version cannot use: {error}"
        ) from None


def check_schema(run: Run, schema: Schema, averaged: frozenset[str] = frozenset()) -> None:
    """Raise ``SchemaMismatch`` listing every parameter that differs from the run's.

    ``averaged`` are those of ``schema`` that are buffers here.
    """
    lines = schema_differences(schema, run.schema)
    if lines:
        shown = "\n  ".join(lines[:20]) + (
            f"\n  … and {len(lines) - 20} more" if len(lines) > 20 else ""
        )
        raise SchemaMismatch(
            "this model is not the one that the run under this mailbox trains; parameters that "
            f"differ: {len(lines)}\n  {shown}\n{_advice(run, schema, averaged)}, or use another "
            "folder or prefix for a new run."
        )


def _advice(run: Run, schema: Schema, averaged: frozenset[str]) -> str:
    ours, theirs = {spec.name for spec in schema}, {spec.name for spec in run.schema}
    if run.averaged and ours == theirs - run.averaged:
        return 'They are buffers, which the run exchanges: pass buffers="average"'
    if averaged and theirs == ours - averaged:
        return 'They are buffers, which the run leaves local: leave buffers="average" out'
    return "Use the run's model"


def check_algorithm(run: Run, algorithm: DiLoCo) -> None:
    """Raise ``RunConfigMismatch`` listing every option that differs from the run's."""
    lines = algorithm.differences(run.algorithm)
    if lines:
        shown = "\n  ".join(lines)
        raise RunConfigMismatch(
            f"the run under this mailbox was created with other options:\n  {shown}\n"
            "Use the run's options, or another folder or prefix for a new run."
        )


def arrays_over(backend: Backend, buffer: memoryview, layout: PayloadLayout) -> dict[str, Array]:
    """The tensors of a payload buffer that has exactly this layout, by name."""
    return {
        name: backend.array(buffer[slot.start : slot.stop], slot.dtype, slot.shape)
        for name, slot in layout.slots.items()
    }


def payload_arrays(backend: Backend, payload: Payload) -> dict[str, Array]:
    """The tensors of a payload, by name; its order may differ from ours."""
    return {
        name: backend.array(payload.data(name), slot.dtype, slot.shape)
        for name, slot in payload.slots.items()
    }
