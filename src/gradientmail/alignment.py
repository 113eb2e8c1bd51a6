"""``align``: the newest committed parameters of a run, for whoever does not train in it."""

from typing import Literal

from gradientmail import opened
from gradientmail.arguments import bound, check_mailbox
from gradientmail.backend import backend_for
from gradientmail.blocking import Store
from gradientmail.events import BuffersStayLocal, log_events
from gradientmail.exchange.exchange import Exchange
from gradientmail.joining import read_newest
from gradientmail.mailbox.base import Mailbox


def align(
    model: object, *, mailbox: Mailbox, buffers: Literal["local", "average"] = "local"
) -> int:
    """Load the newest committed parameters of the run under ``mailbox`` into ``model``.

    Publishes nothing, claims nothing. Returns the newest committed round, −1 if there is none: then
    the model gets the run's initial parameters, or stays as it is when there is no run there.

    Raises:
        RuntimeError: the model is in an open session, which keeps it aligned by itself.
        SchemaMismatch: the run there trains a model with other parameters.
        PayloadCorrupt: its parameters cannot be read.
        ProtocolError: another object of the run cannot be.
        MailboxRefused, OSError: the store will not do it. One that is away is asked again until
            it answers, and the log says so.

    """
    check_mailbox(mailbox)
    backend = backend_for(model)
    parameters = bound(backend, model, buffers)
    if opened.sessions_with(parameters.identity | {id(model)}):
        raise RuntimeError(
            "this model is in an open session, which keeps it aligned by itself; align a copy of "
            "it (copy.deepcopy), or close the session first"
        )
    store = Store(mailbox, "gradientmail-align")
    try:
        exchange = Exchange(store.mailbox, offload=store.hash, take=backend.pool().take)
        found = store.call(read_newest(exchange, parameters.schema, backend, parameters.averaged))
        if found is None:
            return -1
        newest, versions = found
        if parameters.local_buffers:
            log_events(BuffersStayLocal(buffers=parameters.local_buffers))
        for version in versions:
            parameters.apply(parameters.stage(version.arrays))
        return newest
    finally:
        store.stop()
