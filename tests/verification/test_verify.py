"""A mailbox that is as it should be, and every way in which one may not be."""

import asyncio
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.exchange.wire import RUNS, recorded
from tests.node.worlds import World

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.backend.base import Backend
from gradientmail.backend.torch import TorchBackend
from gradientmail.exchange.compression import compress, decompress
from gradientmail.exchange.records import Manifest
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.run import read_run
from gradientmail.testing.virtual_time import run_virtual
from gradientmail.testing.world import train_together
from gradientmail.verification import INVARIANTS, Report, verify
from gradientmail.verification.reading import memory

type Objects = dict[str, bytes]


def checked(objects: Objects, *, swept: bool = True, backend: Backend | None = None) -> Report:
    """A verification of a mapping."""
    return asyncio.run(verify(objects, backend=backend or TorchBackend(), swept=swept))


def record_of(objects: Objects, number: int) -> dict[str, Any]:
    """The commit of a round."""
    found: dict[str, Any] = json.loads(objects[f"rounds/{number:010d}.json"])
    return found


def rewrite(objects: Objects, number: int, **changes: object) -> None:
    """Another record in the place of one."""
    record = record_of(objects, number) | changes
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    objects[f"rounds/{number:010d}.json"] = text.encode()


def replace_payload(objects: Objects, number: int, name: str, data: bytes) -> None:
    """Another payload, which the record refers to as it should."""
    old = record_of(objects, number)[name]
    sha256 = hashlib.sha256(data).hexdigest()
    key = old["key"].replace(old["sha256"], sha256)
    objects[key] = data
    rewrite(objects, number, **{name: {"key": key, "sha256": sha256, "size": len(data)}})


def nudged(data: bytes) -> bytes:
    """The payload with its last value doubled: one bit of an exponent."""
    changed = bytearray(data)
    changed[-2] ^= 0x80
    return bytes(changed)


@pytest.fixture(scope="module")
def live() -> Objects:
    """What is left of a run of three nodes that have left."""

    async def main() -> Objects:
        world = World(DiLoCo(sync_every=4, fragments=2, quorum_size=2), seed=1)
        await train_together([world.node(name) for name in "abc"], 40)
        return dict(world.archive._objects)

    return run_virtual(main)


@pytest.mark.parametrize("run", RUNS)
def test_recorded_runs_hold_to_the_last_delta(run: str) -> None:
    objects = recorded(run, "**/*.*")
    report = checked(objects, swept=False)
    assert report.violations == ()
    assert report.rounds == report.recomputed > 4
    assert report.strays == ()
    assert report.payloads > 4 * report.rounds


def test_a_run_holds_after_its_sweeps(live: Objects) -> None:
    report = checked(live)
    assert report.holds, report.violations
    assert report.objects == len(live)
    assert report.consistent == 2, "each fragment has two versions left"
    assert report.strays == ()


def test_without_a_backend_structure_and_hashes_are_checked(live: Objects) -> None:
    report = asyncio.run(verify(live))
    assert report.holds
    assert (report.recomputed, report.consistent) == (0, 0)
    assert report.payloads == 2 + 2 * 4


def test_over_a_mailbox(live: Objects) -> None:
    async def main() -> Report:
        mailbox = MemoryMailbox()
        for key, data in live.items():
            await mailbox.put_if_absent(key, data)
        return await verify(mailbox, backend=TorchBackend())

    assert asyncio.run(main()) == checked(live)


def last_round(objects: Objects) -> int:
    """The newest commit."""
    return int(max(key for key in objects if key.startswith("rounds/"))[7:17])


def lose_a_record(objects: Objects) -> None:
    del objects["rounds/0000000003.json"]


def misplace_a_record(objects: Objects) -> None:
    objects["rounds/0000000003.json"] = objects["rounds/0000000005.json"]


def break_a_record(objects: Objects) -> None:
    objects["rounds/0000000003.json"] = b"{}"


def repeat_a_version(objects: Objects) -> None:
    rewrite(objects, 3, version=1)


def swap_fragments(objects: Objects) -> None:
    rewrite(objects, 3, fragment=0)


def shift_the_step(objects: Objects) -> None:
    rewrite(objects, 3, step=9)


def forget_everyone(objects: Objects) -> None:
    rewrite(objects, 3, participants=[], cosine=None)


def raise_a_weight(objects: Objects) -> None:
    rows = record_of(objects, 3)["participants"]
    rewrite(objects, 3, participants=[rows[0] | {"weight": 2 * rows[0]["weight"]}, *rows[1:]])


def reject_a_participant(objects: Objects) -> None:
    name = record_of(objects, 3)["participants"][0]["learner"]
    rewrite(objects, 3, rejected=[[name, "stale"]])


def claim_a_cosine(objects: Objects) -> None:
    rewrite(objects, 3, cosine=1.5)


def lose_theta(objects: Objects) -> None:
    del objects[record_of(objects, last_round(objects))["theta"]["key"]]


