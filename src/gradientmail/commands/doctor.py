"""``gradientmail doctor URL``: whether a run can live in a store, how fast it is, what it costs."""

import argparse

from gradientmail.commands.base import FINE, Subcommands
from gradientmail.mailbox.urls import open_mailbox


def add_to(subcommands: Subcommands) -> None:
    """Describe the command."""
    parser = subcommands.add_parser("doctor", help="check a store before a run is put into it")
    parser.add_argument("url", help="s3://bucket/prefix, file:///folder, or the path of a folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the store; the exit status."""
    open_mailbox(arguments.url)
    return FINE
