"""Parquet files as a sequential dataset; `grainmill.experimental` has its name."""

from __future__ import annotations

import functools
import itertools
import operator
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from grainmill._dataset.iter_dataset import IterDataset
from grainmill._dataset.iterator import DatasetIterator
from grainmill._dataset.map_dataset import MapDataset
from grainmill._native import ParquetFiles
from grainmill._sources.parquet import check_int96_unit
from grainmill._sources.paths import expand, shown
from grainmill._sources.suffixes import suffixes_of
from grainmill._stages import InterleaveIterDataset
from grainmill._url import absolute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from grainmill._native import RowsAhead

_CYCLE_LENGTH: Final = 16
_CACHE_BYTES: Final = 64 << 20
# Rows are converted in blocks of about this many bytes.
_BLOCK_BYTES: Final = 1 << 20
_MAX_BLOCK_LEN: Final = 4096
# How many of them are read ahead at most where storage is slow.
_BLOCKS_AHEAD: Final = 64
# Arguments of `pyarrow.parquet.ParquetFile` that change how a file is read, not what is read.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "buffer_size",
        "memory_map",
        "page_checksum_verification",
        "pre_buffer",
        "thrift_container_size_limit",
        "thrift_string_size_limit",
    }
)


class ParquetIterDataset(IterDataset[dict[str, Any]]):
    """The rows of Parquet files, one after another, as dicts from column names to values.

    Values are those that Grain gives: NumPy scalars for numbers and times, `str`, `bytes`, arrays
    for lists, dicts for structures, in which timestamps are `datetime`s, aware of the zone if they
    have one. In a row group where an integer column has nulls, its values
    are floats and the nulls NaN; `grain.sources.ParquetDataSource` keeps integers and has random
    access. Rows are converted in blocks, so the size of row groups does not matter. Several files
    are interleaved, up to 16 at a time.

    Args:
        path: A path, or several, as for `expand_paths`: patterns, directories and URLs are expanded
            when the dataset is made. An empty list has no rows.
        **read_kwargs: Arguments of `pyarrow.parquet.ParquetFile`, which is not used:
            `coerce_int96_timestamp_unit` is the unit of timestamps of the type INT96, `"ns"` unless
            stated; those that only say how to read have no effect, others are refused. Besides,
            `columns` selects columns, and `max_page_bytes` is that of
            `grain.sources.ParquetDataSource`.

    Raises:
        TypeError: An argument is unknown.
        ValueError: An argument has a value that is not supported.
        FileNotFoundError: No file matches a pattern, or is in a directory. When iterated: there is
            no such file.

    Example:
        >>> import pyarrow as pa
        >>> import pyarrow.parquet as pq
        >>> pq.write_table(pa.table({"x": [1.5, 2.5], "y": ["a", "b"]}), "rows.parquet")
        >>> for row in grain.experimental.ParquetIterDataset("rows.parquet"):
        ...     print(float(row["x"]), row["y"])
        1.5 a
        2.5 b
    """

    def __init__(
        self, path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], **read_kwargs: Any
    ) -> None:
        super().__init__()
        _check(read_kwargs)
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        self._paths = expand(paths, suffixes=suffixes_of("parquet")) if paths else []
        self._read_kwargs = read_kwargs

    def __iter__(self) -> DatasetIterator[dict[str, Any]]:
        if len(self._paths) == 1:
            return ParquetDatasetIterator(self._paths[0], **self._read_kwargs)
        files = MapDataset.source(self._paths).map(self._of_file)
        return InterleaveIterDataset(files, cycle_length=_CYCLE_LENGTH).__iter__()

    def _of_file(self, path: str) -> ParquetIterDataset:
        """One of the files; its path is not expanded again, as it may look like a pattern."""
        dataset = ParquetIterDataset((), **self._read_kwargs)
        dataset._paths = [path]
        return dataset

    def set_slice(
        self,
        sl: slice,
        sequential_slice: bool = False,  # noqa: ARG002, FBT001, FBT002 - as programs call it
    ) -> None:
        """Restricts it, in place, to some of its files; a second call restricts it further.

        Args:
            sl: The slice of the paths, such as `slice(shard_index, None, shard_count)`.
            sequential_slice: Has no effect: files are dealt out one by one in any case.
        """
        self._paths = self._paths[sl]

    def __str__(self) -> str:
        return f"ParquetIterDataset(paths={len(self._paths)})"

    def __repr__(self) -> str:
        arguments = [f"{name}={value!r}" for name, value in self._read_kwargs.items()]
        return f"{type(self).__name__}({', '.join([shown(self._paths), *arguments])})"


