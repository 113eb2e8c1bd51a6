"""The same for what the exchange does with formats: quantized, 16-bit, compressed, averaged."""

from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.breakages import FAST, TURNS, TWO, Breakage, plan

from gradientmail import collecting, committing, deltas, versions
from gradientmail.algorithm import outer_parts
from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.outer import FragmentState, OuterStep
from gradientmail.algorithm.precision import encode_difference
from gradientmail.backend.base import Backend
from gradientmail.exchange.exchange import Exchange
from gradientmail.exchange.payload import sha256_hex
from gradientmail.exchange.sealing import Payload, Sealed
from gradientmail.handoff import Version
from gradientmail.node import Node
from gradientmail.testing.plans import Formats
from gradientmail.testing.vector import VectorBackend
from gradientmail.verification import arithmetic
from gradientmail.verification.reading import memory


def rounds_a_delta_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = VectorBackend.encode_difference

    def encode(self: VectorBackend, left: Any, right: Any, dtype: str, *rest: Any) -> bool:
        way = array_of(self, len(left))
        self.subtract(left, right, way)
        codes, factor = memory(len(left)), self.array(memory(4), "F32", ())
        self.encode(way, "F8_E4M3", codes, factor)
        self.decode(codes, "F8_E4M3", factor, way)
        return whole(self, way, array_of(self, len(left)), dtype, *rest)

    def twice(backend: Backend, *what: Any) -> list[str]:
        assert isinstance(backend, VectorBackend)
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(VectorBackend, "encode_difference", encode)
            return encode_difference(backend, *what)

    monkeypatch.setattr(deltas, "encode_difference", twice)


def array_of(backend: Backend, count: int) -> Any:
    """Zeros in F32."""
    return backend.array(memory(4 * count), "F32", (count,))


def doubles_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(backend: Backend, left: Any, right: Any, specs: Any, *rest: Any) -> list[str]:
        bad = encode_difference(backend, left, right, specs, *rest)
        out = rest[1]
        for spec in specs:
            scale = out[f"{spec.name}.scale"]
            scale[0] += scale[0] not in (127, 254)
        return bad

    monkeypatch.setattr(deltas, "encode_difference", doubled)


def decodes_with_the_scale_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collecting.decode_tensors

    def decode(backend: Backend, arrays: Any, dtype: str | None, specs: Any, *rest: Any) -> Any:
        names = [f"{spec.name}.scale" for spec in specs]
        turned = dict(arrays) | dict(zip(names, [arrays[n] for n in reversed(names)], strict=True))
        return whole(backend, turned, dtype, specs, *rest)

    monkeypatch.setattr(collecting, "decode_tensors", decode)


def forgets_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theta stays where it is, and the update says so."""

    def commit(self: OuterStep, backend: Backend, spec: Any, change: Any, take: Any) -> None:
        old = change.old.theta
        dtype, out = self.commit_dtype, change.update
        encode_difference(backend, old, old, [spec], dtype, out, take)
        self._apply(backend, spec, change, take)

    monkeypatch.setattr(OuterStep, "_commit_update", commit)


def publishes_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of what the update leads to."""

    def apply(self: OuterStep, backend: Backend, spec: Any, change: Any, take: Any) -> None:
        del self, take
        backend.encode(change.new.master(spec.name), spec.dtype, change.new.theta[spec.name], None)

    monkeypatch.setattr(OuterStep, "_apply", apply)


def keeps_nothing_that_rounding_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theta becomes the master, in the verification's outer step, too."""
    whole = OuterStep.follow

    def follow(self: OuterStep, backend: Backend, specs: Any, change: Any, **how: Any) -> Any:
        held = whole(self, backend, specs, change, **how)
        for spec in specs:
            master, theta = change.new.master(spec.name), change.new.theta[spec.name]
            if master is not theta:
                backend.encode(theta, "F32", master, None)
        return held

    monkeypatch.setattr(OuterStep, "follow", follow)


