"""Reads records of one file: by position where its format has an index, otherwise in order."""

from __future__ import annotations

import collections
import itertools
import json
import os
from typing import TYPE_CHECKING, Any

from grainmill import _native
from grainmill._files import tf_example
from grainmill._files.formats import detect_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from grainmill._files.formats import Format, Source

_BLOCK_BYTES = 1 << 20


def files_of(source: Source) -> _native.RecordFiles | None:
    """The files behind a source that the engine reads itself."""
    files = getattr(source, "_files", None)
    return files if isinstance(files, _native.RecordFiles) else None


def read_records(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - of the file
    start: int = 0,
) -> Iterator[Any]:
    r"""Reads the records of one file in order: by position if its format has an index.

    Args:
        path: The file, or its URL.
        format: Its format, one of `FORMATS`; by default what `detect_format` says.
        start: The number of the first record, from 0.

    Returns:
        An iterator over the records: `bytes`, or dicts of rows if `Format.rows`.

    Raises:
        ValueError: The format is unknown.
        FileNotFoundError: There is no such file.
        OSError: It is no regular file, or cannot be read.
        GrainmillError: When read: the file is damaged.

    Example:
        >>> from grainmill import files
        >>> with open("words.jsonl", "w") as file:
        ...     _ = file.write('{"word": "one"}\n{"word": "two"}')
        >>> list(files.read_records("words.jsonl"))
        [b'{"word": "one"}', b'{"word": "two"}']
    """
    return records(os.fspath(path), detect_format(path, format), start)


def records(path: str, found: Format, start: int = 0) -> Iterator[Any]:
    """All records of a file of a known format from number `start` on, read in blocks."""
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


def count(paths: Sequence[str], found: Format) -> int:
    """The number of records of files; those without an index are read for it."""
    if found.in_order:
        streams = _native.RecordStreams(paths, found.name)
        return sum(stream.skip((1 << 63) - 1) for stream in streams)
    return len(found.open(paths))


def read_at(
    path: str | os.PathLike[str],
    positions: Sequence[int],
    *,
    format: str | None = None,  # noqa: A002 - of the file
) -> list[Any]:
    r"""Reads records of one file by position; without an index, up to the last of them.

    Args:
        path: The file, or its URL.
        positions: Numbers of records, from 0, in any order.
        format: Its format, one of `FORMATS`; by default what `detect_format` says.

    Returns:
        The records in the order of the positions: `bytes`, or dicts of rows if `Format.rows`.

    Raises:
        IndexError: There is no such record.
        ValueError: The format is unknown.
        FileNotFoundError: There is no such file.
        OSError: It is no regular file, or cannot be read.
        GrainmillError: The file is damaged.

    Example:
        >>> from grainmill import files
        >>> with open("words.jsonl", "w") as file:
        ...     _ = file.write('{"word": "one"}\n{"word": "two"}')
        >>> files.read_at("words.jsonl", [1])
        [b'{"word": "two"}']
    """
    path, found = os.fspath(path), detect_format(path, format)
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


def as_json(value: Any) -> Any:
    """Returns what JSON can represent of a row or a value of it, or of a record.

    Args:
        value: Of `bytes`, it is the text, or `{"base64": ...}` where they are none; of an array or
            a number of NumPy its values; of dicts and lists those of what is in them; of
            everything else that JSON has not, `str`.

    Example:
        >>> from grainmill import files
        >>> files.as_json({"word": b"one", "mask": np.array([True, False])})
        {'word': 'one', 'mask': [True, False]}
    """
    if isinstance(value, dict):
        return {str(name): as_json(content) for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(content) for content in value]
    if hasattr(value, "tolist"):
        return as_json(value.tolist())
    if isinstance(value, bytes):
        return tf_example.shown(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


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

    def histogram(self) -> list[tuple[int, int, int]]:
        """Counts of lengths from one power of two (inclusive) to the next (exclusive)."""
        if not self.counts:
            return []
        bits = range(min(self.counts), max(self.counts) + 1)
        return [(1 << each >> 1, 1 << each, self.counts[each]) for each in bits]


def sample(path: str, found: Format, max_records: int) -> tuple[int, Lengths]:
    """The number of records, and the lengths of them all or of some, evenly spaced.

    Files without an index are read to their end anyway, so that all of their lengths are known.
    """
    if found.in_order:
        lengths = Lengths(len(record) for record in records(path, found))
        return lengths.count, lengths
    source = found.open([path])
    total, lengths = len(source), Lengths()
    count = min(total, max_records)
    step = block_len(source)
    for first in range(0, count, step):
        block: Sequence[int] = range(first, min(first + step, count))
        if count < total:
            block = [at * (total - 1) // max(count - 1, 1) for at in block]
        lengths.add(byte_len(record) for record in source.__getitems__(block))
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