class ParquetDatasetIterator(DatasetIterator[dict[str, Any]]):
    """Reads the rows of one file in order.

    Args:
        path: The path of the file.
        **read_kwargs: See `ParquetIterDataset`.
    """

    def __init__(self, path: str | os.PathLike[str], **read_kwargs: Any) -> None:
        super().__init__()
        _check(read_kwargs)
        self._files = ParquetFiles(
            [(absolute(os.fspath(path)), None)],
            read_kwargs.get("columns"),
            _CACHE_BYTES,
            int96_unit=read_kwargs.get("coerce_int96_timestamp_unit") or "ns",
            max_page_bytes=read_kwargs.get("max_page_bytes"),
        )
        self._lens = self._files.row_group_lens()[0]
        self._starts = [0, *itertools.accumulate(self._lens)]
        row_byte_len = max(1.0, self._files.mean_byte_len)
        self._block_len = max(1, min(_MAX_BLOCK_LEN, int(_BLOCK_BYTES / row_byte_len)))
        self._row_group = 0
        self._index = 0
        # The rows of a row group from some index on.
        self._block: list[dict[str, Any]] = []
        self._block_start = 0
        # What reads the rows before a row of the file, where storage is slow.
        self._ahead: deque[tuple[int, RowsAhead]] = deque()
        self._ahead_until = 0

    def __next__(self) -> dict[str, Any]:
        at = self._index - self._block_start
        if at >= len(self._block):
            if not self._read_block():
                raise StopIteration
            at = 0
        row = self._block[at]
        self._index += 1
        return row

    def _next_block(
        self, limit: int
    ) -> tuple[list[dict[str, Any]], Callable[[int], dict[str, Any]]]:
        """Up to `limit` rows, and the state after any number of them; no rows at the end."""
        rows: list[dict[str, Any]] = []
        if self._index - self._block_start < len(self._block) or self._read_block():
            at = self._index - self._block_start
            rows = self._block[at : at + limit]
            self._index += len(rows)
        return rows, functools.partial(_state, self._row_group, self._index - len(rows))

    def _read_block(self) -> bool:
        """Reads the rows from the next one on; returns whether there are any."""
        group, index = self._row_group, self._index
        while group < len(self._lens) and index >= self._lens[group]:
            group, index = group + 1, 0
        if group >= len(self._lens):
            return False
        start, length = self._starts[group], self._lens[group]
        count = min(self._block_len, length - index)
        if self._files.is_slow:
            self._read_ahead(start + index, count)
        self._block = self._files.read_like_pandas(start, length, start + index, count)
        self._row_group, self._index, self._block_start = group, index, index
        return True

    def _read_ahead(self, row: int, count: int) -> None:
        """Starts to read `count` rows from `row` on, and more as far as memory allows."""
        while self._ahead and self._ahead[0][0] <= row:
            self._ahead.popleft()
        if not self._ahead:
            self._ahead_until = row
        while self._ahead_until < self._starts[-1]:
            until = self._ahead_until
            if until >= row + count and not self._files.has_room_beyond:
                return
            stop = min(until + self._block_len, self._starts[-1])
            if stop > row + _BLOCKS_AHEAD * self._block_len:
                return
            self._ahead.append((stop, self._files.start(np.arange(until, stop, dtype=np.int64))))
            self._ahead_until = stop

    def get_state(self) -> dict[str, Any]:
        """Returns the row group, and the index in it of the next row."""
        return _state(self._row_group, self._index, 0)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a row.

        Args:
            state: What `get_state` returned.

        Raises:
            ValueError: The file has no such row group.
        """
        group = operator.index(state["row_group"])
        index = operator.index(state["index_within_row_group"])
        is_start = (group, index) == (0, 0)
        if index < 0 or not (0 <= group < len(self._lens) or is_start):
            raise ValueError(
                f"state was saved in row group {group}, at index {index}, but the file has "
                f"{len(self._lens)} row groups; restore needs the same file"
            )
        self._row_group, self._index = group, index
        self._block, self._block_start = [], index
        self._ahead.clear()


def _state(row_group: int, index: int, num_rows: int) -> dict[str, Any]:
    """The state `num_rows` after a row."""
    return {"row_group": row_group, "index_within_row_group": index + num_rows}


def _check(read_kwargs: dict[str, Any]) -> None:
    for name, value in read_kwargs.items():
        if name == "columns" and isinstance(value, str):
            raise ValueError(f"`columns` must be a sequence of names, got {value!r}")
        if name in _WITHOUT_EFFECT or name in {"columns", "max_page_bytes"}:
            continue
        if name == "coerce_int96_timestamp_unit":
            check_int96_unit(value)
            continue
        if name == "filesystem":
            if value is not None and not type(value).__name__.startswith("Local"):
                raise ValueError(
                    f"`filesystem` must be None or a local one, got {type(value).__name__}"
                )
            continue
        if name in {"decryption_properties", "read_dictionary"} or (
            name in {"common_metadata", "metadata", "arrow_extensions_enabled"}
        ):
            if value is not None:
                raise ValueError(f"`{name}` is not supported, got {value!r}")
            continue
        raise TypeError(f"ParquetFile.__init__() got an unexpected keyword argument '{name}'")
