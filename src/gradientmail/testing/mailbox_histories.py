"""Random histories of a mailbox, compared with a dictionary step by step."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail.mailbox.base import Mailbox
from gradientmail.testing.mailbox_races import content

_FOLDERS = st.sampled_from(["", "a/", "b/", "a/b/", "é/", "a/é/"])
# Names that sort next to the folders, and none that is one: not every store can hold both.
_NAMES = st.sampled_from(["a b", "a-b", "a.b", "ab", "b0", "é.", "\uff5e", "\U00010000"])
_KEYS = st.builds(str.__add__, _FOLDERS, _NAMES)
_TEXTS = st.one_of(_KEYS, _FOLDERS, st.sampled_from(["a", "a/a", "é", "\U0010ffff"]))
_OPERATIONS = st.one_of(
    st.tuples(st.just("put"), _KEYS, st.binary(max_size=8)),
    st.tuples(st.just("put"), _KEYS, st.binary(max_size=8)),
    st.tuples(st.just("get"), _KEYS),
    st.tuples(st.just("list"), _TEXTS, _TEXTS),
    st.tuples(st.just("delete"), st.lists(_KEYS, max_size=3)),
)


async def replay(
    mailbox: Mailbox, space: str, model: dict[str, bytes], history: Sequence[tuple[Any, ...]]
) -> None:
    """Do ``history`` to the mailbox below ``space`` and to the model; compare every answer."""
    for operation, *arguments in history:
        if operation == "put":
            key, data = arguments
            expected = key not in model
            model.setdefault(key, data)
            assert await mailbox.put_if_absent(space + key, data) is expected
        elif operation == "get":
            found = await mailbox.get(space + arguments[0])
            assert (None if found is None else content(found)) == model.get(arguments[0])
        elif operation == "list":
            prefix, after = arguments
            keys = sorted(filter(lambda key: key.startswith(prefix), model), key=str.encode)
            expected = [space + key for key in keys if key.encode() > after.encode()]
            assert list(await mailbox.list(space + prefix, after=space + after)) == expected
        else:
            for key in arguments[0]:
                model.pop(key, None)
            await mailbox.delete([space + key for key in arguments[0]])
    assert list(await mailbox.list(space)) == sorted((space + key for key in model), key=str.encode)


def check_histories(mailbox: Mailbox, examples: int) -> None:
    """Replay ``examples`` random histories, each below a prefix of its own."""
    spaces = (f"history{number}/" for number in itertools.count())

    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.lists(_OPERATIONS, min_size=3, max_size=20))
    def check(history: list[tuple[Any, ...]]) -> None:
        asyncio.run(replay(mailbox, next(spaces), {}, history))

    check()
