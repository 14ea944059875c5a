"""Arrow IPC files and streams as a source of rows; `grainmill.sources` has its name.

`pyarrow` reads record batches and takes rows of them, the engine makes values of these as of
Parquet files. Local files are mapped into memory, so that a row of a batch that is not compressed
costs its own pages; other batches are read and decoded as a whole, and kept.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from grainmill import _native
from grainmill._interrupts import raise_interrupt
from grainmill._native import GrainmillError
from grainmill._sources.arrow_index import ArrowIndex, index_of
from grainmill._sources.arrow_values import (
    check_rows,
    check_type,
    columns_of,
    dense,
    selected,
    type_without_views,
    without_views,
)
from grainmill._sources.mapped_table import MappedTable, num_faults
from grainmill._sources.record_files import digest_of, ranges_of
from grainmill._sources.row_files import RowFilesSource
from grainmill._url import absolute, is_url, shown

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from grainmill._native import PendingRead, ReadQueue
    from grainmill._sources.record_files import Infos, Ranges

_DEFAULT_CACHE_BYTES: Final = 512 << 20
# What a batch costs whose values stay in the file.
_MAPPED_COST: Final = 4 << 10
# How many objects are opened at once: some of each, 128 KiB, is held until its index is found.
_SIDE_BY_SIDE: Final = 256
# What `pyarrow` raises for damage.
_FAILURES: Final = (
    *(ArithmeticError, LookupError, MemoryError, NotImplementedError, OSError, TypeError),
    *(ValueError, GrainmillError),
)


class ArrowDataSource(RowFilesSource):
    """The rows of Arrow IPC files and streams, as one sequence of dicts of columns.

    Feather files (of version 2), what `pyarrow.ipc.new_file` and `new_stream` write, and the files
    of Hugging Face data sets, without the package `datasets`. It needs `pyarrow`
    (`pip install 'grainmill[parquet]'`). It can be indexed from 0 to `len(source) - 1`.

    Local files are mapped into memory. Where batches are not compressed, a row costs the pages that
    hold it; compressed batches, by LZ4 or Zstandard, and those in buckets, are read and decoded as
    a whole and kept, up to `cache_bytes`. Of a stream, which has no index, the headers of all
    batches are read once, one after the other; in a bucket, that reads the stream as a whole, many
    requests at a time, unless batches have more than 4 MiB.

    Values are those of `ParquetDataSource`: NumPy scalars, `datetime64`, `str`, `bytes`, arrays for
    lists, dicts for structures, `None` for null. Values of dictionaries are what they stand for.
    Where the rows are batched at once, and consist of numbers or of lists of equally many, batches
    are filled by column.

    Its pickle contains paths and where batches are. The files have no checksums: what contradicts
    itself raises a `GrainmillError`, changed values are not noticed.

    Args:
        paths: A path, or a sequence of them, as for `expand_paths`. All files must have the same
            columns.
        columns: The columns to read, in this order; all if `None`. A dotted name such as
            `"image.bytes"` selects a field of a structure.
        cache_bytes: How many bytes of decoded batches to keep, in each process.

    Raises:
        ImportError: `pyarrow` is not installed.
        ValueError: There is no path or no such column, or files have different columns.
        FileNotFoundError: There is no such file.
        NotImplementedError: A column has values that are not read, as unions.
        GrainmillError: A file is damaged, or no Arrow file, as a Feather file of version 1.

    Example:
        >>> import pyarrow as pa
        >>> from pyarrow import feather
        >>> table = pa.table({"tokens": [[1, 2], [3, 4], [5, 6]], "url": ["a", "b", None]})
        >>> feather.write_feather(table, "texts.feather")
        >>> source = grain.sources.ArrowDataSource("texts.feather")
        >>> source[2]
        {'tokens': array([5, 6]), 'url': None}
        >>> tokens = grain.sources.ArrowDataSource("texts.feather", columns=["tokens"])
        >>> next(iter(grain.MapDataset.source(tokens).batch(3)))
        {'tokens': array([[1, 2],
               [3, 4],
               [5, 6]])}
    """

    _files: ArrowFiles

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        cache_bytes: int = _DEFAULT_CACHE_BYTES,
    ) -> None:
        super().__init__(paths, columns, cache_bytes, file_format="arrow")
        self._files = ArrowFiles(self._paths, self._columns, cache_bytes)

    @property
    def batch_lens(self) -> list[int]:
        """The number of rows of each record batch, of all files in their order."""
        lens: list[int] = np.diff(self._files.starts).tolist()
        return lens

    @property
    def codecs(self) -> list[str]:
        """What compresses the batches of any file: `lz4` or `zstd`."""
        return self._files.codecs

    @property
    def column_types(self) -> dict[str, str]:
        """The Arrow type of each column."""
        return {field.name: str(field.type) for field in self._files.schema}

    def _index_tree(self, leaf: tuple[Any, ...]) -> tuple[Any, ...]:
        """The order of the rows, as the engine sees it."""
        return ("wrap", len(self), leaf)

    def __repr__(self) -> str:
        # Saved states contain this text, so it must not change.
        columns = "" if self._columns is None else f", columns={self._columns!r}"
        return f"ArrowDataSource(hash_of_paths={digest_of(self._paths, ())}{columns})"

    def _record_location(self, index: int) -> tuple[str, int]:
        """The file of row `index`, and the row's number in it, for messages."""
        return self._files.locate(index)


