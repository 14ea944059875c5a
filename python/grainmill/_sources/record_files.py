"""What sources of record files have in common, whatever their format."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, SupportsIndex, TypeAlias, TypeVar

import numpy as np

from grainmill import _native
from grainmill._sources.paths import FileRange, expand_ranges
from grainmill._sources.suffixes import suffixes_of
from grainmill._url import absolute, identified, shown

try:
    import pwd
except ImportError:  # Windows
    pwd = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._index_file import FileEntry

    Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
    Ranges: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
    Infos: TypeAlias = list[tuple[int, int, int]]

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# The name of a constructor of the engine's `Format`, and its arguments; `None` is ArrayRecord.
FormatOf: TypeAlias = "tuple[str, *tuple[Any, ...]] | None"
Element_co = TypeVar("Element_co", covariant=True)


class RecordFilesSource(Generic[Element_co]):
    """The records of many files, as one sequence.

    Unless elements are `bytes`, a subclass defines `_elements`.

    Args:
        files: The files, each with the range of its records.
        format_of: Their format.
        arguments: What `repr` has to tell apart besides the files.
        entries: The numbers of records of the files, and what identifies these, if known.

    Attributes:
        _yields_records: Whether the elements are the records as the engine reads them.
    """

    _yields_records = True

    def __init__(
        self,
        files: Sequence[FileRange],
        format_of: FormatOf = None,
        arguments: tuple[Any, ...] = (),
        entries: list[FileEntry] | None = None,
    ) -> None:
        self._paths = [file.path for file in files]
        self._format_of = format_of
        ranges = [
            (k, file.skip, file.take) for k, file in enumerate(files) if file.take is not None
        ]
        self._arguments = (*arguments, *ranges)
        self._entries = entries
        # Absolute, as a worker may open them from another directory.
        self._sources = [(absolute(file.path), file.skip, file.take) for file in files]
        self._opened: _native.RecordFiles | None = None
        if entries is None:
            counts = [file.take for file in files]
        else:  # the engine compares them with the files when it opens these
            counts = [
                count if file.take is None else file.take
                for (count, _, _), file in zip(entries, files, strict=True)
            ]
        if any(file.take is not None and not file.is_trusted for file in files):
            # Which checks the ranges.
            self._opened = self._open(is_lazy=entries is not None)
        known = [count for count in counts if count is not None]
        self._len = sum(known) if len(known) == len(counts) else len(self._files)

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
            self._opened = self._open(is_lazy=True)
        return self._opened

    def _open(self, *, is_lazy: bool) -> _native.RecordFiles:
        file_format = None
        if self._format_of is not None:
            name, *arguments = self._format_of
            file_format = getattr(_native.Format, name)(*arguments)
        return _native.RecordFiles(
            self._sources, lazy=is_lazy, file_infos=self._entries, file_format=file_format
        )

    @property
    def paths(self) -> list[str]:
        """The paths of the files, as given or expanded."""
        return list(self._paths)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, record_key: SupportsIndex) -> Element_co:
        key = self._checked(record_key)
        record: Any = self._files.read_one(key)
        element: Element_co = record if self._yields_records else self._elements([record], [key])[0]
        return element

    # Unless a subclass overrides `__getitem__`, pipelines read `_files` in blocks instead.
    _getitem_of_files = __getitem__

    def __getitems__(self, record_keys: Sequence[SupportsIndex]) -> list[Element_co]:
        """Reads many records at once, in the order of their keys.

        Args:
            record_keys: From 0 to `len(self) - 1`, in any order.

        Raises:
            IndexError: A key is out of range; `ArrayRecordDataSource` raises a `ValueError`.
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
        return f"{type(self).__name__}(hash_of_paths={digest_of(self._paths, self._arguments)})"

    def _record_location(self, index: int) -> tuple[str, int]:
        """The file of record `index`, and the record's index in it, for messages."""
        takes = [take for _, _, take in self._sources if take is not None]
        counts = takes if len(takes) == len(self._sources) else self._files.num_records
        for (path, skip, _), count in zip(self._sources, counts, strict=True):
            if index < count:
                return shown(path), skip + index
            index -= count
        raise IndexError("record index is out of range")

    def _checked(self, record_key: SupportsIndex) -> int:
        key = operator.index(record_key)
        if not 0 <= key < self._len:
            raise IndexError(f"record {key} was requested, but the files have {self._len}")
        return key


def digest_of(paths: Sequence[str], arguments: tuple[Any, ...]) -> str:
    """What tells lists of paths, and what is read of them, apart; saved states contain it."""
    # Each path with its length, so that no two lists of paths give the same text.
    identities = [identified(path) for path in paths]
    text = "".join(f"{len(path)}:{path}" for path in identities) + repr(arguments)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:40]


def ranges_of(
    ranges: Sequence[tuple[str, Ranges]], file_infos: Infos | None = None, *, lazy: bool = True
) -> _native.RecordFiles:
    """Ranges of files as records, which the engine reads; a file may be there twice."""
    # The engine knows files by the paths that it shows, which have no secrets.
    known = {shown(path): [(begin, end) for begin, end in each.tolist()] for path, each in ranges}
    files = [(path, 0, len(each)) for path, each in ranges]
    file_format = _native.Format.ranges(known)
    return _native.RecordFiles(files, lazy=lazy, file_infos=file_infos, file_format=file_format)


class ScannedFilesSource(RecordFilesSource[Element_co]):
    """Records that are found by a scan of each file.

    Attributes:
        _format: The name of the format.
        _scan: That of the constructor of the engine's `Format`.
        _more_arguments: Those that `repr` tells apart, besides the compression.
    """

    _format: ClassVar[str]
    _scan: ClassVar[str]
    _more_arguments: tuple[Any, ...] = ()

    def __init__(
        self,
        paths: Paths,
        *,
        compression: str = "auto",
        index_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        files = expand_ranges(paths, suffixes=suffixes_of(self._format))
        format_of = scanned(self._scan, compression, index_dir)
        super().__init__(files, format_of, (*self._more_arguments, compression))


def scanned(
    name: str, compression: str, index_dir: str | os.PathLike[str] | None
) -> tuple[str, str, bool, str | None]:
    """A format whose records are found by a scan, and where the indices are that keep them.

    They are beside the files, or else in the cache directory, unless `index_dir` is given. A user
    without a home has no cache directory.
    """
    if index_dir is not None:
        return name, compression, False, absolute(os.fspath(index_dir))
    for variable in ("GRAINMILL_CACHE_DIR", "XDG_CACHE_HOME"):
        if cache := os.environ.get(variable):
            break
    else:
        home = _home()
        if not os.path.isabs(home):  # noqa: PTH117 - `pathlib` takes long to import
            return name, compression, True, None
        cache = os.path.join(home, ".cache")  # noqa: PTH118 - as above
    return name, compression, True, os.path.join(absolute(cache), "grainmill", "index")  # noqa: PTH118


def _home() -> str:
    """The user's home; nothing if there is none."""
    if os.environ.get("HOME", "not set"):
        return os.path.expanduser("~")  # noqa: PTH111 - `pathlib` takes long to import
    try:  # an empty variable would stand for the root of the file system
        return "" if pwd is None else pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""
