"""Every commit of the recorded runs, computed again from what it was computed from."""

import functools
import hashlib
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import save
from tests.algorithm.tensors import RecordedRun, arrays, blank, take
from tests.backend.arrays import BACKENDS, Placed, assert_near

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.merge import Fold, contribution_weight
from gradientmail.algorithm.outer import FragmentState, OuterStep, Transition, apply_update
from gradientmail.algorithm.partition import partition
from gradientmail.algorithm.precision import (
    decode_tensors,
    delta_specs,
    encode_difference,
    fp32_array,
    outer_specs,
    update_specs,
)
from gradientmail.algorithm.schedule import Schedule
from gradientmail.backend import MlxBackend
from gradientmail.backend.base import Backend
from gradientmail.schema import TensorSpec

RUNS = {name: RecordedRun(name) for name in ("f32-default", "bf16-f4-zstd")}
every_run = pytest.mark.parametrize("name", RUNS)
every_round = pytest.mark.parametrize(
    ("name", "round_"), [(name, r) for name, run in RUNS.items() for r in range(len(run.rounds))]
)


@pytest.fixture(scope="module", params=[*BACKENDS, MlxBackend()], ids=lambda each: each.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Also MLX's, whose arithmetic is NumPy's."""
    return request.param


def algorithm_of(name: str) -> DiLoCo:
    return DiLoCo.from_json(RUNS[name].manifest["algorithm"])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-6 of the value, or of the least value that its tensor's rounding can tell."""
    scale = float(expected.abs().max())
    assert_near(found, expected, rtol=1e-6, atol=1e-7 * scale)


@functools.cache
def commit(
    backend: Backend, name: str, round_: int
) -> tuple[dict[str, Placed], dict[str, Placed], float | None]:
    """A round's new theta, its new outer state, and its cosine."""
    run, algorithm = RUNS[name], algorithm_of(name)
    specs = run.plan[round_ % len(run.plan)]
    fold = Fold(algorithm.merge, specs, backend, take)
    fresh = functools.partial(fp32_array, backend, take=take)
    for payload, participant in run.deltas(backend, round_):
        deltas = decode_tensors(backend, arrays(payload), algorithm.delta_dtype, specs, fresh)
        assert fold.add(deltas, contribution_weight(participant["tokens"], participant["steps"]))
    merged = fold.merged()
    theta = blank(backend, specs)
    outer = blank(backend, outer_specs(specs, commit_dtype=algorithm.commit_dtype))
    old_theta, old_outer = run.before(backend, round_)
    change = Transition(
        FragmentState(arrays(old_theta), arrays(old_outer)),
        merged.deltas,
        FragmentState(arrays(theta), arrays(outer)),
        arrays(blank(backend, update_specs(specs, algorithm.commit_dtype))),
        final=False,
    )
    step = OuterStep(algorithm.outer_lr, algorithm.outer_momentum, algorithm.commit_dtype)
    step(backend, specs, change, take)
    return theta, outer, merged.cosine


def digest(tensors: Mapping[str, Placed]) -> str:
    """The sha256 of the payload that the safetensors library writes for them."""
    return hashlib.sha256(save({name: x.tensor() for name, x in tensors.items()})).hexdigest()


@every_run
def test_options_are_written_as_recorded(name: str) -> None:
    assert algorithm_of(name).to_json() == RUNS[name].manifest["algorithm"]


@every_run
def test_plan_is_the_recorded_one(name: str) -> None:
    run, algorithm = RUNS[name], algorithm_of(name)
    plan = partition(list(run.specs.values()), algorithm.partition, algorithm.fragments)
    assert plan == tuple(tuple(names) for names in run.manifest["plan"])


@every_round
def test_round_names_its_fragment_and_version(name: str, round_: int) -> None:
    run, algorithm = RUNS[name], algorithm_of(name)
    schedule, record = Schedule(algorithm.sync_every, len(run.plan)), RUNS[name].rounds[round_]
    assert record["fragment"] == schedule.fragment(round_)
    assert record["version"] == schedule.version(round_)
    due = schedule.due_step(round_)
    assert record["step"] == max(p["local_step"] for p in record["participants"]) >= due


@every_round
def test_payloads_have_the_recorded_tensors(backend: Backend, name: str, round_: int) -> None:
    run, algorithm = RUNS[name], algorithm_of(name)
    specs, record = run.plan[round_ % len(run.plan)], run.rounds[round_]

    def shapes(specs: tuple[TensorSpec, ...]) -> dict[str, tuple[int, int]]:
        return {s.name: (s.nbytes, len(s.shape)) for s in specs}

    def found(payload: Mapping[str, Placed]) -> dict[str, tuple[int, int]]:
        return {n: (len(x.bytes()), len(x.spec.shape)) for n, x in payload.items()}

    for payload, _ in run.deltas(backend, round_):
        assert found(payload) == shapes(delta_specs(specs, algorithm.delta_dtype))
    outer = outer_specs(specs, commit_dtype=algorithm.commit_dtype)
    assert found(run.payload(backend, record["outer"])) == shapes(outer)
    assert found(run.payload(backend, record["theta"])) == shapes(tuple(specs))
    if record["update"]:
        update = run.payload(backend, record["update"]["payload"])
        assert found(update) == shapes(update_specs(specs, algorithm.commit_dtype))


@every_round
def test_weights_are_the_recorded_ones(backend: Backend, name: str, round_: int) -> None:
    for _, participant in RUNS[name].deltas(backend, round_):
        weight = contribution_weight(participant["tokens"], participant["steps"])
        assert weight == pytest.approx(participant["weight"], rel=1e-12)


@every_round
def test_cosine_is_the_recorded_one(backend: Backend, name: str, round_: int) -> None:
    """PyTorch sums a tensor's products in fp32, as the published version does."""
    run, algorithm = RUNS[name], algorithm_of(name)
    _, _, cosine = commit(backend, name, round_)
    bound = 1e-9 if backend.name == "torch" else 1e-7
    assert cosine == pytest.approx(run.rounds[round_]["cosine"], abs=bound)
    specs = run.plan[round_ % len(run.plan)]
    whole: list[torch.Tensor] = []
    fresh = functools.partial(fp32_array, backend, take=take)
    for payload, _ in run.deltas(backend, round_):
        deltas = decode_tensors(backend, arrays(payload), algorithm.delta_dtype, specs, fresh)
        fp32 = blank(backend, [TensorSpec(spec.name, "F32", spec.shape) for spec in specs])
        for tensor, out in fp32.items():
            backend.combine([(1.0, deltas[tensor])], out.array)
        whole.append(torch.cat([x.tensor().double().flatten() for x in fp32.values()]))
    exact = torch.nn.functional.cosine_similarity(*whole, dim=0, eps=0.0)
    assert cosine == pytest.approx(float(exact), abs=1e-7)


@every_round
def test_outer_state_is_the_recorded_one(backend: Backend, name: str, round_: int) -> None:
    _, outer, _ = commit(backend, name, round_)
    expected = RUNS[name].payload(backend, RUNS[name].rounds[round_]["outer"])
    assert outer.keys() == expected.keys()
    for tensor, placed in expected.items():
        close(outer[tensor].tensor(), placed.tensor())


@pytest.mark.parametrize("round_", range(len(RUNS["f32-default"].rounds)))
def test_theta_is_the_recorded_one(backend: Backend, round_: int) -> None:
    run = RUNS["f32-default"]
    theta, _, _ = commit(backend, "f32-default", round_)
    expected = run.payload(backend, run.rounds[round_]["theta"])
    assert theta.keys() == expected.keys()
    for tensor, placed in expected.items():
        close(theta[tensor].tensor(), placed.tensor())


@pytest.mark.parametrize("round_", range(len(RUNS["bf16-f4-zstd"].rounds)))
def test_update_is_the_recorded_one_byte_for_byte(backend: Backend, round_: int) -> None:
    """From the recorded master: what backends differ in, the last bits of it, is left out."""
    run = RUNS["bf16-f4-zstd"]
    record, specs = run.rounds[round_], run.plan[round_ % len(run.plan)]
    outer, (theta, _) = run.payload(backend, record["outer"]), run.before(backend, round_)
    master = {spec.name: outer[f"master.{spec.name}"].array for spec in specs}
    update = blank(backend, update_specs(specs, "F4"))
    encode_difference(backend, master, arrays(theta), specs, "F4", arrays(update), take)
    recorded = run.payload(backend, record["update"]["payload"])
    assert recorded.keys() == update.keys()
    for name, placed in recorded.items():
        same = update[name].bytes() == placed.bytes()
        assert same, name


@pytest.mark.parametrize("round_", range(len(RUNS["bf16-f4-zstd"].rounds)))
def test_theta_is_rebuilt_from_the_recorded_update(backend: Backend, round_: int) -> None:
    run = RUNS["bf16-f4-zstd"]
    record, specs = run.rounds[round_], run.plan[round_ % len(run.plan)]
    update = run.payload(backend, record["update"]["payload"])
    theta, _ = run.before(backend, round_)
    rebuilt = blank(backend, specs)
    apply_update(backend, specs, arrays(theta), arrays(update), "F4", arrays(rebuilt), take)
    for name, placed in run.payload(backend, record["theta"]).items():
        same = rebuilt[name].bytes() == placed.bytes()
        assert same, name
    assert digest(rebuilt) == record["update"]["theta_digest"]


@pytest.mark.parametrize("fragment", range(len(RUNS["bf16-f4-zstd"].plan)))
def test_every_theta_follows_from_the_first_by_updates_alone(
    backend: Backend, fragment: int
) -> None:
    """As a node that never fetches a whole version rebuilds them, one from the other."""
    run = RUNS["bf16-f4-zstd"]
    specs, (theta, _) = run.plan[fragment], run.before(backend, fragment)
    for record in run.rounds[fragment :: len(run.plan)]:
        update = run.payload(backend, record["update"]["payload"])
        rebuilt = blank(backend, specs)
        apply_update(backend, specs, arrays(theta), arrays(update), "F4", arrays(rebuilt), take)
        assert digest(rebuilt) == record["update"]["theta_digest"]
        theta = rebuilt
