"""Parquet files as a source of rows; `grainmill.sources` has its name."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from grainmill import _native
from grainmill._sources.row_files import RowFilesSource
from grainmill._url import absolute, identified

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

_DEFAULT_CACHE_BYTES = 512 << 20
_INT96_UNITS = ("s", "ms", "us", "ns")


def check_int96_unit(unit: object) -> None:
    """Checks a `coerce_int96_timestamp_unit`."""
    if unit not in (None, *_INT96_UNITS):
        units = ", ".join(map(repr, _INT96_UNITS))
        raise ValueError(f"`coerce_int96_timestamp_unit` must be one of {units}, got {unit!r}")


class ParquetDataSource(RowFilesSource):
    """The rows of Parquet files, as one sequence of dicts from column names to values.

    It can be indexed from 0 to `len(source) - 1`; other positions raise an `IndexError`. Pipelines
    read it in blocks, in the engine. A row costs the pages that hold it, one for each column: pages
    are decoded as a whole and kept, up to `cache_bytes`. Where the file has a page index, that
    lists them; otherwise the headers of the pages are read once. Where the rows are batched at
    once, and consist of numbers or of lists of equally many, batches are filled by column.

    With `shuffle_seed`, position `i` is row `i` of an order that reads close rows together: the row
    groups are shuffled, then rows within windows of `shuffle_window` positions. Each epoch has its
    own order. So each page is decoded about once in an epoch, as long as a window fits into
    `cache_bytes`.

    The values of numeric columns are NumPy scalars; dates, timestamps (in UTC) and durations are
    `datetime64` and `timedelta64`. Strings are `str`, binary values `bytes`, decimals `Decimal`,
    times of day `datetime.time`, whose nanoseconds must be whole microseconds. Lists are
    one-dimensional arrays, of `object` unless their values are numbers without nulls. Structures
    are dicts, and maps lists of pairs. Null is `None`.

    Its pickle contains paths and numbers of rows. Checksums of pages are verified if the file has
    them; damage raises a `GrainmillError` that names the file, the row group and the column.

    Args:
        paths: A path, or a sequence of them. All files must have the same columns.
        columns: The columns to read, in this order; all if `None`. A dotted name such as
            `"image.bytes"` selects a field of a structure.
        cache_bytes: How many bytes of decoded pages to keep, in each process.
        shuffle_seed: Seed of an order that reads close rows together, from 0 to 2**32 - 1; the
            order of the files if `None`.
        shuffle_window: The number of consecutive positions whose rows are shuffled among each
            other, at least 1. A larger one mixes the rows of more row groups, which have to be in
            memory at the same time.
        coerce_int96_timestamp_unit: The unit of timestamps of the old type INT96, as Spark and
            Impala write: `"s"`, `"ms"`, `"us"` or `"ns"`; without, the one that the writer states,
            or `"ns"`. A timestamp that 64 bits of the unit cannot hold is an error: nanoseconds
            hold the years 1677 to 2262.
        max_page_bytes: Pages of up to this length, decompressed, are read whatever their
            compression; longer ones must have at least 1/2048 of it in the file, as data have, and
            at most a gigabyte. Raise it for files whose writers you trust. If `None`, it is what
            `GRAINMILL_MAX_PAGE_BYTES` says in the environment, or 16 MiB.

    Raises:
        ValueError: There is no path or no such column or unit, a number is out of range, or the
            files have different columns.
        FileNotFoundError: There is no such file.
        GrainmillError: A file is damaged, is no Parquet file, or a column is encrypted.

    Example:
        >>> import pyarrow as pa
        >>> import pyarrow.parquet as pq
        >>> table = pa.table({"tokens": [[1, 2], [3, 4], [5, 6]], "url": ["a", "b", None]})
        >>> pq.write_table(table, "texts.parquet")
        >>> source = grain.sources.ParquetDataSource("texts.parquet")
        >>> source[2]
        {'tokens': array([5, 6]), 'url': None}
        >>> tokens = grain.sources.ParquetDataSource("texts.parquet", columns=["tokens"])
        >>> next(iter(grain.MapDataset.source(tokens).batch(3)))
        {'tokens': array([[1, 2],
               [3, 4],
               [5, 6]])}
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = _DEFAULT_CACHE_BYTES,
        shuffle_seed: int | None = None,
        shuffle_window: int = 100_000,
        coerce_int96_timestamp_unit: str | None = None,
        max_page_bytes: int | None = None,
    ) -> None:
        super().__init__(paths, columns, cache_bytes, file_format="parquet")
        # Absolute, as a worker may open them from another directory.
        self._sources: list[tuple[str, int | None]] = [
            (absolute(path), None) for path in self._paths
        ]
        if shuffle_seed is not None and not 0 <= shuffle_seed < 2**32:
            raise ValueError(f"`shuffle_seed` must be in [0, 2**32), got {shuffle_seed}")
        if shuffle_window < 1:
            raise ValueError(f"`shuffle_window` must be at least 1, got {shuffle_window}")
        check_int96_unit(coerce_int96_timestamp_unit)
        if max_page_bytes is not None and not 0 <= max_page_bytes < 2**63:
            raise ValueError(f"`max_page_bytes` must be in [0, 2**63), got {max_page_bytes}")
        self._int96_unit = coerce_int96_timestamp_unit
        self._max_page_bytes = max_page_bytes
        self._cache_bytes = cache_bytes
        self._shuffle_seed = shuffle_seed
        self._shuffle_window = shuffle_window
        self._opened: _native.ParquetFiles | None = None
        self._len = len(self._files)
        self._order: Any = None

    @property
    def _files(self) -> _native.ParquetFiles:
        """The files, opened at first use; the engine reads them in blocks."""
        if self._opened is None:
            self._opened = _native.ParquetFiles(
                self._sources,
                self._columns,
                self._cache_bytes,
                int96_unit=self._int96_unit,
                max_page_bytes=self._max_page_bytes,
            )
        return self._opened

    @property
    def row_group_lens(self) -> list[int]:
        """The number of rows of each row group, of all files in their order."""
        return [count for counts in self._files.row_group_lens() for count in counts]

    @property
    def column_types(self) -> dict[str, str]:
        """The Arrow type of each column."""
        return dict(self._files.column_types())

    def __len__(self) -> int:
        return self._len

    def _in_files(self, keys: Any) -> Any:
        return keys if self._shuffle_seed is None else self._shuffled(keys)

    def _shuffled(self, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Any:
        if self._order is None:
            self._order = _native.Resolver(self._index_tree(("leaf", 0, 0)))
        return self._order.resolve(index)[0][1]

    def _index_tree(self, leaf: tuple[Any, ...]) -> tuple[Any, ...]:
        """The order of the rows, as the engine sees it, over the `leaf` of the files' own order."""
        in_files = ("wrap", self._len, leaf)
        if self._shuffle_seed is None or not self._len:
            return in_files
        groups = ("group_shuffle", self.row_group_lens, self._shuffle_seed, in_files)
        window, seed = self._shuffle_window, self._shuffle_seed
        return ("window_shuffle", self._len, window, seed, groups)

    def __getstate__(self) -> dict[str, object]:
        sources = self._sources
        if self._opened is not None:
            # So that another process opens only the files that it reads.
            counts = self._opened.num_rows
            sources = [(path, count) for (path, _), count in zip(sources, counts, strict=True)]
        return {**self.__dict__, "_opened": None, "_order": None, "_sources": sources}

    def __repr__(self) -> str:
        # Saved states contain this text, so it must not change.
        paths = "\0".join([identified(path) for path in self._paths])
        digest = hashlib.sha1(paths.encode(), usedforsecurity=False)
        arguments = [f"hash_of_paths={digest.hexdigest()}"]
        if self._columns is not None:
            arguments.append(f"columns={self._columns!r}")
        if self._shuffle_seed is not None:
            seed, window = self._shuffle_seed, self._shuffle_window
            arguments += [f"shuffle_seed={seed}", f"shuffle_window={window}"]
        if self._int96_unit is not None:
            arguments.append(f"coerce_int96_timestamp_unit={self._int96_unit!r}")
        return f"ParquetDataSource({', '.join(arguments)})"

    def _record_location(self, index: int) -> tuple[str, int]:
        """The file of row `index`, and the row's number in it, for messages."""
        if self._shuffle_seed is not None and 0 <= index < self._len:
            index = int(self._shuffled(np.array([index]))[0])
        location = self._files.locate(index)
        if location is None:
            raise IndexError("row index is out of range")
        return location
