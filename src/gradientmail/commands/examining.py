"""All checks of a store in their order, within a time limit, and what they found together."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from gradientmail.commands import checks
from gradientmail.commands.base import UNREACHED
from gradientmail.commands.checks import Examination, Fault, Finding
from gradientmail.commands.measuring import (
    SKEW_SECONDS,
    Latency,
    clock_skew,
    latencies,
    own_listing,
)
from gradientmail.errors import GradientMailError
from gradientmail.exchange import layout

REACH_SECONDS = 20.0
"""A store that has not answered for so long cannot be reached."""
CLEAN_SECONDS = 30.0

ESSENTIAL = (
    "reachable",
    "read and write",
    "create once",
    "read after write",
    "list after write",
    "order",
)
"""What must have been tried and found well."""

type Check = Callable[[Examination], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is tried."""

    large_bytes: int = 64 * 2**20
    keys: int = 1100
    samples: int = 20
    seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Report:
    """What came out."""

    findings: tuple[Finding, ...]
    latency: tuple[Latency, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether a run can live there, as far as that could be told."""
        states = {finding.check: finding.state for finding in self.findings}
        return "fault" not in states.values() and all(states.get(x) == "ok" for x in ESSENTIAL)

    @property
    def verdict(self) -> str:
        """In a sentence."""
        states = [finding.state for finding in self.findings]
        if "fault" in states:
            return "This store cannot be used from here."
        if not self.usable:
            return "It could not be told in time whether this store can be used."
        if "skipped" in states:
            return "No fault found, but not everything was tried. See above."
        if "warning" in states:
            return "This store can be used. See the warnings above."
        return "This store can be used."


class Warn(Exception):
    """The store can be used, and something is to be said."""

    def __init__(self, detail: str, advice: str) -> None:
        """Say what was seen, and what to do."""
        super().__init__(detail)
        self.advice = advice


async def examine(store: Examination, extent: Extent) -> Report:
    """Every check in turn, within the time limit. The first three must pass for the rest."""
    plan: tuple[tuple[str, Check], ...] = (
        ("reachable", checks.reachable),
        ("read and write", checks.read_and_write),
        ("create once", checks.create_once),
        ("read after write", checks.read_after_write),
        ("list after write", checks.list_after_write),
        ("order", checks.ordered),
        ("many keys", checks.many_keys(extent.keys)),
        ("large object", checks.large_object(extent.large_bytes)),
        ("clock", _clock),
        ("own listing", _own_listing),
        ("run", _run),
    )
    clock = asyncio.get_running_loop().time
    ends = clock() + extent.seconds
    findings: list[Finding] = []
    for name, check in plan:
        limit = ends - clock()
        if name == "reachable":
            limit = min(limit, REACH_SECONDS)
        finding = await _tried(store, name, check, limit)
        findings += [finding] if finding.detail else []
        if finding.state == "fault" and name in ("reachable", "read and write"):
            return Report(tuple(findings))
    measured: tuple[Latency, ...] = ()
    with suppress(TimeoutError, GradientMailError, OSError):
        async with asyncio.timeout(max(ends - clock(), 0.0)):
            measured = await latencies(store, extent.samples)
    return Report((*findings, *_repeated(store)), measured)


async def _tried(store: Examination, name: str, check: Check, limit: float) -> Finding:
    """One check, as a finding whatever it does."""
    if limit <= 0:
        return Finding(name, "skipped", "no time was left", "allow more with --seconds")
    failures = len(store.failures)
    try:
        async with asyncio.timeout(limit):
            return Finding(name, "ok", await check(store))
    except Fault as fault:
        return Finding(name, "fault", str(fault), fault.advice)
    except TimeoutError:
        if len(store.failures) > failures:
            return Finding(name, "fault", f"no usable answer: {store.failures[-1]}", UNREACHED)
        if name == "reachable":
            return Finding(name, "fault", f"no answer within {limit:.0f} s", UNREACHED)
        return Finding(name, "skipped", "not done in time", "allow more with --seconds")
    except Warn as warning:
        return Finding(name, "warning", str(warning), warning.advice)
    except (GradientMailError, OSError, ValueError) as error:
        return Finding(name, "fault", str(error) or repr(error))


async def _clock(store: Examination) -> str:
    skew = await clock_skew(store)
    if skew is None:
        return ""
    if abs(skew) <= SKEW_SECONDS:
        return f"agrees to {max(abs(skew), 1.0):.0f} s"
    raise Warn(
        f"the store's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this one's",
        "nodes compare no clocks, but S3 refuses requests that are 15 minutes off: set the time of "
        "this machine (NTP)",
    )


async def _own_listing(store: Examination) -> str:
    return await own_listing(store) or ""


async def _run(store: Examination) -> str:
    if await store.persist(lambda: store.boxes[0].get(layout.MANIFEST)) is not None:
        return "one is here already: sessions with this address join it"
    keys = await store.persist(lambda: store.boxes[0].list(layout.ROUNDS))
    if any(layout.parse_round_key(key) is not None for key in keys):
        raise Warn(
            f"rounds of one are here, and its {layout.MANIFEST} is gone",
            "put it back from a copy, or pass another address: sessions refuse this one",
        )
    return "none is here yet: the first session makes it"


def _repeated(store: Examination) -> tuple[Finding, ...]:
    if not store.failures:
        return ()
    count = len(store.failures)
    detail = f"{count} calls failed and were repeated; the last: {store.failures[-1]}"
    return (Finding("failures", "warning", detail, "a run repeats such calls too, and waits"),)


async def cleaned(store: Examination) -> tuple[Finding, ...]:
    """Remove what was written; a finding if something may be left."""
    try:
        async with asyncio.timeout(CLEAN_SECONDS):
            left = await store.clean()
    except (GradientMailError, OSError, TimeoutError) as error:
        if not store.written:
            return ()
        detail = f"objects below {store.folder} may be left, which could not be removed ({error})"
    else:
        if not left:
            return ()
        objects = "1 object" if len(left) == 1 else f"{len(left)} objects"
        detail = f"{objects} below {store.folder} could not be removed"
    return (Finding("tidy", "warning", detail, "remove that folder by hand"),)
