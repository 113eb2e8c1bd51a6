"""Every commit of the recorded runs, computed again from what it was computed from."""

import functools

import pytest
import torch
from tests.algorithm.tensors import BACKEND, RecordedRun, blank, same_bytes, take
from tests.backend.arrays import assert_near

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.algorithm.merge import Fold, contribution_weight
from gradientmail.algorithm.outer import FragmentState, OuterStep, apply_update
from gradientmail.algorithm.partition import partition
from gradientmail.algorithm.precision import (
    decode_tensors,
    delta_specs,
    encode_difference,
    outer_specs,
    theta_specs,
    update_specs,
)
from gradientmail.algorithm.schedule import Schedule
from gradientmail.schema import TensorSpec

RUNS = {name: RecordedRun(name) for name in ("f32-default", "bf16-f4-zstd")}
every_run = pytest.mark.parametrize("name", RUNS)
every_round = pytest.mark.parametrize(
    ("name", "round_"), [(name, r) for name, run in RUNS.items() for r in range(len(run.rounds))]
)


def algorithm_of(name: str) -> DiLoCo:
    return DiLoCo.from_json(RUNS[name].manifest["algorithm"])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-6 of the value, or of the least value that its tensor's rounding can tell."""
    scale = float(expected.abs().max())
    assert_near(found, expected, rtol=1e-6, atol=1e-7 * scale)


@functools.cache
def commit(name: str, round_: int) -> tuple[FragmentState, dict[str, torch.Tensor], float | None]:
    """A round's new state, its update and its cosine."""
    run, algorithm = RUNS[name], algorithm_of(name)
    specs = run.plan[round_ % len(run.plan)]
    fold = Fold(algorithm.merge, specs, BACKEND, take)
    for payload, participant in run.deltas(round_):
        deltas = decode_tensors(BACKEND, payload, algorithm.delta_dtype, specs, take)
        assert fold.add(deltas, contribution_weight(participant["tokens"], participant["steps"]))
    merged = fold.merged()
    outer = blank(outer_specs(specs, commit_dtype=algorithm.commit_dtype))
    new = FragmentState(blank(theta_specs(specs)), outer)
    update = blank(update_specs(specs, algorithm.commit_dtype))
    OuterStep(algorithm.outer_lr, algorithm.outer_momentum, algorithm.commit_dtype)(
        BACKEND,
        specs,
        FragmentState(*run.before(round_)),
        merged.deltas,
        new=new,
        update=update,
        final=False,
        take=take,
    )
    return new, update, merged.cosine


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
def test_payloads_have_the_recorded_tensors(name: str, round_: int) -> None:
    run, algorithm = RUNS[name], algorithm_of(name)
    specs, record = run.plan[round_ % len(run.plan)], run.rounds[round_]

    def shapes(specs: tuple[TensorSpec, ...]) -> dict[str, tuple[int, int]]:
        return {s.name: (s.nbytes, len(s.shape) if s.dtype != "F4" else 1) for s in specs}

    def found(arrays: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
        return {n: (a.numel() * a.element_size(), a.dim()) for n, a in arrays.items()}

    for payload, _ in run.deltas(round_):
        assert found(payload) == shapes(delta_specs(specs, algorithm.delta_dtype))
    outer = outer_specs(specs, commit_dtype=algorithm.commit_dtype)
    assert found(run.payload(record["outer"])) == shapes(outer)
    assert found(run.payload(record["theta"])) == shapes(theta_specs(specs))
    if record["update"]:
        update = run.payload(record["update"]["payload"])
        assert found(update) == shapes(update_specs(specs, algorithm.commit_dtype))


@every_round
def test_weights_are_the_recorded_ones(name: str, round_: int) -> None:
    for _, participant in RUNS[name].deltas(round_):
        weight = contribution_weight(participant["tokens"], participant["steps"])
        assert weight == pytest.approx(participant["weight"], rel=1e-12)


@every_round
def test_cosine_is_the_recorded_one(name: str, round_: int) -> None:
    """It sums a tensor's products in fp32, as the published version does."""
    run, algorithm = RUNS[name], algorithm_of(name)
    _, _, cosine = commit(name, round_)
    assert cosine == pytest.approx(run.rounds[round_]["cosine"], abs=1e-9)
    specs = run.plan[round_ % len(run.plan)]
    whole: list[torch.Tensor] = []
    for payload, _ in run.deltas(round_):
        deltas = decode_tensors(BACKEND, payload, algorithm.delta_dtype, specs, take)
        whole.append(torch.cat([delta.double().flatten() for delta in deltas.values()]))
    exact = torch.nn.functional.cosine_similarity(*whole, dim=0, eps=0.0)
    assert cosine == pytest.approx(float(exact), abs=1e-7)


@every_round
def test_outer_state_is_the_recorded_one(name: str, round_: int) -> None:
    new, _, _ = commit(name, round_)
    expected = RUNS[name].payload(RUNS[name].rounds[round_]["outer"])
    assert new.outer.keys() == expected.keys()
    for tensor, array in expected.items():
        close(new.outer[tensor], array)


@pytest.mark.parametrize("round_", range(len(RUNS["f32-default"].rounds)))
def test_theta_is_the_recorded_one(round_: int) -> None:
    new, _, _ = commit("f32-default", round_)
    expected = RUNS["f32-default"].payload(RUNS["f32-default"].rounds[round_]["theta"])
    for tensor, array in expected.items():
        close(new.theta[tensor], array)


@pytest.mark.parametrize("round_", range(len(RUNS["bf16-f4-zstd"].rounds)))
def test_update_is_the_recorded_one_byte_for_byte(round_: int) -> None:
    run = RUNS["bf16-f4-zstd"]
    record, specs = run.rounds[round_], run.plan[round_ % len(run.plan)]
    outer, (theta, _) = run.payload(record["outer"]), run.before(round_)
    master = {spec.name: outer[f"master.{spec.name}"] for spec in specs}
    update = blank(update_specs(specs, "F4"))
    encode_difference(BACKEND, master, theta, specs, "F4", update, take)
    for name, array in run.payload(record["update"]["payload"]).items():
        assert same_bytes(update[name], array), name


@pytest.mark.parametrize("round_", range(len(RUNS["bf16-f4-zstd"].rounds)))
def test_theta_is_rebuilt_from_the_recorded_update(round_: int) -> None:
    run = RUNS["bf16-f4-zstd"]
    record, specs = run.rounds[round_], run.plan[round_ % len(run.plan)]
    update, (theta, _) = run.payload(record["update"]["payload"]), run.before(round_)
    rebuilt = blank(theta_specs(specs))
    apply_update(BACKEND, specs, theta, update, "F4", rebuilt, take)
    for name, array in run.payload(record["theta"]).items():
        assert same_bytes(rebuilt[name], array), name
