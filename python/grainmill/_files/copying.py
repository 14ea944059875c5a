"""Copies records from open inputs to an output, some at a time: in the engine wherever it can."""

from __future__ import annotations

import functools
import itertools
import json
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grainmill import _native
from grainmill._files import reading, tf_example
from grainmill._files.formats import FORMATS
from grainmill._files.messages import Argument, Message
from grainmill._native import GrainmillError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from grainmill._files.formats import Format, Source


# How many records were copied, 0 at the end; and how many bytes of the inputs that are, about.
Copied: TypeAlias = tuple[int, float]


class Copying:
    """The next records of some inputs."""

    def copy_to(self, output: _native.RecordOutput, max_records: int, threads: int) -> Copied:
        """Copies some of the next records."""
        raise NotImplementedError

    def skip(self, count: int) -> int:
        """Skips records; returns how many there were."""
        raise NotImplementedError

    def start(self, count: int | None, num_blocks: int) -> None:
        """Begins to read far records ahead, so many blocks; no more than `count` are copied."""


class InOrder(Copying):
    """A file that is read from start to end by the engine: the next one of `streams`."""

    def __init__(self, streams: _native.RecordStreams) -> None:
        self._stream = next(streams)
        self._num_read = 0  # opening a compressed file has read some of it

    def copy_to(self, output: _native.RecordOutput, max_records: int, threads: int) -> Copied:
        count = output.copy_stream(self._stream, max_records, threads)
        before, self._num_read = self._num_read, self._stream.stored_offset
        return count, float(self._num_read - before)

    def skip(self, count: int) -> int:
        if not count:  # what opening has read belongs to the records that are copied
            return 0
        skipped = self._stream.skip(count)
        self._num_read = self._stream.stored_offset
        return skipped


