"""Objects that travel in parts: several requests side by side, put together at the end.

The caller's event loop leads; each request runs on a thread of the mailbox. At most as many parts
of one object are under way as threads may carry them, so that two transfers share the line.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from gradientmail.mailbox.lanes import Lanes
from gradientmail.mailbox.s3_errors import Meaning
from gradientmail.mailbox.s3_parts import WHOLE_BYTES, cut
from gradientmail.mailbox.s3_requests import Requests

CLEANUP_SECONDS = 60.0
"""How long what is left of a cancelled upload is waited for before the store is told."""

type Take = Callable[[int], memoryview]


async def send(
    lanes: Lanes,
    requests: Requests,
    name: str,
    view: memoryview,
    abandoned: threading.Event,
    *,
    condition: bool,
) -> bool:
    """Create an object in parts; False when it exists.

    Nothing is left in the store when this fails or is cancelled, if the store can be told. Without
    ``condition`` the object is replaced when two create it at the same moment.
    """
    if await lanes.run(requests.exists, name):
        return False
    pieces = cut(view.nbytes, lanes.bulk_width)
    parts: list[Any] = [None] * len(pieces)
    upload = await lanes.run(requests.begin, name)
    running: set[Future[Any]] = set()

    async def one(index: int) -> None:
        start, stop = pieces[index]
        future = lanes.submit(
            requests.put_part, name, upload, index + 1, view[start:stop], abandoned, bulk=True
        )
        running.add(future)
        parts[index] = await asyncio.wrap_future(future)
        running.discard(future)

    try:
        await side_by_side(map(one, range(len(pieces))), lanes.bulk_width)
        made = await lanes.run(partial(requests.complete, condition=condition), name, upload, parts)
    except BaseException:
        abandoned.set()
        lanes.submit(_give_up, requests, name, upload, running)
        raise
    if not made:
        lanes.submit(_give_up, requests, name, upload, running)
    return made


def _give_up(requests: Requests, name: str, upload: str, running: set[Future[Any]]) -> None:
    """Abort an upload once its last part has ended: one that lands later would stay for ever."""
    wait([part for part in tuple(running) if part.running()], CLEANUP_SECONDS)
    requests.abort(name, upload)


class Changed(Exception):
    """Between two ranges the object was deleted, or deleted and made anew."""


async def fetch(
    lanes: Lanes, requests: Requests, name: str, take: Take, *, bulk: bool
) -> memoryview | None:
    """The whole object in a buffer from ``take``, None when there is none. ``Changed``: again.

    The first request asks for as much as may come at once, and tells how large the object is. A
    larger one's other ranges are fetched beside it, straight to their places.
    """
    loop = asyncio.get_running_loop()
    announced: asyncio.Future[tuple[memoryview, str | None]] = loop.create_future()

    def announce(buffer: memoryview, etag: str | None) -> None:
        try:
            loop.call_soon_threadsafe(_set, announced, (buffer, etag))
        except RuntimeError:  # the loop is closed: nobody waits
            return

    first = asyncio.ensure_future(
        lanes.run(_fetch_first, requests, name, take, announce, bulk=bulk)
    )
    try:
        await asyncio.wait((first, announced), return_when=asyncio.FIRST_COMPLETED)
        if announced.done():
            buffer, etag = announced.result()
            await _fetch_rest(lanes, requests, name, buffer, etag)
        return await first
    finally:
        first.cancel()
        del first  # an error of it has this frame, and would hold itself and the payload


async def _fetch_rest(
    lanes: Lanes, requests: Requests, name: str, buffer: memoryview, etag: str | None
) -> None:
    async def one(piece: tuple[int, int]) -> None:
        start, stop = WHOLE_BYTES + piece[0], WHOLE_BYTES + piece[1]
        part = buffer[start:stop]
        same = partial(requests.get_range, total=buffer.nbytes, etag=etag)
        if not await lanes.run(same, name, part, start, bulk=True):
            raise Changed

    pieces = cut(buffer.nbytes - WHOLE_BYTES, lanes.bulk_width)
    await side_by_side(map(one, pieces), lanes.bulk_width)


def _fetch_first(
    requests: Requests,
    name: str,
    take: Take,
    announce: Callable[[memoryview, str | None], None],
) -> memoryview | None:
    found = requests.open(name, WHOLE_BYTES)
    if found is Meaning.EMPTY:
        return memoryview(b"")
    if isinstance(found, Meaning):
        return None
    try:
        buffer = take(found.total)
    except BaseException:  # the caller has no use for so much
        found.body.close()
        raise
    if found.stop < found.total:
        announce(buffer, found.etag)
    requests.fill(name, found, buffer[: found.stop])
    return buffer


def _set[T](future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


async def side_by_side(work: Iterator[Coroutine[Any, Any, None]], width: int) -> None:
    """Run all of ``work``, ``width`` at a time; the first error is raised when none runs any more.

    After an error nothing more is begun.
    """

    async def lane() -> None:
        for one in work:
            await one

    lanes = [asyncio.ensure_future(lane()) for _ in range(width)]
    try:
        await asyncio.gather(*lanes)
    except BaseException:
        for number in range(width):
            lanes[number].cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        raise
    finally:
        del lanes  # an error of one has this frame, and would hold itself and the payload