def lose_outer(objects: Objects) -> None:
    del objects[record_of(objects, last_round(objects) - 3)["outer"]["key"]]


def damage_theta(objects: Objects) -> None:
    key = record_of(objects, last_round(objects))["theta"]["key"]
    objects[key] = nudged(objects[key])


def cut_theta(objects: Objects) -> None:
    key = record_of(objects, last_round(objects))["theta"]["key"]
    objects[key] = objects[key][:-4]


def move_theta(objects: Objects) -> None:
    last = last_round(objects)
    data = objects[record_of(objects, last)["theta"]["key"]]
    replace_payload(objects, last, "theta", nudged(data))


def move_momentum(objects: Objects) -> None:
    last = last_round(objects)
    data = objects[record_of(objects, last)["outer"]["key"]]
    replace_payload(objects, last, "outer", nudged(data))


def lose_the_manifest(objects: Objects) -> None:
    del objects["manifest.json"]


def break_the_manifest(objects: Objects) -> None:
    objects["manifest.json"] = b"[" * 10_000


def lose_initial_parameters(objects: Objects) -> None:
    del objects[next(key for key in objects if key.startswith("blobs/init/"))]


def sweep_nothing(objects: Objects) -> None:
    for number in range(17):
        objects[f"snapshots/{number:010d}/a.json"] = b""


def leave_claims(objects: Objects) -> None:
    for number in range(17):
        objects[f"claims/{number:010d}/001.json"] = b""


def pile_up_beats(objects: Objects, count: int = 9) -> None:
    for number in range(count):
        objects[f"leases/a/{number:010d}.json"] = b"{}"


DAMAGES: list[tuple[Callable[[Objects], None], str]] = [
    (lose_a_record, "records"),
    (misplace_a_record, "records"),
    (break_a_record, "records"),
    (repeat_a_version, "versions"),
    (swap_fragments, "versions"),
    (shift_the_step, "versions"),
    (forget_everyone, "participants"),
    (raise_a_weight, "participants"),
    (reject_a_participant, "participants"),
    (claim_a_cosine, "participants"),
    (lose_theta, "payloads"),
    (lose_outer, "payloads"),
    (damage_theta, "payloads"),
    (cut_theta, "payloads"),
    (move_theta, "commits"),
    (move_momentum, "commits"),
    (lose_the_manifest, "manifest"),
    (break_the_manifest, "manifest"),
    (lose_initial_parameters, "manifest"),
    (sweep_nothing, "leftovers"),
    (leave_claims, "leftovers"),
    (pile_up_beats, "leases"),
]


@pytest.mark.parametrize(("damage", "invariant"), DAMAGES, ids=lambda x: getattr(x, "__name__", x))
def test_each_damage_is_told_by_its_invariant(
    live: Objects, damage: Callable[[Objects], None], invariant: str
) -> None:
    objects = dict(live)
    damage(objects)
    told = {one.invariant for one in checked(objects).violations}
    assert told == {invariant}


def test_processes_killed_one_after_the_other_may_leave_a_beat_each(live: Objects) -> None:
    """Before they could delete the one before: a learner that is restarted often is no fault."""
    objects = dict(live)
    pile_up_beats(objects, 8)
    assert checked(objects).holds


def lose_a_delta(objects: Objects) -> None:
    del objects[next(key for key in objects if key.startswith("blobs/snapshots/"))]


def lose_a_snapshot(objects: Objects) -> None:
    del objects[next(key for key in objects if key.startswith("snapshots/"))]


def rebase_a_snapshot(objects: Objects) -> None:
    key = next(key for key in objects if key.startswith("snapshots/0000000003/"))
    objects[key] = json.dumps(json.loads(objects[key]) | {"base_version": 7}).encode()


def number_of_two(objects: Objects) -> int:
    """A round with two contributions."""
    return next(
        number
        for number in range(last_round(objects))
        if len(record_of(objects, number)["participants"]) == 2
    )


def change_a_cosine(objects: Objects) -> None:
    number = number_of_two(objects)
    cosine = record_of(objects, number)["cosine"]
    rewrite(objects, number, cosine=cosine - 0.01 if cosine > 0 else cosine + 0.01)


def leave_a_contribution_out(objects: Objects) -> None:
    number = number_of_two(objects)
    rows = record_of(objects, number)["participants"]
    rewrite(objects, number, participants=rows[1:], cosine=None)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (lose_a_delta, "snapshots"),
        (lose_a_snapshot, "snapshots"),
        (rebase_a_snapshot, "bases"),
        (leave_a_contribution_out, "commits"),
        (change_a_cosine, "participants"),
    ],
)
def test_what_the_deltas_show(run: str, damage: Callable[[Objects], None], invariant: str) -> None:
    objects = recorded(run, "**/*.*")
    damage(objects)
    assert invariant in {one.invariant for one in checked(objects, swept=False).violations}


def change_an_update(objects: Objects) -> None:
    update = record_of(objects, last_round(objects))["update"]
    rewrite(objects, last_round(objects), update=update | {"theta_digest": "0" * 64})


