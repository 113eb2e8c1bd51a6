"""Reads a mailbox and checks every invariant that can be read from it (``INVARIANTS``).

It writes nothing and may run beside a live run: what nodes sweep while it reads is no violation.
"""

from gradientmail.verification.report import INVARIANTS, Report, Violation
from gradientmail.verification.verify import verify

__all__ = ["INVARIANTS", "Report", "Violation", "verify"]
