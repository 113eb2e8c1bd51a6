"""Settings of all tests: how many random examples, and that a failure can be repeated."""

import os
import signal
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# A shell without job control has what it starts in the background ignore Ctrl-C, and its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Speed varies with what else the machine is doing, so no example has a deadline. On failure the
# example itself and the blob that repeats it are printed.
settings.register_profile(
    "here",
    max_examples=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# In CI a change must not fail for an example that has nothing to do with it.
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Longer chaos runs (``tests/processes/test_chaos.py``) and more simulated schedules."""
    parser.addoption("--schedules", type=int, default=12, help="random schedules; 10000 for all")
    parser.addoption("--chaos-seconds", type=float, default=15.0, help="how long chaos lasts")
    parser.addoption("--chaos-seed", type=int, default=1, help="the seed of what happens in it")
    parser.addoption("--fault-seconds", type=float, default=8.0, help="of a bucket that breaks")
    parser.addoption("--outage-seconds", type=float, default=2.0, help="of a bucket that is away")


@pytest.fixture
def chaos_seconds(request: pytest.FixtureRequest) -> float:
    """How long a chaos run lasts."""
    return float(request.config.getoption("--chaos-seconds"))


@pytest.fixture
def chaos_seed(request: pytest.FixtureRequest) -> int:
    """What a chaos run draws from."""
    return int(request.config.getoption("--chaos-seed"))


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """``count("single faults", 6)`` adds to a sum that is printed when all tests have run."""
    return lambda what, number: record_property(f"counted {what}", number)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the tests counted: how much of all that could be tried this time was."""
    sums: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name.startswith("counted ") and isinstance(value, int):
                sums[name.removeprefix("counted ")] += value
    if sums:
        text = ", ".join(f"{number} {what}" for what, number in sorted(sums.items()))
        terminalreporter.write_line(f"held: {text}")