def steps_from_theta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the master."""
    whole = committing.Committer._arrays

    def arrays(self: Any, state: Any) -> FragmentState:
        found = whole(self, state)
        return FragmentState(
            found.theta, {n: x for n, x in found.outer.items() if not n.startswith("master.")}
        )

    monkeypatch.setattr(committing.Committer, "_arrays", arrays)


def rounds_theta_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = OuterStep.follow

    def follow(self: OuterStep, backend: Backend, specs: Any, change: Any, **how: Any) -> Any:
        held = whole(self, backend, specs, change, **how)
        for spec in specs:
            short = backend.array(memory(2 * spec.count), "F16", spec.shape)
            backend.encode(change.new.theta[spec.name], "F16", short, None)
            backend.encode(change.new.master(spec.name), "F16", short, None)
            backend.encode(short, spec.dtype, change.new.theta[spec.name], None)
        return held

    monkeypatch.setattr(OuterStep, "follow", follow)


def rebuilds_on_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    async def theta(self: versions.Versions, record: Any) -> Payload | None:
        fragment = self._run.fragments[record.fragment]
        base: Version = self._newest[record.fragment]
        assert fragment.update is not None
        update = await self._exchange.fetch(record.update.payload, fragment.update)
        if update is None:
            return None
        buffer = self._add_update(fragment, base, update)
        return self._exchange.hold(record.theta, buffer, fragment.theta)

    monkeypatch.setattr(versions.Versions, "theta", theta)


def names_the_digest_of_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def digest(self: Exchange, payload: Payload) -> str:
        del self
        return payload.ref.sha256

    monkeypatch.setattr(Exchange, "plain_sha256", digest)


def hashes_before_it_compresses(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Exchange._seal

    def seal(self: Exchange, sealing: Any, key_of: Any) -> Sealed:
        sealed = whole(self, sealing, key_of)
        digest = sha256_hex(sealed.buffer)
        key = key_of(digest, self._extension)
        return Sealed(
            replace(sealed.ref, key=key, sha256=digest),
            sealed.buffer,
            sealed.stored,
            sealed.layout,
        )

    monkeypatch.setattr(Exchange, "_seal", seal)


def swaps_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collecting.Collector._arrays

    def arrays(self: collecting.Collector, payload: Payload) -> Any:
        found = dict(whole(self, payload))
        found["d.mean"], found["d.variance"] = found["d.variance"], found["d.mean"]
        return found

    monkeypatch.setattr(collecting.Collector, "_arrays", arrays)


def gives_buffers_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the verification's outer step, too."""

    def steps(algorithm: DiLoCo, specs: Any, averaged: object) -> Any:
        del averaged
        trained = OuterStep(algorithm.outer_lr, algorithm.outer_momentum, algorithm.commit_dtype)
        return [(trained, list(specs))]

    monkeypatch.setattr(outer_parts, "outer_steps", steps)
    monkeypatch.setattr(arithmetic, "outer_steps", steps)


def creates_a_run_without_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Node.create

    async def create(self: Node, schema: Any, algorithm: DiLoCo, buffers: Any, _: Any) -> Any:
        return await whole(self, schema, algorithm, buffers)

    monkeypatch.setattr(Node, "create", create)


F4 = replace(TWO, delta_dtype="F4", commit_dtype="F4")
E4M3 = replace(FAST, delta_dtype="F8_E4M3", commit_dtype="F8_E4M3")
WHOLE = DiLoCo(sync_every=3, fragments=1, in_flight=1, quorum_size=2)

QUANTIZED = plan(F4)
BYTES = plan(E4M3, formats=Formats(compressed=(True, False)))
BRAIN = plan(TWO, formats=Formats(parameters=("BF16",)))
HALF = plan(replace(TWO, commit_dtype="BF16"), formats=Formats(parameters=("F16",)))
AVERAGED = plan(WHOLE, formats=Formats(buffers=True))
MISSED = replace(TURNS, algorithm=replace(FAST, commit_dtype="F4"))
PACKED = plan(replace(TWO, commit_dtype="F4"), formats=Formats(compressed=(True,)))


FORMAT_BREAKAGES = [
    Breakage("rounds a delta twice", rounds_a_delta_twice, "deltas", QUANTIZED),
    Breakage("doubles a scale", doubles_a_scale, "deltas", QUANTIZED),
    Breakage("takes another scale", decodes_with_the_scale_of_another, "commits", QUANTIZED),
    Breakage("forgets the update", forgets_the_update, "theta", QUANTIZED),
    Breakage("publishes the master", publishes_the_master, "theta", BYTES),
    Breakage("forgets what rounding lost", keeps_nothing_that_rounding_lost, "commits", QUANTIZED),
    Breakage("steps from theta", steps_from_theta, "commits", BYTES),
    Breakage("steps from 16 bits", steps_from_theta, "commits", BRAIN),
    Breakage("rounds 16 bits twice", rounds_theta_twice, "theta", BRAIN),
    Breakage("forgets an update of 16 bits", forgets_the_update, "theta", HALF),
    Breakage("rebuilds on any version", rebuilds_on_any_version, "anchors", MISSED),
    Breakage("digest of stored bytes", names_the_digest_of_what_is_stored, "theta", PACKED),
    Breakage("hashes before it compresses", hashes_before_it_compresses, "payloads", PACKED),
    Breakage("swaps two buffers", swaps_two_buffers, "commits", AVERAGED),
    Breakage("gives buffers momentum", gives_buffers_momentum, "buffers", AVERAGED),
    Breakage("creates without buffers", creates_a_run_without_buffers, "manifest", AVERAGED),
]
