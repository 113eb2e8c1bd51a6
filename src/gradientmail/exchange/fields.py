"""JSON of the mailbox: written canonically, read as if anybody had written it.

A *reader* takes a decoded value and the words for where it stands, and returns the value checked
or raises ``ProtocolError`` naming it. Records are tables of readers (``records.py``).
"""

import json
import math
import reprlib
from collections.abc import Buffer, Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

from gradientmail.errors import ProtocolError

type Reader = Callable[[object, str], Any]

INT_LIMIT = 2**63
"""Integers of a record are smaller in magnitude: whatever a language's 64-bit integers hold."""

NESTING_LIMIT = 32
"""Levels of lists and objects in a free-form value; the options of a run need three."""

show = reprlib.Repr(maxstring=80, maxother=80, maxlist=4, maxdict=4, maxlevel=2).repr
"""``repr``, cut short."""


def canonical(value: object) -> bytes:
    r"""Sorted keys, no white space, non-ASCII as ``\u`` escapes; dataclasses become objects.

    A field whose metadata say ``sparse`` is left out while it is empty. A float that is not finite
    is a ``ValueError``: JSON has no word for it.
    """
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        members = {field: getattr(value, field.name) for field in fields(value)}
        return {
            field.name: _plain(member)
            for field, member in members.items()
            if member or not field.metadata.get("sparse")
        }
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def parse(data: Buffer, what: str, limit: int) -> object:
    """Decode one JSON document of at most ``limit`` bytes, else ``ProtocolError``.

    Stricter than ``json.loads``: UTF-8 only, no NaN or Infinity, no key twice in an object.
    """
    size = memoryview(data).nbytes
    if size > limit:
        raise ProtocolError(f"{what} has {size} bytes, more than the {limit} it may have")
    try:
        return json.loads(
            str(data, "utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except ValueError as error:  # not UTF-8, not JSON, an integer of thousands of digits
        raise ProtocolError(f"{what} is not valid JSON: {error}") from None
    except RecursionError:
        raise ProtocolError(f"{what} is nested too deeply") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has the same key twice")
    return members


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


def wrong(where: str, value: object, expected: str) -> ProtocolError:
    """The error for a value that is not what its place asks for."""
    return ProtocolError(f"{where} is {show(value)}, expected {expected}")


def integer(low: int = 0, high: int = INT_LIMIT - 1) -> Reader:
    """An integer (a bool or a float is none) from ``low`` to ``high``."""

    def read(value: object, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong(where, value, f"an integer from {low} to {high}")
        return value

    return read


def number(value: object, where: str) -> float:
    """A finite number, not negative. An integer stays one, so that the same bytes come out."""
    if type(value) is int and 0 <= value < INT_LIMIT:
        return value
    if type(value) is float and 0 <= value < math.inf:
        return value
    raise wrong(where, value, "a finite number that is not negative")


def signed_number(value: object, where: str) -> float:
    """A finite number of either sign."""
    if type(value) is int and abs(value) < INT_LIMIT:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    raise wrong(where, value, "a finite number")


def boolean(value: object, where: str) -> bool:
    """``true`` or ``false``."""
    if type(value) is not bool:
        raise wrong(where, value, "true or false")
    return value


def text(accept: Callable[[str], bool], expected: str) -> Reader:
    """A string that ``accept`` holds true of."""

    def read(value: object, where: str) -> str:
        if type(value) is not str or not accept(value):
            raise wrong(where, value, expected)
        return value

    return read


any_text = text(lambda _: True, "a string")


def optional(reader: Reader) -> Reader:
    """``null`` or what ``reader`` reads."""
    return lambda value, where: None if value is None else reader(value, where)


def sequence(reader: Reader, limit: int | None = None) -> Reader:
    """A list of at most ``limit`` values that ``reader`` reads, as a tuple."""

    def read(value: object, where: str) -> tuple[Any, ...]:
        if type(value) is not list or (limit is not None and len(value) > limit):
            raise wrong(where, value, "a list" if limit is None else f"a list of {limit} or fewer")
        return tuple(reader(item, f"{where}[{i}]") for i, item in enumerate(value))

    return read


def pair(first: Reader, second: Reader) -> Reader:
    """A list of exactly two values, as a tuple."""

    def read(value: object, where: str) -> tuple[Any, Any]:
        if type(value) is not list or len(value) != 2:
            raise wrong(where, value, "a list of two")
        return first(value[0], f"{where}[0]"), second(value[1], f"{where}[1]")

    return read


def free_object(value: object, where: str) -> dict[str, Any]:
    """An object of any members that can be written again."""
    if type(value) is not dict:
        raise wrong(where, value, "an object")
    _check_free(value, where, NESTING_LIMIT)
    return value


def _check_free(value: object, where: str, levels: int) -> None:
    if isinstance(value, (dict, list)) and not levels:
        raise ProtocolError(f"{where} is nested more than {NESTING_LIMIT} levels deep")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_free(item, where, levels - 1)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        signed_number(value, where)


def instance[T](
    cls: type[T], readers: Mapping[str, Reader], sparse: Mapping[str, Reader] | None = None
) -> Callable[[object, str], T]:
    """An object with these members, as ``cls(**members)``; members not in the table are ignored.

    Those of ``sparse`` may be missing.

    The ``ValueError`` that ``cls`` raises for members that do not fit together is passed on as
    ``ProtocolError``.
    """

    def read(value: object, where: str) -> T:
        if type(value) is not dict:
            raise wrong(where, value, "an object")
        missing = [name for name in readers if name not in value]
        if missing:
            raise ProtocolError(f"{where} has no {' and no '.join(missing)}")
        known = {**readers, **(sparse or {})}
        members = {
            name: reader(value[name], f"{where}.{name}")
            for name, reader in known.items()
            if name in value
        }
        try:
            return cls(**members)
        except ValueError as error:
            raise ProtocolError(f"{where}: {error}") from None

    return read


def strictly_increasing(items: Iterable[Any]) -> bool:
    """Whether every item is greater than the one before: sorted, none twice."""
    return all(left < right for left, right in pairwise(items))
