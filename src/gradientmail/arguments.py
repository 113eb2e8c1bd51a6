"""The arguments of ``Session``, ``align`` and ``step``, checked in words that say what to pass."""

import operator
from pathlib import Path

from gradientmail.algorithm.diloco import DiLoCo
from gradientmail.backend.base import Backend, Parameters
from gradientmail.exchange.compression import require_zstandard
from gradientmail.exchange.layout import check_learner_id, default_learner_id
from gradientmail.mailbox.base import Mailbox
from gradientmail.node import Settings
from gradientmail.schema import Schema

MOST_SAMPLES = 2**40
"""In one step: more is a mistake, and sums of it would not fit into the records of a run."""

MOST_SECONDS = 1e300
"""Of any time that is given: sums of some must stay finite."""


def positive_integer(samples: object) -> int:
    """``samples`` of one optimizer step as an int, whatever integer type it has."""
    if isinstance(samples, bool):
        raise TypeError("samples must be a positive integer, not a bool")
    try:
        count = operator.index(samples)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"samples must be a positive integer, not {type(samples).__name__}: the number of "
            "samples (or tokens) in this optimizer step"
        ) from None
    if not 0 < count <= MOST_SAMPLES:
        raise ValueError(f"samples must be a positive integer (2**40 at most), not {count}")
    return count


def count_of(name: str, value: int) -> int:
    """``value`` of the argument ``name`` if it is an integer from 1 on, else an error naming it."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if count < 1:
        raise ValueError(f"{name} must be 1 or more, not {value!r}")
    return count


def seconds_of(name: str, value: float) -> float:
    """``value`` of the argument ``name`` as positive finite seconds, else an error naming it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not 0 < value <= MOST_SECONDS:
        raise ValueError(
            f"{name} must be a positive number of seconds, 1e300 at most, not {value!r}"
        )
    return float(value)


def check_arguments(
    algorithm: object, mailbox: object, compression: object, backend: object
) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what is not what ``Session`` takes."""
    if not isinstance(algorithm, DiLoCo):
        raise TypeError(f"algorithm must be a DiLoCo, not {type(algorithm).__name__}")
    check_mailbox(mailbox)
    if not isinstance(compression, str) or compression not in ("off", "zstd"):
        raise ValueError(f'compression must be "off" or "zstd", not {compression!r}')
    if compression == "zstd":
        require_zstandard()  # at once: a node that joins compresses nothing until it publishes
    if backend is not None and not isinstance(backend, Backend):
        raise TypeError(
            "backend must be None, or a backend such as NumpyBackend() of gradientmail.backend, "
            f"not {backend!r}"
        )


def check_formats(backend: Backend, schema: Schema, algorithm: DiLoCo) -> None:
    """Raise ``MissingExtra`` now, and not in a round, when a format of the run needs a package."""
    own = {spec.dtype for spec in schema}
    for dtype in sorted(own | {algorithm.delta_dtype or "F32", algorithm.commit_dtype or "F32"}):
        backend.array(memoryview(b""), dtype, (0,))


def check_finite(parameters: Parameters) -> None:
    """Raise ``ValueError`` naming what holds a NaN or an infinity."""
    bad = parameters.not_finite()
    if bad:
        raise ValueError(
            f"parameters of the model hold NaN or infinity, and a run that begins with them "
            f"could never train them: {', '.join(bad[:5])}{', …' if len(bad) > 5 else ''}"
        )


def bound(backend: Backend, model: object, buffers: object) -> Parameters:
    """What of ``model`` is exchanged; ``ValueError`` for another ``buffers`` than there are."""
    if not isinstance(buffers, str) or buffers not in ("local", "average"):
        raise ValueError(f'buffers must be "local" or "average", not {buffers!r}')
    return backend.bind_with_buffers(model) if buffers == "average" else backend.bind(model)


def settings_of(
    learner_id: str | None,
    poll_interval: float,
    lease_every: float,
    lease_timeout: float,
    compression: str,
) -> Settings:
    """This node's own settings, checked."""
    timeout = seconds_of("lease_timeout", lease_timeout)
    return Settings(
        learner=default_learner_id() if learner_id is None else check_learner_id(learner_id),
        poll_interval=seconds_of("poll_interval", poll_interval),
        # A lease that is renewed too late would look like a crash.
        lease_every=min(seconds_of("lease_every", lease_every), timeout / 2),
        lease_timeout=timeout,
        compressed=compression == "zstd",
    )


def check_mailbox(mailbox: object) -> None:
    """Raise ``TypeError`` unless it has the four operations; says what to pass instead."""
    if isinstance(mailbox, type):
        raise TypeError(f"mailbox must be a store, not the class {mailbox.__name__}: call it")
    if isinstance(mailbox, str | Path):
        raise TypeError(
            f"mailbox must be a store: pass gradientmail.open_mailbox({str(mailbox)!r})"
        )
    if not isinstance(mailbox, Mailbox):
        raise TypeError(
            "mailbox must have put_if_absent, get, list and delete, which "
            f"{type(mailbox).__name__} has not: pass gradientmail.open_mailbox(folder or url)"
        )
