"""Reads records of one file: by position where its format has an index, otherwise in order."""

from __future__ import annotations

import collections
import itertools
import json
from typing import TYPE_CHECKING, Any

from grainmill import _native

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from grainmill._tools.formats import Format, Source

_BLOCK_BYTES = 1 << 20


def files_of(source: Source) -> _native.RecordFiles | None:
    """The files behind a source that the engine reads itself."""
    files = getattr(source, "_files", None)
    return files if isinstance(files, _native.RecordFiles) else None


def records(path: str, found: Format, start: int = 0) -> Iterator[Any]:
    """All records from number `start` on, read in blocks."""
    if found.in_order:
        stream = _native.RecordStream(path, found.name)
        stream.skip(start)
        while block := stream.read(1 << 12):
            yield from block
        return
    source = found.open([path])
    step = block_len(source)
    for first in range(start, len(source), step):
        yield from source.__getitems__(range(first, min(first + step, len(source))))


def block_len(source: Source) -> int:
    """How many records to read at a time."""
    files = files_of(source)
    if files is None:
        return 256
    return max(1, min(4096, int(_BLOCK_BYTES / max(files.mean_byte_len, 1.0))))


def count(path: str, found: Format) -> int:
    """The number of records; files without an index are read for it."""
    if found.in_order:
        stream = _native.RecordStream(path, found.name)
        return stream.skip((1 << 63) - 1)
    return len(found.open([path]))


def at_positions(path: str, found: Format, positions: Sequence[int]) -> list[Any]:
    """The records at positions, in that order.

    Raises:
        IndexError: There is no such record.
    """
    if not found.in_order:
        source = found.open([path])
        if outside := [at for at in positions if not 0 <= at < len(source)]:
            raise IndexError(f"{path}: no record {outside[0]}, it has {len(source)}")
        return source.__getitems__(positions)
    wanted = set(positions)
    taken: dict[int, Any] = {}
    total = -1
    for total, record in enumerate(
        itertools.islice(records(path, found), max(wanted, default=-1) + 1)
    ):
        if total in wanted:
            taken[total] = record
    if missing := sorted(wanted - taken.keys()):
        raise IndexError(f"{path}: no record {missing[0]}, it has {total + 1}")
    return [taken[at] for at in positions]


class Lengths:
    """Lengths of records, of which only sums are kept.

    Attributes:
        count: How many there are.
        total: Their sum.
        least: The shortest, and 0 if there is none.
        most: The longest, and 0 if there is none.
        counts: How many have so many bits.
    """

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        self.count = self.total = self.least = self.most = 0
        self.counts: collections.Counter[int] = collections.Counter()
        self.add(lengths)

    def add(self, lengths: Iterable[int]) -> None:
        """Adds lengths."""
        for length in lengths:
            self.least = length if not self.count else min(self.least, length)
            self.most = max(self.most, length)
            self.count += 1
            self.total += length
            self.counts[length.bit_length()] += 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


def sample(path: str, found: Format, max_records: int) -> tuple[int, Lengths]:
    """The number of records, and the lengths of them all or of some, evenly spaced.

    Files without an index are read to their end anyway, so that all of their lengths are known.
    """
    if found.in_order:
        lengths = Lengths(map(len, records(path, found)))
        return lengths.count, lengths
    source = found.open([path])
    total, lengths = len(source), Lengths()
    count = min(total, max_records)
    step = block_len(source)
    for first in range(0, count, step):
        block: Sequence[int] = range(first, min(first + step, count))
        if count < total:
            block = [at * (total - 1) // max(count - 1, 1) for at in block]
        lengths.add(map(byte_len, source.__getitems__(block)))
    return total, lengths


def json_object(record: bytes) -> dict[str, Any]:
    """The JSON object in a record.

    Raises:
        ValueError: It is something else.
    """
    value = json.loads(record)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, got {type(value).__name__}")
    return value


def byte_len(record: Any) -> int:
    """The length of a record in bytes: of `bytes`, or of all values of a row."""
    if isinstance(record, bytes | str):
        return len(record)
    if isinstance(record, dict):
        return sum(byte_len(value) for value in record.values())
    return int(getattr(record, "nbytes", 8))
