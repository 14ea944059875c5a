"""Sorts records with their keys within a bounded amount of memory."""

import heapq
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter

Keyed: TypeAlias = tuple[Any, bytes]

# What one record takes besides its bytes, about.
_OVERHEAD = 200


def sorted_records(pairs: Iterable[Keyed], max_bytes: int = 64 << 20) -> Iterator[bytes]:
    """The records of `(key, record)` by key, and by their bytes where keys are equal.

    Those that take more than `max_bytes` are sorted in parts, which are kept on local disk and
    merged.
    """
    with tempfile.TemporaryDirectory(prefix="grainmill-") as folder:
        runs: list[Path] = []
        part: list[Keyed] = []
        num_bytes = 0
        for pair in pairs:
            part.append(pair)
            num_bytes += len(pair[1]) + _OVERHEAD
            if num_bytes > max_bytes:
                runs.append(_written(Path(folder, str(len(runs))), part))
                part, num_bytes = [], 0
        part.sort()
        for _, record in heapq.merge(*map(_read, runs), part):
            yield record


def _written(path: Path, part: list[Keyed]) -> Path:
    part.sort()
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for pair in part:
            writer.write(pickle.dumps(pair, protocol=5))
    return path


def _read(path: Path) -> Iterator[Keyed]:
    with ArrayRecordReader(path) as reader:
        yield from map(pickle.loads, reader)