class Indexed(Copying):
    """Files that the engine reads by position, in the order of a seed if there is one."""

    def __init__(self, files: _native.RecordFiles, byte_len: int, seed: int | None) -> None:
        self._records = _native.IndexedRecords(files)
        self._next = self._begun = 0
        self._total = self._end = len(files)
        self._num_blocks = 1
        self._bytes_each = byte_len / max(self._total, 1)
        self._order = _order(self._total, seed)

    def copy_to(self, output: _native.RecordOutput, max_records: int, threads: int) -> Copied:
        count = min(max_records, self._end - self._next)
        if count <= 0:
            return 0, 0.0
        self._begin(count)
        output.copy_indexed(self._records, count, threads)
        self._next += count
        return count, count * self._bytes_each

    def skip(self, count: int) -> int:
        count = min(count, self._total - self._next)
        self._next += count
        self._begun = self._next
        return count

    def start(self, count: int | None, num_blocks: int) -> None:
        if count is not None:
            self._end = min(self._total, self._next + count)
        self._num_blocks = num_blocks
        self._begin(0)

    def _begin(self, count: int) -> None:
        """Begins to read the next `count` records, and blocks that follow, half of them at once."""
        ahead = self._num_blocks * self._records.block_len
        until = min(self._end, self._next + count + ahead)
        is_needed = self._next + count > self._begun
        if is_needed or until - self._begun >= max(1, ahead // 2):
            self._records.add(self._order(self._begun, until - self._begun))
            self._begun = until


# Records, how many bytes of the files were read for them, and the file and number of one of them.
Block: TypeAlias = "tuple[Sequence[Any], float, Callable[[int], tuple[str, int]]]"


class Objects(Copying):
    """Records that Python has to touch: rows of tables, and contents that are converted."""

    def __init__(self, blocks: Iterator[Block], make: Callable[[Any], Any]) -> None:
        self._num_read = 0.0
        self._records = self._of(blocks)
        self._make = make

    def copy_to(self, output: _native.RecordOutput, max_records: int, threads: int) -> Copied:
        made = []
        byte_len = 0
        before = self._num_read
        for record, at, place in itertools.islice(self._records, min(max_records, 4096)):
            try:
                made.append(self._make(record))
            except (ValueError, RecursionError) as error:
                path, number = place(at)
                raise GrainmillError(f"{path}: record {number}: {error}") from error
            byte_len += reading.byte_len(made[-1])
            if byte_len > 16 << 20:  # some large ones at a time
                break
        if made:
            output.copy_list(made, threads)
        return len(made), self._num_read - before

    def skip(self, count: int) -> int:
        return sum(1 for _ in itertools.islice(self._records, count))

    def _of(self, blocks: Iterator[Block]) -> Iterator[tuple[Any, int, Any]]:
        for block, byte_len, place in blocks:
            self._num_read += byte_len
            for at, record in enumerate(block):
                yield record, at, place


class Chained(Copying):
    """Parts one after the other, each opened when the one before it has ended."""

    def __init__(self, parts: Iterable[Callable[[], Copying]]) -> None:
        self._waiting = iter(parts)
        self._part: Copying | None = None

    def copy_to(self, output: _native.RecordOutput, max_records: int, threads: int) -> Copied:
        while (part := self._opened()) is not None:
            count, done = part.copy_to(output, max_records, threads)
            if count:
                return count, done
            self._part = None
        return 0, 0.0

    def skip(self, count: int) -> int:
        left = count
        while left and (part := self._opened()) is not None:
            skipped = part.skip(left)
            if not skipped:
                self._part = None
            left -= skipped
        return count - left

    def _opened(self) -> Copying | None:
        if self._part is None:
            begin = next(self._waiting, None)
            self._part = begin() if begin is not None else None
        return self._part


def opened(
    paths: Sequence[str],
    found: Sequence[Format],
    byte_lens: Sequence[int],
    *,
    seed: int | None,
    content: str,
) -> Copying:
    """The records of files in their order, or in that of a seed: files of one format then."""
    inputs = list(zip(paths, found, byte_lens, strict=True))
    runs = [list(run) for _, run in itertools.groupby(inputs, key=lambda each: each[1].name)]
    parts = [part for run in runs for part in _parts_of(run, seed, content)]
    return parts[0]() if len(parts) == 1 else Chained(parts)


def _parts_of(
    inputs: list[tuple[str, Format, int]], seed: int | None, content: str
) -> Iterator[Callable[[], Copying]]:
    """What opens the records of files of one format: one by one, or all at once."""
    found = inputs[0][1]
    if found.in_order and seed is None and content == "same":
        streams = _native.RecordStreams([path for path, _, _ in inputs], found.name)
        for _ in inputs:
            yield functools.partial(InOrder, streams)
    else:
        yield functools.partial(_opened_alike, inputs, seed, content)


def _opened_alike(inputs: list[tuple[str, Format, int]], seed: int | None, content: str) -> Copying:
    """The records of files of one format, of which Python sees each, or the engine any."""
    paths, found = [path for path, _, _ in inputs], inputs[0][1]
    if found.in_order and seed is None:
        return Objects(_stream_blocks(paths, found), _maker(content))
    source, byte_len = found.open(paths), sum(byte_len for _, _, byte_len in inputs)
    files = reading.files_of(source)
    if files is not None and content == "same" and not found.rows:
        return Indexed(files, byte_len, seed)
    return Objects(_blocks(source, byte_len, seed), _maker(content))


def total_of(paths: Sequence[str], found: Sequence[Format]) -> int:
    """The number of records of all files."""
    inputs = sorted(zip(paths, found, strict=True), key=lambda each: each[1].name)
    return sum(
        reading.count([path for path, _ in run], FORMATS[name])
        for name, run in itertools.groupby(inputs, key=lambda each: each[1].name)
    )


def _stream_blocks(paths: Sequence[str], found: Format) -> Iterator[Block]:
    for path, stream in zip(paths, _native.RecordStreams(paths, found.name), strict=True):
        before, first = 0, 0
        while block := stream.read(1 << 12):
            read = float(stream.stored_offset - before)
            yield block, read, functools.partial(_place_in, path, first)
            before, first = stream.stored_offset, first + len(block)


def _place_in(path: str, first: int, at: int) -> tuple[str, int]:
    return path, first + at


def _place_of(source: Source, keys: list[int], at: int) -> tuple[str, int]:
    return source._record_location(keys[at])  # noqa: SLF001 - all sources have it, for messages


def _blocks(source: Source, byte_len: int, seed: int | None) -> Iterator[Block]:
    total = len(source)
    order = _order(total, seed)
    step = reading.block_len(source)
    for first in range(0, total, step):
        keys = order(first, min(step, total - first)).tolist()
        block = source.__getitems__(keys)
        read = byte_len * len(block) / total
        yield block, read, functools.partial(_place_of, source, keys)


def _order(total: int, seed: int | None) -> Callable[[int, int], Any]:
    """Positions from a first one on: as they are, or as `MapDataset.shuffle(seed)` orders them."""
    if seed is None or total == 0:
        return lambda first, count: np.arange(first, first + count, dtype=np.int64)
    if not 0 <= seed < 1 << 32:
        raise ValueError(Message(Argument("seed"), f" must be from 0 to 2**32 - 1, got {seed}"))
    return _native.Permutation(total, seed).block


def _maker(content: str) -> Callable[[Any], Any]:
    """What turns a record into the bytes that are stored, or a row into one that is."""
    if content == "rows":
        return lambda record: record
    if content == "example":
        return lambda record: tf_example.encode(_as_dict(record))
    if content == "json":
        return lambda record: _as_json(
            tf_example.example_as_json(record)
            if isinstance(record, bytes)
            else reading.as_json(record)
        )
    return lambda record: record if isinstance(record, bytes) else _as_json(reading.as_json(record))


def _as_json(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 has not
        return json.dumps(value, separators=(",", ":")).encode()


def _as_dict(record: Any) -> dict[str, Any]:
    return reading.json_object(record) if isinstance(record, bytes) else record
