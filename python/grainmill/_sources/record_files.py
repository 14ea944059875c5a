"""What sources of record files have in common, whatever their format."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, TypeAlias, TypeVar

import numpy as np

from grainmill import _native
from grainmill._sources.paths import absolute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Element_co = TypeVar("Element_co", covariant=True)


class RecordFilesSource(Generic[Element_co]):
    """The records of many files, as one sequence.

    A subclass defines `_format` and, unless elements are `bytes`, `_elements`.

    Attributes:
        _yields_records: Whether the elements are the records as the engine reads them.
    """

    _yields_records = True

    def __init__(self, paths: Sequence[str], arguments: tuple[Any, ...]) -> None:
        self._paths = list(paths)
        self._arguments = arguments
        # Absolute, as a worker may open them from another directory.
        self._sources: list[tuple[str, int, int | None]] = [
            (absolute(path), 0, None) for path in paths
        ]
        self._opened: _native.RecordFiles | None = None
        self._len = len(self._files)

    def _format(self) -> _native.Format:
        raise NotImplementedError

    @property
    def _numbers_of(self) -> Callable[[Indices], Indices] | None:
        """Maps the indices of elements to the numbers of records, where these differ."""
        return None

    def _elements(self, records: list[bytes], keys: Sequence[int]) -> list[Any]:  # noqa: ARG002 - subclasses use them
        """The elements of `records`, which are at `keys`."""
        return records

    @property
    def _files(self) -> _native.RecordFiles:
        """The files, opened at first use; the engine reads them in blocks."""
        if self._opened is None:
            is_counted = all(count is not None for _, _, count in self._sources)
            self._opened = _native.RecordFiles(
                self._sources, lazy=is_counted, file_format=self._format()
            )
        return self._opened

    @property
    def paths(self) -> list[str]:
        """The paths of the files, as given."""
        return list(self._paths)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, record_key: SupportsIndex) -> Element_co:
        key = self._checked(record_key)
        element: Element_co = self._elements([self._files.read_one(key)], [key])[0]
        return element

    # Unless a subclass overrides `__getitem__`, pipelines read `_files` in blocks instead.
    _getitem_of_files = __getitem__

    def __getitems__(self, record_keys: Sequence[SupportsIndex]) -> list[Element_co]:
        """Reads many records at once, in the order of their keys.

        Args:
            record_keys: From 0 to `len(self) - 1`, in any order.

        Raises:
            IndexError: A key is out of range.
        """
        keys = [self._checked(key) for key in record_keys]
        if not keys:
            return []
        return self._elements(self._files.read(np.array(keys, dtype=np.int64)), keys)

    def __iter__(self) -> Iterator[Element_co]:
        for index in range(len(self)):
            yield self[index]

    def __getstate__(self) -> dict[str, object]:
        sources = self._sources
        if self._opened is not None:
            # So that another process opens only the files that it reads.
            counts = self._opened.num_records
            sources = [
                (path, skip, count) for (path, skip, _), count in zip(sources, counts, strict=True)
            ]
        return {**self.__dict__, "_opened": None, "_sources": sources}

    def __repr__(self) -> str:
        """Saved states contain this text, so it must not change."""
        # Each path with its length, so that no two lists of paths give the same text.
        text = "".join(f"{len(path)}:{path}" for path in self._paths) + repr(self._arguments)
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:40]
        return f"{type(self).__name__}(hash_of_paths={digest})"

    def _record_location(self, index: int) -> tuple[str, int]:
        """The file of record `index`, and the record's index in it, for messages."""
        for (path, _, _), count in zip(self._sources, self._files.num_records, strict=True):
            if index < count:
                return path, index
            index -= count
        raise IndexError("record index is out of range")

    def _checked(self, record_key: SupportsIndex) -> int:
        key = operator.index(record_key)
        if not 0 <= key < self._len:
            raise IndexError(f"record {key} was requested, but the files have {self._len}")
        return key


def index_places(index_dir: str | os.PathLike[str] | None) -> tuple[bool, str]:
    """Whether indices are beside the files, and the directory of those that are not."""
    if index_dir is not None:
        return False, absolute(os.fspath(index_dir))
    return True, str(Path(_cache_dir()) / "grainmill" / "index")


def _cache_dir() -> str:
    variables: Iterable[str] = ("GRAINMILL_CACHE_DIR", "XDG_CACHE_HOME")
    for variable in variables:
        if path := os.environ.get(variable):
            return absolute(path)
    return str(Path("~/.cache").expanduser())
