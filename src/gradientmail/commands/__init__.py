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
from typing import override

import gradientmail
from gradientmail.commands import doctor, verify
from gradientmail.commands.base import FAULTY, INTERRUPTED, MISUSED, UNREACHED, UNREAD, Command
from gradientmail.errors import GradientMailError, MailboxUnavailable

COMMANDS: tuple[Command, ...] = (doctor, verify)


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    @override
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        print(f"gradientmail {gradientmail.__version__}")
        parser.exit()


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
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    subcommands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command"
    )
    for command in COMMANDS:
        command.add_to(subcommands)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # told with the usage of the subcommand, which is whose they were meant for
        subcommands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(arguments.run(arguments))
    except (ValueError, TypeError) as error:
        return _say(error, MISUSED)
    except MailboxUnavailable as error:
        return _say(f"{error}; {UNREACHED}", FAULTY)
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
