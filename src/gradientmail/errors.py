"""Every error that GradientMail raises on purpose.

    GradientMailError
    ├── MailboxUnavailable      the store cannot be reached now; the call may be repeated
    ├── MailboxRefused          the store will not do it, however often it is asked
    ├── ProtocolError           what the mailbox holds cannot be used
    │   ├── RunConfigMismatch   the run there was created with other options
    │   ├── SchemaMismatch      the run there trains another model
    │   └── PayloadCorrupt      an object's bytes are not what its record says
    ├── LearnerReplaced         a newer process joined with this learner's id
    ├── SessionClosed           step() on a session that has been closed, or entering it
    └── MissingExtra            an optional dependency is not installed (also an ImportError)

Bad arguments are ``ValueError`` or ``TypeError``; a full disk and the like stay ``OSError``.
"""


class GradientMailError(Exception):
    """Base of all errors of this package."""


class MailboxUnavailable(GradientMailError):
    """The store cannot serve this call now. Repeating it later is safe and may succeed."""


class MailboxRefused(GradientMailError):
    """The store refuses this call, and would again: no bucket, no permission, no such feature.

    The message says what to do about it.
    """


class ProtocolError(GradientMailError):
    """What the mailbox holds cannot be used; repeating the call will not help."""


class RunConfigMismatch(ProtocolError):
    """The run under this mailbox was created with other algorithm options."""


class SchemaMismatch(ProtocolError):
    """The run under this mailbox trains a model with other parameters."""


class PayloadCorrupt(ProtocolError):
    """A payload's bytes do not match the record that refers to it. Names the key."""


class LearnerReplaced(GradientMailError):
    """A newer process joined the run with the same learner id, and that one goes on."""


class SessionClosed(GradientMailError, RuntimeError):
    """The session has been closed; make a new one to train on."""


class MissingExtra(GradientMailError, ImportError):
    """An optional dependency is needed and not installed."""

    def __init__(self, extra: str, module: str) -> None:
        """Name the extra to install and the module whose import failed."""
        super().__init__(
            f"{module} is not installed; install it with: pip install 'gradientmail[{extra}]'"
        )
        self.extra = extra
