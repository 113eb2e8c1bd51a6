"""What ``step`` costs while an upload takes as long as several rounds."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.session.models import ALGORITHM, QUICK, net

import gradientmail as gm
from gradientmail.mailbox.wrapped import Call, WrappedMailbox


class SlowUplink(WrappedMailbox):
    """A store that no delta reaches."""

    def __init__(self, inner: gm.Mailbox) -> None:
        super().__init__(inner)
        self.uploading = False

    async def around(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        if call.operation == "put_if_absent" and call.key.startswith("blobs/snapshots/"):
            self.uploading = True
            await asyncio.Event().wait()
        return await act()


def test_the_next_rounds_buffer_is_warm_before_the_upload_ends() -> None:
    """Else ``step`` would touch its pages: ten times what the copy alone takes."""
    box, model = SlowUplink(gm.MemoryMailbox()), net()
    session = gm.Session(model, algorithm=ALGORITHM, mailbox=box, callbacks=(), **QUICK)
    try:
        session.step(samples=1)
        session.step(samples=1)  # round 0 is due
        for _ in range(9000):
            if box.uploading:
                break
            time.sleep(0.01)
        assert box.uploading
        assert list(session._handoff.blanks) == [1]
    finally:
        session.__exit__(KeyboardInterrupt, None, None)


def test_no_buffer_is_made_for_the_snapshot_that_is_being_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop may look for what to prepare just then; the buffer would be held for a whole turn.

    What comes next is another fragment.
    """
    model = net()
    with gm.Session(
        model, algorithm=ALGORITHM, mailbox=gm.MemoryMailbox(), callbacks=(), **QUICK
    ) as session:
        parameters, courier = session._parameters, session._node.courier
        found: list[list[int]] = []
        assert courier is not None
        capture = parameters.capture

        def capture_meanwhile(arrays: Any) -> Callable[[], None]:
            session._thread.call(courier.blanks.prepare(courier._newest_posted()))
            found.append(list(session._handoff.blanks))
            return capture(arrays)

        monkeypatch.setattr(parameters, "capture", capture_meanwhile)
        session.step(samples=1)
        session.step(samples=1)  # round 0 is due
        monkeypatch.undo()
    assert found == [[1]]
