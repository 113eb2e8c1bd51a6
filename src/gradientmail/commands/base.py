"""What the subcommands share: how each looks to argparse, exit statuses, tables."""

import argparse
from collections.abc import Sequence
from typing import Protocol

type Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001 - no other

FINE = 0
"""Exit status: all is well."""
FAULTY = 1
"""Exit status: what was looked at is not."""
MISUSED = 2
"""Exit status: the command line cannot be understood, as argparse has it."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
UNREAD = 141
"""Exit status when whoever read the output has gone (``| head``), as shells have it."""

UNREACHED = "check the address, and that the store is up"
"""What to do when a store does not answer."""


class Command(Protocol):
    """What the module of a subcommand has."""

    def add_to(self, subcommands: Subcommands, /) -> None:
        """Add a parser with arguments and, as the default ``run``, ``run(arguments) -> int``."""
        ...


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with their columns padded to one width, the last column as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=True))]).rstrip()
        for row in rows
    )
    return "\n".join(lines)