def drop_an_update(objects: Objects) -> None:
    rewrite(objects, last_round(objects), update=None)


def forget_an_update(objects: Objects) -> None:
    """Theta stays what it was, and an update of zeros says so; the master has moved on."""
    last = last_round(objects)
    run = read_run(Manifest.from_bytes(objects["manifest.json"]))
    before = record_of(objects, last - len(run.fragments))["theta"]
    fragment = run.fragments[record_of(objects, last)["fragment"]]
    update = fragment.update
    assert update is not None
    buffer = memoryview(bytearray(update.nbytes))
    buffer[: len(update.header)] = update.header
    for name, slot in update.slots.items():
        if name.endswith(".scale"):
            buffer[slot.start : slot.stop] = b"\x7f" * slot.nbytes
    theta, zeros = objects[before["key"]], bytes(compress(update, buffer, memory))
    replace_payload(objects, last, "theta", theta)
    sha256 = hashlib.sha256(zeros).hexdigest()
    ref = record_of(objects, last)["update"]["payload"]
    key = ref["key"].replace(ref["sha256"], sha256)
    objects[key] = zeros
    digest = hashlib.sha256(decompress(fragment.theta, theta, memory)).hexdigest()
    payload = {"key": key, "sha256": sha256, "size": len(zeros)}
    rewrite(objects, last, update={"payload": payload, "theta_digest": digest})


@pytest.mark.parametrize("damage", [change_an_update, drop_an_update, forget_an_update])
def test_an_update_leads_to_theta(damage: Callable[[Objects], None]) -> None:
    objects = recorded("bf16-f4-zstd", "**/*.*")
    damage(objects)
    assert {one.invariant for one in checked(objects, swept=False).violations} == {"theta"}


def test_the_digest_of_the_oldest_theta_that_is_kept_is_compared_too() -> None:
    """What it was made of is swept."""
    whole = recorded("bf16-f4-zstd", "**/*.*")
    gone = ("snapshots/", "claims/", "blobs/snapshots/")
    gone += tuple(f"blobs/rounds/{number:010d}/" for number in (0, 1))
    objects = {key: data for key, data in whole.items() if not key.startswith(gone)}
    assert checked(objects).violations == ()
    update = record_of(objects, 2)["update"]
    rewrite(objects, 2, update=update | {"theta_digest": "0" * 64})
    assert {one.invariant for one in checked(objects).violations} == {"theta"}


def test_snapshots_of_the_open_round_need_their_payloads(live: Objects) -> None:
    objects = dict(recorded("f32-default", "**/*.*"))
    last = last_round(objects)
    for key in [key for key in objects if f"/{last:010d}" in key and "snapshots" not in key]:
        del objects[key]  # the last round is open again
    assert checked(objects, swept=False).violations == ()
    key = next(key for key in objects if key.startswith(f"blobs/snapshots/{last:010d}/"))
    del objects[key]
    (violation,) = checked(objects, swept=False).violations
    assert (violation.invariant, violation.key) == ("snapshots", key)
    assert violation.invariant in INVARIANTS


def test_strays_are_named_and_no_violation(live: Objects) -> None:
    strays = {
        "rounds/notes.txt": b"x",
        ".DS_Store": b"x",
        "snapshots/0000000001/A.json": b"x",
        "leases/a b/0000000001.json": b"x",
        f"snapshots/{last_round(live) + 1:010d}/bad.json": b"[" * 10_000,
    }
    report = checked(live | strays | {"units/one": b"a", "barriers/start/a": b""})
    assert report.holds
    assert set(report.strays) == set(strays)


class Moving(MemoryMailbox):
    """A run that goes on while it is read: what is older than the newest commits is swept."""

    def __init__(self, objects: Objects) -> None:
        super().__init__()
        self.later = dict(objects)

    async def get(self, key: str, /) -> bytes | None:
        found = await super().get(key)
        if key.startswith("blobs/rounds/"):
            for other, data in self.later.items():
                await self.put_if_absent(other, data)
            await self.delete(
                k
                for k in list(self._objects)
                if k.startswith("blobs/rounds/") and k not in self.later
            )
            found = await super().get(key)
        return found


def test_a_run_that_goes_on_meanwhile_is_no_violation() -> None:
    async def main() -> tuple[Objects, Objects]:
        world = World(DiLoCo(sync_every=4, fragments=2), seed=2)
        one = world.node("a")
        await one.join()
        await one.train(20)
        before = dict(world.archive._objects)
        await one.train(40)
        await one.close()
        return before, dict(world.archive._objects)

    before, after = run_virtual(main)
    assert last_round(after) > last_round(before) + 8

    async def moving() -> Report:
        mailbox = Moving(after)
        for key, data in before.items():
            await mailbox.put_if_absent(key, data)
        return await verify(mailbox, backend=TorchBackend())

    report = asyncio.run(moving())
    assert report.violations == ()
