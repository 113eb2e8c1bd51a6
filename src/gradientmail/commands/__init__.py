"""The command ``gradientmail``, also ``python -m gradientmail``: a module for each subcommand.

A new one is a module with ``add_to(subcommands)`` (see ``base.Command``) and a place in
``COMMANDS``. Its ``run(arguments)`` returns the exit status; ``ValueError`` and ``TypeError`` that
it raises mean that it was called wrongly, ``GradientMailError`` and ``OSError`` that what it was
to look at is not in order. Each of these is one line for the user, without a traceback.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from gradientmail.commands import doctor, verify
from gradientmail.commands.base import FAULTY, INTERRUPTED, MISUSED, UNREAD, Command
from gradientmail.errors import GradientMailError

COMMANDS: tuple[Command, ...] = (doctor, verify)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that ``argv`` (the command line by default) names; its exit status."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone can be told from other faults
    except BrokenPipeError:
        # What Python would still write at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="gradientmail",
        description="Tools for runs of GradientMail and the stores that they live in.",
    )
    subcommands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(subcommands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, TypeError) as error:
        return _say(error, MISUSED)
    except GradientMailError as error:
        return _say(error, FAULTY)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _say(_without_number(error), FAULTY)
    except KeyboardInterrupt:
        return _say("stopped", INTERRUPTED)


def _without_number(error: OSError) -> str:
    """What went wrong and where, as other commands print it: without the ``[Errno 2]``."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def _say(error: object, status: int) -> int:
    print(f"gradientmail: {error}", file=sys.stderr)
    return status
