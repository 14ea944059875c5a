"""What sources of rows of files with columns have in common."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from grainmill._sources.paths import expand
from grainmill._sources.suffixes import suffixes_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence


class RowFilesSource:
    """The rows of files, as one sequence of dicts; a subclass opens `_files`."""

    # What the engine reads rows of, in blocks.
    _files: Any

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        columns: Sequence[str] | None,
        cache_bytes: int,
        *,
        file_format: str,
    ) -> None:
        self._paths = expand(paths, suffixes=suffixes_of(file_format))
        if isinstance(columns, str):
            raise ValueError(f"`columns` must be a sequence of names, got {columns!r}")
        self._columns = None if columns is None else [str(name) for name in columns]
        if self._columns == []:
            raise ValueError("`columns` must name at least one column, got none")
        if cache_bytes < 0:
            raise ValueError(f"`cache_bytes` must be at least 0, got {cache_bytes}")

    @property
    def paths(self) -> list[str]:
        """The paths of the files, as given."""
        return list(self._paths)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, record_key: SupportsIndex) -> dict[str, Any]:
        return self.__getitems__([record_key])[0]

    # Unless a subclass overrides `__getitem__`, pipelines read `_files` in blocks instead.
    _getitem_of_rows = __getitem__

    def __getitems__(self, record_keys: Sequence[SupportsIndex]) -> list[dict[str, Any]]:
        """Reads many rows at once, in the order of their keys.

        Args:
            record_keys: From 0 to `len(self) - 1`, in any order.

        Raises:
            IndexError: A key is out of range.
        """
        keys, count = [operator.index(key) for key in record_keys], len(self)
        for key in keys:
            if not 0 <= key < count:
                raise IndexError(f"row {key} is out of range for {count} rows")
        if not keys:
            return []
        rows: list[dict[str, Any]] = self._files.read(self._in_files(np.array(keys, np.int64)))
        return rows

    def _in_files(self, keys: Any) -> Any:
        """Where the rows at `keys` are in the files."""
        return keys

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self)):
            yield self[index]
