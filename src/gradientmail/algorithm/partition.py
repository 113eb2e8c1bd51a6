"""Which parameters make up which fragment: a function of the schema alone."""

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from gradientmail.algorithm.diloco import ByBytes, Strided
from gradientmail.schema import TensorSpec

type Plan = tuple[tuple[str, ...], ...]
"""The names of each fragment's tensors, sorted."""


def partition(schema: Sequence[TensorSpec], how: ByBytes | Strided, fragments: int) -> Plan:
    """Cut the tensors into at most ``fragments`` parts, none of them empty.

    ``ByBytes``: largest first (ties by name), each into the lightest part so far (ties to the
    lowest index). ``Strided``: blocks in the order of their numbers to parts 0, 1, …, P-1, 0, …;
    then the other tensors as ``ByBytes`` does, onto those loads.

    Raises ``ValueError`` for a schema without tensors, and for a block whose number is none.
    """
    if not schema:
        raise ValueError("there is no parameter to cut into fragments")
    parts: list[list[str]] = [[] for _ in range(min(fragments, len(schema)))]
    loads = [0] * len(parts)
    rest: Iterable[TensorSpec] = schema
    if isinstance(how, Strided):
        rest = _place_blocks(schema, how.block_pattern, parts, loads)
    _place_by_bytes(rest, parts, loads)
    return tuple(tuple(sorted(names)) for names in parts if names)


def _place_by_bytes(
    specs: Iterable[TensorSpec], parts: list[list[str]], loads: Sequence[int]
) -> None:
    lightest = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(lightest)
    for spec in sorted(specs, key=lambda spec: (-spec.nbytes, spec.name)):
        load, index = lightest[0]
        parts[index].append(spec.name)
        heapq.heapreplace(lightest, (load + spec.nbytes, index))


def _place_blocks(
    schema: Sequence[TensorSpec], block_pattern: str, parts: list[list[str]], loads: list[int]
) -> list[TensorSpec]:
    """Place the tensors that belong to a block; return the others."""
    pattern = re.compile(block_pattern)
    blocks: dict[int, list[TensorSpec]] = defaultdict(list)
    rest = []
    for spec in schema:
        number = _block_number(pattern, spec.name)
        (rest if number is None else blocks[number]).append(spec)
    for turn, number in enumerate(sorted(blocks)):
        index = turn % len(parts)
        parts[index].extend(spec.name for spec in blocks[number])
        loads[index] += sum(spec.nbytes for spec in blocks[number])
    return rest


def _block_number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.search(name)
    if match is None or match[1] is None:
        return None
    try:
        return int(match[1])
    except ValueError:
        raise ValueError(
            f"block_pattern={pattern.pattern!r} finds {match[1]!r} in the parameter {name!r}, "
            "which is not a whole number; let its first group match digits only"
        ) from None
