"""What every history of a run must be, checked with arithmetic of its own (NumPy, float64)."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load
from tests.node.worlds import Archive, World, model_of, train_until, values

from gradientmail.exchange.records import Estimates, Participant, Ref, RoundRecord
from gradientmail.testing.world import SimulatedNode

type Arrays = dict[str, np.ndarray[Any, Any]]


def records(archive: Archive) -> list[dict[str, Any]]:
    """The round records, which must be there without a gap, each created once."""
    keys = archive.now("rounds/")
    assert keys == [f"rounds/{r:010d}.json" for r in range(len(keys))]
    for key in keys:
        assert len(archive.ever[key]) == 1, f"{key} was created twice"
    return [json.loads(archive.ever[key][0]) for key in keys]


def manifest(archive: Archive) -> dict[str, Any]:
    """The run."""
    found: dict[str, Any] = json.loads(archive.ever["manifest.json"][0])
    return found


def payload(archive: Archive, ref: Mapping[str, Any]) -> Arrays:
    """What a ref refers to, its hash and size checked."""
    data = archive.ever[ref["key"]][0]
    assert hashlib.sha256(data).hexdigest() == ref["sha256"], ref["key"]
    assert len(data) == ref["size"], ref["key"]
    return {name: array.astype(np.float64) for name, array in load(data).items()}


def contribution(archive: Archive, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """The snapshot record that a participant of a record is made from."""
    key = f"snapshots/{number:010d}/{row['learner']}.json"
    for data in archive.ever[key]:
        try:
            found = json.loads(data)
        except ValueError:
            continue  # somebody's garbage, replaced since
        counts = ("local_step", "steps", "tokens")
        if isinstance(found, dict) and all(found.get(name) == row[name] for name in counts):
            return found
    raise AssertionError(f"{key} never held {row}")


def rda(deltas: list[np.ndarray[Any, Any]], weights: list[float]) -> np.ndarray[Any, Any]:
    """Radial-directional averaging of one tensor, as SPEC section 4 writes it."""
    total = sum(weights)
    norms = [float(np.linalg.norm(delta)) for delta in deltas]
    units = [delta / max(norm, 1e-12) for delta, norm in zip(deltas, norms, strict=True)]
    mixed = sum(w * u for w, u in zip(weights, units, strict=True)) / total
    radius = sum(w * n for w, n in zip(weights, norms, strict=True)) / total
    return np.asarray(radius * mixed / max(float(np.linalg.norm(mixed)), 1e-12))


def mean(deltas: list[np.ndarray[Any, Any]], weights: list[float]) -> np.ndarray[Any, Any]:
    """The weighted mean."""
    pairs = zip(weights, deltas, strict=True)
    return np.asarray(sum(w * d for w, d in pairs) / sum(weights))


def merged(deltas: list[Arrays], weights: list[float], options: Mapping[str, Any]) -> Arrays:
    """The delta of a round."""
    merge = options["merge"]
    result: Arrays = {}
    for name in deltas[0]:
        direct = merge["kind"] == "weighted_mean" or merge["direct_pattern"] in name.lower()
        how = mean if direct else rda
        result[name] = how([delta[name] for delta in deltas], weights)
    return result


def check_history(archive: Archive) -> list[dict[str, Any]]:
    """Every commit of an F32 run is the outer step from the one before and the snapshots listed.

    Returns the records.
    """
    run = manifest(archive)
    options, fragments = run["algorithm"], len(run["plan"])
    theta = [payload(archive, ref) for ref in run["init"]]
    momentum: list[Arrays] = [{n: np.zeros(1) for n in part} for part in theta]
    found = records(archive)
    for number, record in enumerate(found):
        p = number % fragments
        place = (record["round"], record["fragment"], record["version"])
        assert place == (number, p, number // fragments + 1)
        snapshots = [contribution(archive, number, row) for row in record["participants"]]
        assert snapshots, f"round {number} has no contribution"
        for row, snapshot in zip(record["participants"], snapshots, strict=True):
            assert row["weight"] == row["tokens"] ** 2 / row["steps"]
            assert snapshot["base_version"] == record["version"] - 1
        deltas = [payload(archive, snapshot["payload"]) for snapshot in snapshots]
        delta = merged(deltas, [row["weight"] for row in record["participants"]], options)
        new_theta, outer = payload(archive, record["theta"]), payload(archive, record["outer"])
        final = all(snapshot["final"] for snapshot in snapshots)
        for name, old in theta[p].items():
            m, expected = momentum[p][name], old - delta[name]
            if not final:
                beta, lr = options["outer_momentum"], options["outer_lr"]
                m = beta * m + delta[name]
                expected = old - lr * (delta[name] + beta * m)
            np.testing.assert_allclose(new_theta[name], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                outer[f"momentum.{name}"], np.broadcast_to(m, old.shape), rtol=1e-5, atol=1e-6
            )
        theta[p] = new_theta
        momentum[p] = {name: outer[f"momentum.{name}"] for name in new_theta}
    return found


def newest(archive: Archive) -> Arrays:
    """The newest committed parameters, read from what still exists."""
    run = manifest(archive)
    theta = dict(enumerate(run["init"]))
    for record in records(archive):
        theta[record["fragment"]] = record["theta"]
    result: Arrays = {}
    for ref in theta.values():
        assert ref["key"] in archive.now(ref["key"]), f"{ref['key']} was swept"
        result.update(payload(archive, ref))
    return result


def leftovers(archive: Archive) -> list[str]:
    """Objects that the last commit made unnecessary and that are still there.

    A claim on the next round and its snapshots are none.
    """
    fragments = len(manifest(archive)["plan"])
    last = archive.rounds() - 1
    kept = []
    for key in archive.now():
        parts = key.split("/")
        match parts:
            case ["snapshots" | "claims", number, _] if number != "manifest":
                gone = int(number) <= last
            case ["blobs", "snapshots", number, *_]:
                gone = int(number) <= last
            case ["blobs", "rounds", number, _]:
                gone = int(number) <= last - 2 * fragments
            case _:
                gone = False
        if gone:
            kept.append(key)
    return kept


def committed_at(archive: Archive, last: int) -> Arrays:
    """The parameters that the commits up to round ``last`` make, read from everything ever put."""
    theta = dict(enumerate(manifest(archive)["init"]))
    for record in records(archive)[: last + 1]:
        theta[record["fragment"]] = record["theta"]
    result: Arrays = {}
    for ref in theta.values():
        result.update(payload(archive, ref))
    return result


def check_settled(archive: Archive, node: SimulatedNode) -> None:
    """A node that has closed holds exactly the commits that it has seen."""
    committed = committed_at(archive, node.learner.rounds_seen)
    for name, value in values(model_of(node)).items():
        assert value.double().numpy().tolist() == committed[name].tolist(), name


async def check_tidy(world: World) -> None:
    """One that closes 4·P rounds and more after everything finds all that crashes left behind."""
    goal = world.archive.rounds() + 4 * len(manifest(world.archive)["plan"]) + 1
    node = world.node("tidy", lease_every=1.0, lease_timeout=3.0)
    await node.join()
    await train_until(node, lambda: world.archive.rounds() >= goal)
    await node.close()
    assert leftovers(world.archive) == []


def record(
    number: int,
    *learners: str,
    rejected: tuple[tuple[str, str], ...] = (),
    cosine: float | None = None,
) -> RoundRecord:
    """The commit of a round of a run of one fragment, its payloads nowhere."""
    ref = Ref(f"blobs/rounds/{number:010d}/{'0' * 64}.safetensors", "0" * 64, 1)
    return RoundRecord(
        round=number,
        step=number + 1,
        fragment=0,
        version=number + 1,
        participants=tuple(Participant(name, 1, 1, 1, 1.0) for name in learners),
        rejected=rejected,
        cosine=cosine,
        theta=ref,
        outer=ref,
        update=None,
        quorum_seconds=0.0,
        grace_seconds=0.0,
        estimates=Estimates(None, None, None),
    )
