"""``gradientmail verify URL``: whether a mailbox holds what the protocol promises, and what to do.

It reads only, and may run beside a live run. What a live run may show for a moment (an object
listed and then swept, a listing that spans a commit) is looked at a second time before it counts.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import import_module

from gradientmail.backend.base import Backend
from gradientmail.commands.base import FAULTY, FINE, Subcommands, other_runs
from gradientmail.errors import MissingExtra
from gradientmail.exchange import layout
from gradientmail.mailbox.base import Mailbox
from gradientmail.mailbox.urls import open_mailbox
from gradientmail.verification import Report, Violation, verify

BACKENDS = {
    "numpy": ("gradientmail.backend.numpy", "NumpyBackend"),
    "torch": ("gradientmail.backend.torch", "TorchBackend"),
    "mlx": ("gradientmail.backend.mlx", "MlxBackend"),
}
"""In the order in which ``auto`` tries them."""

_FOREIGN = (
    "a node that does not follow the protocol wrote it, or somebody changed it; go on from a copy "
    "of the mailbox made before, or start a new run from the newest parameters that are right"
)
REMEDIES = {
    "manifest": "if this is not where the run lives, pass its URL; a manifest never changes, so "
    "that one from a copy of the mailbox can be put back",
    "records": "put the object back from a copy of the mailbox, or go back before it "
    "(docs/damaged-mailbox.md); one beyond the last round never was a record: delete it",
    "versions": _FOREIGN,
    "participants": _FOREIGN,
    "payloads": "put the object back from a copy of the mailbox; a node that still trains may hold "
    "it and replaces it with the fragment's next commit; else see docs/damaged-mailbox.md. If you "
    "have gone back as that page says: nothing, nobody needs it and the next commit ends this",
    "snapshots": "nothing: closers reject this contribution; delete its record if it stays",
    "bases": _FOREIGN,
    "commits": _FOREIGN,
    "theta": _FOREIGN,
    "leftovers": "look for TaskFailed events of the task 'sweep' at the nodes: can they delete?",
    "leases": "look for TaskFailed events of the task 'lease' at the nodes: can they delete?",
}
"""What to do about a violation, by invariant."""

PASSING = {"manifest", "records", "payloads", "snapshots", "leftovers", "leases"}
"""Invariants that a mailbox may seem to break while it is read; one look more tells."""
PAUSE_SECONDS = 2.0


def add_to(subcommands: Subcommands) -> None:
    """Describe the command."""
    parser = subcommands.add_parser(
        "verify",
        help="check a run's mailbox against every invariant that can be read from it",
        description="Reads a mailbox, of a live run too, and checks every invariant that can be "
        "read from it; commits are computed again where their deltas are still there. Writes "
        "nothing. Exit status: 0 if all holds, 1 if not, 2 for a wrong command line.",
    )
    parser.add_argument("url", help="s3://bucket/prefix, file:///folder, or the path of a folder")
    parser.add_argument(
        "--backend",
        choices=("auto", *BACKENDS, "none"),
        default="auto",
        help="what computes (auto: the first that is installed; none: no numbers are looked at)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the mailbox and print what was found; the exit status."""
    mailbox = open_mailbox(arguments.url, create=False)  # first: a wrong path is told at once
    name, backend = choose(arguments.backend)
    report = asyncio.run(check(mailbox, backend))
    show = _as_json if arguments.json else as_text
    print(show(arguments.url, name, report))
    return FINE if report.holds else FAULTY


def choose(wanted: str) -> tuple[str, Backend | None]:
    """A backend by its name, or the first that is installed; what it is called, too."""
    if wanted == "none":
        return wanted, None
    for name, (module, cls) in BACKENDS.items():
        if wanted not in ("auto", name):
            continue
        try:
            return name, getattr(import_module(module), cls)()
        except ImportError as error:
            if wanted == name:
                raise (
                    error if isinstance(error, MissingExtra) else MissingExtra(name, name)
                ) from None
    return "none", None


async def check(mailbox: Mailbox, backend: Backend | None, *, pause: float | None = None) -> Report:
    """Verify; what may have passed by the second look is left out. ``pause`` seconds between."""
    report = await _look(mailbox, backend)
    if report.holds:
        return report
    lasting = [one for one in report.violations if one.invariant not in PASSING]
    await asyncio.sleep(PAUSE_SECONDS if pause is None else pause)
    again = await _look(mailbox, backend)
    merged = dict.fromkeys((*lasting, *again.violations))
    return replace(again, violations=tuple(merged))


async def _look(mailbox: Mailbox, backend: Backend | None) -> Report:
    everything = was_never_swept(await mailbox.list(""))
    return await verify(mailbox, backend=backend, swept=not everything)


def was_never_swept(keys: Sequence[str]) -> bool:
    """Whether this is a whole history, as a recording is: every round has all that it ever had.

    Told by the rounds but the newest, of which a live run has swept the snapshots.
    """
    rounds = {r for key in keys if (r := layout.parse_round_key(key)) is not None}
    snapshots = {found[0] for key in keys if (found := layout.parse_snapshot_key(key))}
    blobs = [blob for key in keys if (blob := layout.parse_blob_key(key)) is not None]
    commits = {blob.index for blob in blobs if blob.kind == "round"}
    deltas = {blob.index for blob in blobs if blob.kind == "snapshot"}
    older = rounds - {max(rounds, default=0)}
    return len(older) >= 3 and older <= snapshots & commits & deltas


def _as_json(url: str, backend: str, report: Report) -> str:
    rows = [{**asdict(one), "what_to_do": _remedy(one)} for one in report.violations]
    found = {**asdict(report), "url": url, "backend": backend, "holds": report.holds}
    return json.dumps({**found, "violations": rows}, sort_keys=True)


def as_text(url: str, backend: str, report: Report) -> str:
    """What was found, for people."""
    near = other_runs(url)
    if report.violations and not report.rounds and report.objects == len(report.strays):
        return (
            f"there is no run in {url}; {f'{near}; ' if near else ''}pass the address that its "
            "sessions have, or start one: the first session creates it"
        )
    lines = [f"{url}: {report.rounds} rounds in {report.objects} objects"]
    lines += [near] if near else []
    if report.payloads:
        lines += [f"payloads read and hashed: {report.payloads}", _computed(backend, report)]
    if report.strays:
        shown = ", ".join(map(repr, report.strays[:5])) + (" …" if report.strays[5:] else "")
        lines.append(f"objects that every node ignores: {len(report.strays)}: {shown}")
    for one in report.violations:
        lines += [f"WRONG {one}", f"      what to do: {_remedy(one)}"]
    count = len(report.violations)
    checked = " that can be checked without numbers" if backend == "none" else ""
    lines.append(f"violations: {count}" if count else f"every invariant{checked} holds")
    return "\n".join(lines)


def _computed(backend: str, report: Report) -> str:
    """Which commits were computed again; a run sweeps what older ones were made of."""
    if backend == "none":
        return "no number was looked at; for that, pip install 'gradientmail[numpy]'"
    again, traced = report.recomputed, report.consistent
    parts = [
        f"{count} {what}"
        for count, what in (
            (again, "computed again from their deltas"),
            (traced, "compared with the version before only, because their deltas are swept"),
            (report.rounds - again - traced, "older: swept but for their records"),
        )
        if count
    ]
    return f"commits, with {backend}: {'; '.join(parts) or 'none yet'}"


def _remedy(one: Violation) -> str:
    return REMEDIES[one.invariant]