class _Mapped:
    """The bytes of a local file, mapped into memory."""

    def __init__(self, path: str, pyarrow: Any) -> None:
        self._bytes = pyarrow.py_buffer(b"")
        if len(_native.FileBytes(path)):
            with pyarrow.memory_map(path) as mapped:  # what is mapped stays so when it is closed
                self._bytes = mapped.read_buffer()

    def __len__(self) -> int:
        return int(self._bytes.size)

    def read(self, ranges: Sequence[Sequence[int]]) -> Sequence[Any]:
        return [self._bytes.slice(begin, max(0, end - begin)) for begin, end in ranges]


def _indices(paths: Sequence[str]) -> Iterator[tuple[str, ArrowIndex]]:
    """What is where in each file; of objects in buckets, it is found side by side."""
    far = list(dict.fromkeys(path for path in paths if is_url(path)))
    found: dict[str, ArrowIndex] = {}
    for begin in range(0, len(far), _SIDE_BY_SIDE):
        found |= _indices_of_far(far[begin : begin + _SIDE_BY_SIDE])
    for path in paths:
        yield path, found[path] if path in found else _index_of_local(path)


def _indices_of_far(paths: list[str]) -> dict[str, ArrowIndex]:
    files = dict(zip(paths, _native.FileBytes.open_all(paths), strict=True))

    def read(asked: list[tuple[str, Sequence[Sequence[int]]]]) -> list[Sequence[bytes]]:
        owners = [files[path] for path, ranges in asked for _ in ranges]
        ranges = [each for _, ranges in asked for each in ranges]
        data = iter(_native.FileBytes.read_all(owners, ranges))
        return [list(itertools.islice(data, len(ranges))) for _, ranges in asked]

    return _found_by_reading({path: len(file) for path, file in files.items()}, read)


def _index_of_local(path: str) -> ArrowIndex:
    mapped = _Mapped(path, _pyarrow())
    lens = {path: len(mapped)}
    return _found_by_reading(lens, lambda asked: [mapped.read(each) for _, each in asked])[path]


def _found_by_reading(
    lens: dict[str, int],
    read: Callable[[list[tuple[str, Sequence[Sequence[int]]]]], Sequence[Sequence[Any]]],
) -> dict[str, ArrowIndex]:
    """What is where in files of these lengths, which are asked for what they need in turn."""
    asking = {path: index_of(shown(path), byte_len) for path, byte_len in lens.items()}
    asked = {path: next(each) for path, each in asking.items()}
    found = {}
    while asked:
        files = list(asked.items())
        for (path, _), data in zip(files, read(files), strict=True):
            try:
                asked[path] = asking[path].send(data)
            except StopIteration as end:
                found[path] = end.value
                del asked[path]
    return found


@dataclasses.dataclass(frozen=True)
class _File:
    """One file: its path, and what is where in it."""

    path: str
    index: ArrowIndex

    @property
    def is_far(self) -> bool:
        return is_url(self.path)

    def check_length(self, byte_len: int) -> None:
        """Raises `GrainmillError` if the file had another length when it was indexed."""
        if byte_len != self.index.byte_len:
            raise GrainmillError(
                f"{shown(self.path)}: the file has changed: it had {self.index.byte_len} bytes, "
                f"and now has {byte_len}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether its batches are values in memory."""
        return not self.is_far and self.index.codec is None and not len(self.index.dictionaries)


class _Batch(NamedTuple):
    """A record batch: the columns that are read, and the bytes that it takes."""

    columns: list[Any]
    byte_len: int
    mapped: MappedTable | None


class _Flight:
    """Batches that the engine is reading, for all who wait for them."""

    def __init__(self, files: ArrowFiles, numbers: list[int], pending: PendingRead) -> None:
        self._files = files
        self._numbers = numbers
        self._pending = pending
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] | None = None

    def batches(self) -> dict[int, _Batch]:
        """The batches by their numbers, once they are there."""
        with self._lock:
            if self._batches is None:
                read = zip(self._numbers, self._pending.finish(), strict=True)
                self._batches = {k: self._files.decoded(k, data) for k, data in read}
            return self._batches


