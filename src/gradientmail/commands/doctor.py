"""``gradientmail doctor URL``: whether a run can live in a store, how fast it is, what it costs.

It works in a folder of its own beside the run's objects, which it never touches, and removes it.
"""

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from gradientmail.commands import bill
from gradientmail.commands.base import FAULTY, FINE, Subcommands, other_runs, table
from gradientmail.commands.checks import Examination, Finding
from gradientmail.commands.examining import CLEAN_SECONDS, Extent, Report, cleaned, examine
from gradientmail.loop_thread import LoopThread
from gradientmail.mailbox.urls import open_mailbox, path_of


def add_to(subcommands: Subcommands) -> None:
    """Describe the command."""
    parser = subcommands.add_parser(
        "doctor",
        help="check a store before a run is put into it",
        description="Check that a run can live in a store, measure it, and estimate its bill. "
        "Exit status: 0 when it can be used, 1 when not, 2 for a wrong command line.",
    )
    parser.add_argument("url", help="s3://bucket/prefix, file:///folder, or the path of a folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--large", type=_count, default=64, metavar="MIB", help="payload to try (default: 64)"
    )
    parser.add_argument("--keys", type=_count, default=1100, help="keys to list (default: 1100)")
    parser.add_argument("--samples", type=_count, default=20, help="of each latency (default: 20)")
    parser.add_argument("--seconds", type=_seconds, default=120.0, help="time limit (default: 120)")
    run_options = parser.add_argument_group("the run whose bill is estimated")
    usual = bill.Plan()
    for name, kind, what in (
        ("nodes", _count, "machines that train"),
        ("params", _amount, "parameters of the model, such as 350M"),
        ("sync_every", _count, "as in DiLoCo"),
        ("fragments", _count, "as in DiLoCo"),
        ("step_seconds", _seconds, "how long an optimizer step takes"),
        ("poll", _seconds, "poll_interval of the sessions, in seconds"),
    ):
        default = getattr(usual, "parameters" if name == "params" else name)
        flag, text = f"--{name.replace('_', '-')}", f"{what} (default: {default:g})"
        run_options.add_argument(flag, type=kind, default=default, help=text)
    for name, choices, text in (
        ("--dtype", bill.PARAMETERS, "of the parameters (default: F32)"),
        ("--precision", bill.BITS, "of deltas, as delta_dtype (default: that of the parameters)"),
        (
            "--commit-precision",
            bill.BITS,
            "of commits, as commit_dtype (default: that of the parameters)",
        ),
    ):
        run_options.add_argument(name, choices=choices, default=None, help=text)
    prices = parser.add_argument_group("prices in dollars (default: AWS S3 Standard, us-east-1)")
    for name, what in (
        ("writes", "a million PUT and LIST"),
        ("reads", "a million GET"),
        ("storage", "a GB and month"),
        ("egress", "a GB that leaves the store"),
    ):
        default = getattr(bill.Prices(), name)
        text = f"{what} (default: {default:g})"
        prices.add_argument(f"--price-{name}", type=float, default=default, help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the store and print the report; the exit status."""
    plan = bill.Plan(
        nodes=arguments.nodes,
        parameters=arguments.params,
        sync_every=arguments.sync_every,
        fragments=arguments.fragments,
        step_seconds=arguments.step_seconds,
        poll=arguments.poll,
        dtype=arguments.dtype or "F32",
        delta_dtype=arguments.precision,
        commit_dtype=arguments.commit_precision,
    )
    prices = bill.Prices(
        arguments.price_writes,
        arguments.price_reads,
        arguments.price_storage,
        arguments.price_egress,
    )
    extent = Extent(arguments.large * 2**20, arguments.keys, arguments.samples, arguments.seconds)
    report = examined(arguments.url, extent, quiet=arguments.json)
    costs = bill.monthly_dollars(plan, prices)
    if arguments.json:
        shown = {
            "url": arguments.url,
            "usable": report.usable,
            "verdict": report.verdict,
            "findings": [asdict(finding) for finding in report.findings],
            "latency_ms": {one.operation: asdict(one) for one in report.latency},
            "plan": asdict(plan),
            "monthly_dollars": costs,
        }
        print(json.dumps(shown))
    else:
        _print(report, plan, costs)
    return FINE if report.usable else FAULTY


def examined(url: str, extent: Extent, *, quiet: bool = True) -> Report:
    """Examine the store at ``url``; whatever happens, nothing stays there.

    Unless ``quiet`` it says so at once: a store that does not answer takes all the time there is.
    """
    new = _new_folders(url)
    thread = LoopThread("gradientmail-doctor")
    try:
        boxes = (open_mailbox(url), open_mailbox(url))
        store = Examination(boxes)
        if not quiet:
            said = f"examining the store, for {extent.seconds:g} s at most"
            print(said, file=sys.stderr, flush=True)
        try:
            report = thread.call(examine(store, extent), extent.seconds + CLEAN_SECONDS)
        finally:
            left = thread.call(cleaned(store))
        if near := other_runs(url):
            advice = "pass that address if you mean that run"
            left = (*left, Finding("other runs", "warning", near, advice))
        return replace(report, findings=(*report.findings, *left))
    finally:
        thread.stop(1.0)
        for folder in new:
            with suppress(OSError):  # somebody has put something there meanwhile
                folder.rmdir()


def _new_folders(url: str) -> list[Path]:
    """The folders that opening the mailbox would make, innermost first: they go again."""
    try:
        name = path_of(url)
    except ValueError:
        return []
    if name is None:
        return []
    path = Path(name).absolute()
    inside = [path / ".tmp", path, *path.parents]
    return [folder for folder in inside if not folder.exists()]


def _print(report: Report, plan: bill.Plan, costs: dict[str, float]) -> None:
    print(table([(one.check, one.state, one.detail) for one in report.findings]))
    for advice in dict.fromkeys(one.advice for one in report.findings if one.advice):
        concerned = ", ".join(one.check for one in report.findings if one.advice == advice)
        print(f"\n{concerned}: {advice}.")
    if report.latency:
        rows = [(one.operation, f"{one.median:.1f}", f"{one.p95:.1f}") for one in report.latency]
        print("\n" + table([("operation", "median ms", "p95 ms"), *rows]))
    if report.usable:
        _print_bill(plan, costs)
    print(f"\n{report.verdict}")


def _print_bill(plan: bill.Plan, costs: dict[str, float]) -> None:
    one = bill.requests_of(plan)
    print(f"\n{plan.nodes} nodes, {plan.parameters:,} parameters, a round every ", end="")
    print(
        f"{plan.round_seconds:g} s. A round is {one.puts:.0f} PUT, {one.lists:.1f} LIST and ",
        end="",
    )
    print(f"{one.gets:.0f} GET, {one.received_bytes / 1e6:,.0f} MB read; ", end="")
    print(f"{one.stored_bytes / 1e9:.2f} GB are kept.")
    parts = ", ".join(f"{name} {dollars:.2f}" for name, dollars in costs.items())
    print(f"Estimate for a month of training: ${sum(costs.values()):,.2f} ({parts}),")
    print("if the store charges by request and gigabyte, at the prices that --help shows or yours.")


def _count(text: str) -> int:
    """A whole number of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _seconds(text: str) -> float:
    """A duration: a number over 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds over 0")
    return value


def _amount(text: str) -> int:
    """A number with k, M, B or nothing behind it: 350M."""
    scale = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}.get(text[-1:].lower(), 1)
    number = text[:-1] if scale > 1 else text
    try:
        value = round(float(number) * scale)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text} is not a number like 350M") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value
