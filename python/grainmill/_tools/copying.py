"""Copies records from open inputs to an output, some at a time: in the engine wherever it can."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill import _native
from grainmill._tools import reading, tf_example
from grainmill._tools.cat import plain
from grainmill._tools.console import CommandError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from grainmill._tools.formats import Format, Source


class Copying(contextlib.AbstractContextManager["Copying"]):
    """The next records of some inputs."""

    def copy_to(
        self, output: _native.RecordOutput, max_records: int, threads: int
    ) -> tuple[int, float]:
        """Copies some of the next records.

        Returns:
            How many records, 0 at the end; and how many bytes of the inputs that are, about.
        """
        raise NotImplementedError

    def skip(self, count: int) -> None:
        """Skips records."""
        raise NotImplementedError

    def __exit__(self, *error: object) -> None:
        return None


class InOrder(Copying):
    """Files that are read from start to end by the engine."""

    def __init__(self, paths: Sequence[str], found: Sequence[Format]) -> None:
        self._waiting = iter(list(zip(paths, found, strict=True)))
        self._stream: _native.RecordStream | None = None
        self._path = ""

    def copy_to(
        self, output: _native.RecordOutput, max_records: int, threads: int
    ) -> tuple[int, float]:
        while (stream := self._opened()) is not None:
            before = stream.offset
            count = output.copy_stream(stream, max_records, threads)
            if count:
                is_plain = stream.compression is None
                return count, float(stream.offset - before) if is_plain else 0.0
            self._stream = None
        return 0, 0.0

    def skip(self, count: int) -> None:
        while count and (stream := self._opened()) is not None:
            skipped = stream.skip(count)
            if not skipped:
                self._stream = None
            count -= skipped

    def _opened(self) -> _native.RecordStream | None:
        if self._stream is None:
            path, found = next(self._waiting, ("", None))
            if found is not None:
                self._stream = _native.RecordStream(path, found.name)
        return self._stream


class Indexed(Copying):
    """Files that the engine reads by position, in the order of a seed if there is one."""

    def __init__(self, files: _native.RecordFiles, byte_len: int, seed: int | None) -> None:
        self._files = files
        self._next = 0
        self._total = len(files)
        self._bytes_each = byte_len / max(self._total, 1)
        self._order = _order(self._total, seed)

    def copy_to(
        self, output: _native.RecordOutput, max_records: int, threads: int
    ) -> tuple[int, float]:
        count = min(max_records, self._total - self._next)
        if count <= 0:
            return 0, 0.0
        output.copy_indexed(self._files, self._order(self._next, count), threads)
        self._next += count
        return count, count * self._bytes_each

    def skip(self, count: int) -> None:
        self._next += count


class Objects(Copying):
    """Records that Python has to touch: rows of tables, and contents that are converted."""

    def __init__(
        self,
        blocks: Callable[[], Iterator[Sequence[Any]]],
        make: Callable[[Any], Any],
        name: str,
    ) -> None:
        self._records = enumerate(itertools.chain.from_iterable(blocks()))
        self._make = make
        self._name = name

    def copy_to(
        self, output: _native.RecordOutput, max_records: int, threads: int
    ) -> tuple[int, float]:
        made = []
        byte_len = 0
        for number, record in itertools.islice(self._records, min(max_records, 4096)):
            try:
                made.append(self._make(record))
            except (ValueError, RecursionError) as error:
                text = f"{self._name}: record {number}: {error}"
                raise CommandError(text, ExitCode.DAMAGED) from error
            byte_len += reading.byte_len(made[-1])
            if byte_len > 16 << 20:  # some large ones at a time
                break
        if made:
            output.copy_list(made, threads)
        return len(made), float(byte_len)

    def skip(self, count: int) -> None:
        next(itertools.islice(self._records, count, count), None)


def opened(
    paths: Sequence[str], found: Sequence[Format], *, seed: int | None, content: str
) -> Copying:
    """The records of files in their order, or in that of a seed."""
    in_order = all(each.in_order for each in found)
    if in_order and seed is None:
        if content == "same":
            return InOrder(paths, found)
        pairs = list(zip(paths, found, strict=True))
        return Objects(lambda: _stream_blocks(pairs), _maker(content), paths[0])
    if len({each.name for each in found}) > 1:
        raise CommandError("inputs of several formats can be converted one by one only")
    source = found[0].open(paths)
    files = reading.files_of(source)
    if files is not None and content == "same" and not found[0].rows:
        return Indexed(files, sum(map(reading.local_byte_len, paths)), seed)
    return Objects(lambda: _blocks(source, seed), _maker(content), paths[0])


def total_of(paths: Sequence[str], found: Sequence[Format]) -> int:
    """The number of records of all files."""
    return sum(reading.count(path, each) for path, each in zip(paths, found, strict=True))


def _stream_blocks(pairs: list[tuple[str, Format]]) -> Iterator[list[bytes]]:
    for path, found in pairs:
        stream = _native.RecordStream(path, found.name)
        while block := stream.read(1 << 12):
            yield block


def _blocks(source: Source, seed: int | None) -> Iterator[list[Any]]:
    order = _order(len(source), seed)
    step = reading.block_len(source)
    for first in range(0, len(source), step):
        yield source.__getitems__(order(first, min(step, len(source) - first)).tolist())


def _order(total: int, seed: int | None) -> Callable[[int, int], Any]:
    """Positions from a first one on: as they are, or as `MapDataset.shuffle(seed)` orders them."""
    if seed is None or total == 0:
        return lambda first, count: np.arange(first, first + count, dtype=np.int64)
    if not 0 <= seed < 1 << 32:
        raise CommandError(f"--seed must be from 0 to 2**32 - 1, got {seed}")
    return _native.Permutation(total, seed).block


def _maker(content: str) -> Callable[[Any], Any]:
    """What turns a record into the bytes that are stored, or a row into one that is."""
    if content == "rows":
        return lambda record: record
    if content == "example":
        return lambda record: tf_example.encode(_as_dict(record))
    if content == "json":
        return lambda record: _as_json(
            tf_example.as_json(record) if isinstance(record, bytes) else plain(record)
        )
    return lambda record: record if isinstance(record, bytes) else _as_json(plain(record))


def _as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _as_dict(record: Any) -> dict[str, Any]:
    return reading.json_object(record) if isinstance(record, bytes) else record