class _Ahead:
    """Rows that are being read; it holds their batches. See `RowsAhead`."""

    def __init__(self, held: list[Any], waits: list[Callable[[], object]]) -> None:
        self._held = held
        self._waits = waits

    def wait(self) -> None:
        """Waits for what is being read; reading the rows finds what fails."""
        for wait in self._waits:
            try:
                wait()
            except Exception as failure:
                raise_interrupt(failure)


class ArrowFiles:
    """The rows of files, as `RowSource` reads them; those of Parquet files are `ParquetFiles`.

    Args:
        paths: The files.
        names: The columns to read.
        cache_bytes: How many bytes of decoded batches to keep.

    Attributes:
        schema: The columns that are read.
        starts: The first row of each batch, and the number of rows.
        codecs: What compresses the batches of any file.
    """

    has_room = True
    has_room_beyond = False
    _records: _native.RecordFiles | None

    def __init__(self, paths: Sequence[str], names: list[str] | None, cache_bytes: int) -> None:
        pyarrow = _pyarrow()
        self._names = names
        self._cache_bytes = cache_bytes
        self._files: list[_File] = []
        self.schema: Any = None
        # Absolute, as a worker may open them from another directory.
        for path, index in _indices([absolute(path) for path in paths]):
            name = shown(path)
            try:
                whole = pyarrow.ipc.read_schema(pyarrow.py_buffer(index.schema))
            except _FAILURES as failure:
                raise_interrupt(failure)
                raise GrainmillError(f"{name}: schema: {failure}") from None
            schema = _read_schema(pyarrow, whole, names, name)
            if self.schema is None:
                self._whole, self.schema = whole, schema
            elif not whole.equals(self._whole):
                raise ValueError(
                    f"{name}: has the columns {_listed(whole)}, expected {_listed(self._whole)}"
                )
            self._files.append(_File(path, index))
        self._columns = columns_of(self._whole, names)
        # What files in buckets are now, so that another version is noticed, in workers, too.
        self._infos: Infos | None = None
        self._start()
        if self._is_far:
            self._records = self._opened_records(lazy=False)
            self._infos = self._records.file_infos()

    def _start(self) -> None:
        counts = np.concatenate([np.diff(file.index.starts) for file in self._files])
        self.starts = np.cumsum(np.append(0, counts))
        # The number of the first batch of each file, and of batches.
        self._firsts = np.cumsum([0, *(len(file.index.batches) for file in self._files)])
        self._lock = threading.Lock()
        self._mapped: dict[int, _Mapped] = {}
        self._records = None
        self._kept: OrderedDict[int, _Batch] = OrderedDict()
        self._kept_bytes = 0
        self._flights: weakref.WeakValueDictionary[int, _Flight] = weakref.WeakValueDictionary()
        # Of a block, which shows whether rows of mapped files wait for storage.
        self._mapped_is_slow = False
        kinds = (self._whole.field(column.number).type for column in self._columns)
        self._has_views = any(type_without_views(kind) != kind for kind in kinds)
        self._is_far = any(file.is_far for file in self._files)

    def __getstate__(self) -> dict[str, Any]:
        names = ("_names", "_cache_bytes", "_files", "_whole", "schema", "_columns", "_infos")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def codecs(self) -> list[str]:
        """What compresses the batches."""
        return sorted({file.index.codec for file in self._files if file.index.codec})

    @property
    def mean_byte_len(self) -> float:
        """The bytes of a row in memory, about."""
        with self._lock:
            known = next(reversed(self._kept.values()), None) if self._kept else None
        if known is not None and known.columns and len(known.columns[0]):
            return known.byte_len / len(known.columns[0])
        return sum(file.index.byte_len for file in self._files) / max(1, len(self))

    @property
    def is_slow(self) -> bool:
        """Whether rows should be requested ahead of their use."""
        return self._is_far or self._mapped_is_slow

    def read_totals(self) -> tuple[int, int, int, float]:
        """The engine's reads so far; mapped pages are read by the system."""
        return self._all_records.read_totals() if self._is_far else (0, 0, 0, 0.0)

    def locate(self, row: int) -> tuple[str, int]:
        """The file of a row, and its number there."""
        number = int(np.searchsorted(self.starts, row, "right")) - 1
        if not 0 <= row < len(self):
            raise IndexError("row index is out of range")
        place = self._place(number)
        return shown(self._files[place].path), row - int(self.starts[self._firsts[place]])

    def start(self, request: Ranges, queue: ReadQueue | None = None) -> _Ahead:
        """Starts to read the batches that have these rows, or requests the pages of mapped ones."""
        numbers = np.searchsorted(self.starts, request, "right") - 1
        held: list[Any] = []
        waits: list[Callable[[], object]] = []
        missing = []
        for number in np.unique(numbers).tolist():
            if self._stays_mapped(self._place(number)):
                mapped = self._batch(number).mapped
                assert mapped is not None
                rows = request[numbers == number] - self.starts[number]
                mapped.request(rows)
                waits.append(functools.partial(mapped.request_values, rows))
                continue
            with self._lock:
                found: Any = self._kept.get(number) or self._flights.get(number)
            if isinstance(found, _Flight):
                waits.append(found.batches)
            elif found is None and self._files[self._place(number)].is_far:
                missing.append(number)
            held.append(found)
        if missing:
            pending = self._all_records.start(np.array(missing), queue)
            flight = _Flight(self, missing, pending)
            with self._lock:
                self._flights.update(dict.fromkeys(missing, flight))
            waits.append(flight.batches)
            held.append(flight)
        return _Ahead(held, waits)

    def start_beyond(self, request: Ranges, queue: ReadQueue | None = None) -> None:
        """Nothing is read for rows that are needed much later."""

    def read(self, request: Ranges, _queue: ReadQueue | None = None) -> list[dict[str, Any]]:
        """The rows at `request`, in that order."""
        try:
            faults_before = num_faults()
            stream, order = self._gathered(request)
            path, row = self.locate(int(request[0]))
            rows = _native.arrow_rows(stream, order, path, row)
            self._mapped_is_slow = num_faults() > faults_before
        except _FAILURES as failure:
            raise_interrupt(failure)
            if isinstance(failure, OSError):
                raise  # of the storage, with its place
            if len(request) > 1:  # to name the row
                return [
                    row for at in range(len(request)) for row in self.read(request[at : at + 1])
                ]
            if isinstance(failure, GrainmillError | NotImplementedError):
                raise
            path, row = self.locate(int(request[0]))
            raise GrainmillError(f"{path}: row {row}: {failure}") from failure
        return rows

    def read_one(self, row: int, _queue: ReadQueue | None = None) -> dict[str, Any]:
        """The row at `row`."""
        return self.read(np.array([row]))[0]

    def read_batch(
        self,
        request: Ranges,
        allocate: Callable[[tuple[int, ...], str], Any],
        _queue: ReadQueue | None = None,
    ) -> dict[str, Any] | None:
        """The rows at `request` as arrays, if each column has values of one shape."""
        stream, order = self._gathered(request)
        return _native.arrow_batch(stream, order, allocate)

    def _gathered(self, request: Ranges) -> tuple[bytes, list[int]]:
        """The rows at `request` as a stream of batches, and where each row is in it."""
        pyarrow = _pyarrow()
        numbers = np.searchsorted(self.starts, request, "right") - 1
        by_batch = np.argsort(numbers, kind="stable")
        order = np.empty(len(request), np.int64)
        order[by_batch] = np.arange(len(request))
        bounds = np.flatnonzero(np.diff(numbers[by_batch], prepend=-1, append=len(self.starts)))
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, self.schema) as writer:
            for begin, end in itertools.pairwise(bounds.tolist()):
                number = int(numbers[by_batch[begin]])
                rows = request[by_batch[begin:end]] - self.starts[number]
                taken = []
                for array in self._batch(number).columns:
                    check_rows(array, rows)
                    values = array.take(pyarrow.array(rows))
                    values.validate(full=True)
                    taken.append(dense(values))
                writer.write_batch(pyarrow.RecordBatch.from_arrays(taken, schema=self.schema))
        return sink.getvalue().to_pybytes(), order.tolist()

    def _stays_mapped(self, place: int) -> bool:
        """Whether the values of batches stay in the file."""
        return self._files[place].is_plain and not self._has_views

    def _place(self, number: int) -> int:
        """The number of the file that has a batch."""
        return int(np.searchsorted(self._firsts, number, "right")) - 1

    @property
    def _all_records(self) -> _native.RecordFiles:
        """All batches as records of the engine, which have the same numbers."""
        if self._records is None:
            self._records = self._opened_records(lazy=True)
        return self._records

    def _opened_records(self, *, lazy: bool) -> _native.RecordFiles:
        ranges = [(file.path, file.index.batches) for file in self._files]
        return ranges_of(ranges, self._infos, lazy=lazy)

    def _read(self, place: int, ranges: Sequence[Sequence[int]]) -> Sequence[Any]:
        """The bytes of ranges of a file."""
        file = self._files[place]
        if file.is_far:
            # Opened anew: a read locks it, and a signal handler that interrupts one may read, too.
            far = _native.FileBytes(file.path)
            file.check_length(len(far))
            return _native.FileBytes.read_all([far] * len(ranges), ranges)
        mapped = self._mapped.get(place)
        if mapped is None:
            mapped = _Mapped(file.path, _pyarrow())
            file.check_length(len(mapped))
            self._mapped[place] = mapped
        return mapped.read(ranges)

    def _batch(self, number: int) -> _Batch:
        with self._lock:
            found = self._kept.get(number)
            if found is not None:
                self._kept.move_to_end(number)
                return found
            flight = self._flights.get(number)
        if flight is not None:
            return flight.batches()[number]
        place = self._place(number)
        if self._files[place].is_far:
            return self.decoded(number, self._all_records.read_one(number))
        extent = self._files[place].index.batches[number - self._firsts[place]]
        (data,) = self._read(place, [extent.tolist()])
        return self.decoded(number, data)

    def decoded(self, number: int, data: Any) -> _Batch:
        """Decodes a batch from its bytes, and keeps it."""
        pyarrow = _pyarrow()
        place = self._place(number)
        file = self._files[place]
        num_rows = int(self.starts[number + 1] - self.starts[number])
        wanted = [column.number for column in self._columns]
        stays_mapped = self._stays_mapped(place)
        name = f"{shown(file.path)}: record batch {number - int(self._firsts[place])}"
        try:
            if file.is_plain:
                message = pyarrow.ipc.read_message(data)
                batch = pyarrow.ipc.read_record_batch(message, self._whole)
            else:
                needed = file.index.needed(number - int(self._firsts[place]))
                before = self._read(place, needed.tolist()) if len(needed) else []
                stream = b"".join([file.index.schema, *before, data])
                options = pyarrow.ipc.IpcReadOptions(included_fields=sorted(wanted))
                batch = pyarrow.ipc.open_stream(stream, options=options).read_next_batch()
                wanted = [sorted(wanted).index(each) for each in wanted]
            if batch.num_rows != num_rows:
                raise ValueError(f"has {batch.num_rows} rows, not {num_rows}")
            arrays = [batch.column(each) for each in wanted]
            for array in arrays:
                array.validate()
            chosen = zip(arrays, self._columns, strict=True)
            arrays = [without_views(selected(array, each.tree)) for array, each in chosen]
        except _FAILURES as failure:
            raise_interrupt(failure)
            raise GrainmillError(f"{name}: {failure}") from failure
        mapped = MappedTable(pyarrow.table(arrays, self.schema.names)) if stays_mapped else None
        found = _Batch(arrays, sum(array.nbytes for array in arrays), mapped)
        self._keep(number, found)
        return found

    def _keep(self, number: int, batch: _Batch) -> None:
        with self._lock:
            if number in self._kept:
                return
            self._kept[number] = batch
            self._kept_bytes += _cost(batch)
            while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
                self._kept_bytes -= _cost(self._kept.popitem(last=False)[1])


def _cost(batch: _Batch) -> int:
    return _MAPPED_COST if batch.mapped is not None else _MAPPED_COST + batch.byte_len


def _pyarrow() -> Any:
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.ipc")
    except ImportError as failure:
        raise ImportError(
            "Arrow files need the package `pyarrow`: pip install 'grainmill[parquet]'"
        ) from failure
    return pyarrow


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _read_schema(pyarrow: Any, whole: Any, names: list[str] | None, path: str) -> Any:
    """The schema of the columns that are read, as they are passed to the engine."""
    fields = []
    try:
        columns = columns_of(whole, names)
    except UnicodeDecodeError as failure:
        raise GrainmillError(f"{path}: schema: {failure}") from None
    except ValueError as failure:
        raise ValueError(f"{path}: {failure}") from None
    for column in columns:
        field = whole.field(column.number)
        try:
            check_type(field.type)
        except NotImplementedError as failure:
            raise NotImplementedError(f"{path}: column `{column.name}`: {failure}") from None
        none = pyarrow.nulls(0, field.type)
        values = dense(without_views(selected(none, column.tree)))
        fields.append(pyarrow.field(column.name, values.type))
    return pyarrow.schema(fields)
