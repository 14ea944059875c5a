"""Data sets of the package `datasets`: Arrow tables with random access, and streams."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import itertools
import json
import operator
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, TypeVar

import numpy as np

from grainmill._dataset.iter_dataset import IterDataset
from grainmill._dataset.iterator import DatasetIterator
from grainmill._interrupts import raise_interrupt
from grainmill._native import GrainmillError
from grainmill._sources.mapped_table import MappedTable, RequestedRows, num_faults
from grainmill._sources.paths import expand
from grainmill._url import is_url, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Taken = TypeVar("Taken")

# What `datasets` and `pyarrow` raise for a damaged file, among others.
_FAILURES: Final = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, NotImplementedError),
    *(OSError, RecursionError, TypeError, ValueError),
)
_STATE_FILE = "state.json"
_SPLITS_FILE = "dataset_dict.json"


class HuggingFaceDataSource:
    """The rows of a Hugging Face data set with random access, as dicts.

    It needs the package `datasets` (`pip install 'grainmill[huggingface]'`). Blocks of rows are
    read from the Arrow tables at once: numbers become NumPy scalars, lists of numbers arrays of the
    column's type (a list of equally long lists an array with more axes), text and binary values
    `str` and `bytes`, structs dicts, and missing values `None`. Columns that `datasets` decodes, as
    images, and data sets with a format of their own (`with_format`, `with_transform`) are read as
    `datasets` returns them.

    Its pickle has the path, or the `Dataset`: a small one if that lies in files. `repr` has the
    fingerprint by which `datasets` identifies the contents.

    Args:
        dataset: A `datasets.Dataset`; or the directory that its `save_to_disk` has written; or
            `.arrow` files, as a path argument (see `expand_paths`).
        columns: The columns to read; all if `None`.

    Raises:
        ImportError: The package `datasets` is not installed.
        TypeError: `dataset` is something else; streams are read by
            `experimental.HuggingFaceIterDataset`.
        ValueError: There is no such column, `columns` is a text, a directory has several splits, or
            a path is a URL.
        FileNotFoundError: There is no such file or directory.

    Example:
        >>> import datasets
        >>> rows = datasets.Dataset.from_dict({"ids": [[1, 2], [3]], "text": ["a b", "c"]})
        >>> source = grain.sources.HuggingFaceDataSource(rows)
        >>> source[1]
        {'ids': array([3]), 'text': 'c'}
    """

    def __init__(self, dataset: Any, *, columns: Sequence[str] | None = None) -> None:
        self._files: list[str] = []
        self._given: Any = dataset
        if isinstance(columns, str):
            raise ValueError(f"`columns` must be a sequence of names, got {columns!r}")
        self._columns = None if columns is None else list(columns)
        self._lock = threading.Lock()
        self._arrow: Any = None
        self._other: Any = None
        self._opened: tuple[Any, list[str], list[str]] | None = None
        self._mapped: MappedTable | None = None
        if isinstance(dataset, str | os.PathLike) or (
            isinstance(dataset, list | tuple)
            and all(isinstance(path, str | os.PathLike) for path in dataset)
        ):
            self._files = [str(Path(path).absolute()) for path in _arrow_files(dataset)]
            self._given = None
        elif isinstance(dataset, dict):
            raise TypeError(f"`dataset` must be one split, got {sorted(dataset)}")
        elif not (hasattr(dataset, "features") and hasattr(dataset, "__getitems__")):
            stream = hasattr(dataset, "state_dict") and hasattr(dataset, "__iter__")
            raise TypeError(
                "`dataset` must be a `datasets.Dataset` or a path, got "
                f"{type(dataset).__name__}"
                + ("; read it by `experimental.HuggingFaceIterDataset`" if stream else "")
            )
        self._len = len(self._tables[0])
        self._name = self._identity()

    def _identity(self) -> str:
        if self._files:
            saved = _saved_fingerprint(self._files)
            digest = hashlib.sha1("".join(self._files).encode(), usedforsecurity=False)
            name = f"fingerprint={saved}" if saved else f"hash_of_paths={digest.hexdigest()}"
        else:
            name = f"fingerprint={self._given._fingerprint}"  # noqa: SLF001 - it has no other
        return name if self._columns is None else f"{name}, columns={self._columns}"

    @property
    def _tables(self) -> tuple[Any, list[str], list[str]]:
        """The data set; the columns converted here; and those that `datasets` converts."""
        with self._lock:
            if self._opened is None:
                dataset = self._given if self._given is not None else _opened(self._files)
                names = list(dataset.column_names)
                columns = names if self._columns is None else self._columns
                if missing := [name for name in columns if name not in names]:
                    raise ValueError(f"there is no column {missing[0]!r}; there are {names}")
                if self._columns is not None:
                    dataset = dataset.select_columns(columns)
                own = [] if dataset.format["type"] is not None else columns
                own = [name for name in own if not _is_decoded(dataset.features[name])]
                others = [name for name in columns if name not in own]
                arrow = dataset.select_columns(own).with_format("arrow") if own else None
                other = dataset.select_columns(others) if own and others else dataset
                self._opened = (dataset, own, others)
                self._arrow, self._other = arrow, other
                with contextlib.suppress(AttributeError):  # of another version of `datasets`
                    self._mapped = MappedTable(dataset.data.table)
            return self._opened

    @property
    def paths(self) -> list[str]:
        """The files, if it was given as a path."""
        return list(self._files)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._len

    def __getitem__(self, record_key: SupportsIndex) -> dict[str, Any]:
        """Returns the row at a position.

        Args:
            record_key: From 0 to `len(self) - 1`.
        """
        return self.__getitems__([record_key])[0]

    def __getitems__(self, record_keys: Sequence[SupportsIndex]) -> list[dict[str, Any]]:
        """Returns many rows at once, in the order of their keys.

        Args:
            record_keys: From 0 to `len(self) - 1`, in any order.

        Raises:
            IndexError: A key is out of range.
        """
        keys = [operator.index(key) for key in record_keys]
        for key in keys:
            if not 0 <= key < self._len:
                raise IndexError(f"row {key} is out of range for {self._len} rows of {self!r}")
        if not keys:
            return []
        try:
            faults_before = num_faults()
            rows = self._rows_at(keys)
        except _FAILURES as failure:
            raise_interrupt(failure)
            if not self._files or _is_of_system(failure):
                raise
            if len(keys) > 1:  # to name the row
                return [row for key in keys for row in self.__getitems__([key])]
            raise _damaged(self._shown_files(), f"row {keys[0]}", failure) from failure
        if self._mapped is not None:
            self._mapped.record(num_faults() - faults_before)
        return rows

    @property
    def _waits_for_storage(self) -> bool:
        """Whether rows should be requested ahead of their use; see `PrefetchedObjectSource`."""
        return self._mapped is not None and self._mapped.is_slow

    def _start_reads(self, keys: Sequence[int]) -> RequestedRows:
        """Makes the system read the pages of these rows."""
        dataset = self._tables[0]
        assert self._mapped is not None
        rows = np.array(keys, np.int64)
        if dataset._indices is not None:  # noqa: SLF001 - there is no other way to find the rows
            rows = dataset._indices.column(0).take(rows).to_numpy().astype(np.int64)  # noqa: SLF001
        return RequestedRows(keys, self._mapped, rows)

    def _finish_reads(self, requested: RequestedRows) -> list[dict[str, Any]]:
        """The rows that `_start_reads` was called for."""
        return self.__getitems__(requested.keys)

    def _shown_files(self) -> str:
        more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
        return f"{self._files[0]}{more}"

    def _rows_at(self, keys: list[int]) -> list[dict[str, Any]]:
        _, own, others = self._tables
        columns: dict[str, Sequence[Any]] = {}
        if own:
            table = self._arrow[keys]
            columns = {name: _rows(table.column(name)) for name in own}
        if not others:
            return [dict(zip(own, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        rows: list[dict[str, Any]] = self._other.__getitems__(keys)
        if not own:
            return rows
        names = self._columns or list(self._tables[0].column_names)
        return [
            {name: columns[name][at] if name in columns else row[name] for name in names}
            for at, row in enumerate(rows)
        ]

    def __getstate__(self) -> dict[str, Any]:
        names = ("_files", "_given", "_columns", "_len", "_name")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _opened=None, _mapped=None, _lock=threading.Lock())

    def __repr__(self) -> str:
        return f"HuggingFaceDataSource({self._name})"


def _datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as failure:
        raise ImportError(
            "Hugging Face data sets need the package `datasets`: pip install "
            "'grainmill[huggingface]'"
        ) from failure


def _arrow_files(paths: Any) -> list[str]:
    """The `.arrow` files of a path argument; those of a saved data set in its order."""
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        if isinstance(path, str) and is_url(path):
            raise ValueError(
                "the tables of a Hugging Face data set are mapped into memory, so they must be "
                f"local files, got {shown(path)!r}; copy them to a local disk; or read the data "
                "set's Parquet files, which may be there, by `sources.ParquetDataSource`, or "
                "convert them by `grainmill convert`; or stream it: "
                "`experimental.HuggingFaceIterDataset(datasets.load_dataset(..., streaming=True))`"
            )
    if isinstance(paths, str | os.PathLike):
        directory = Path(paths)
        if (directory / _STATE_FILE).is_file():
            names, _ = _saved(directory / _STATE_FILE)
            return [str(directory / name) for name in names]
        if (directory / _SPLITS_FILE).is_file():
            splits = _from_json(directory / _SPLITS_FILE, lambda found: list(found["splits"]))
            raise ValueError(
                f"{directory} has the splits {splits}; pass the directory of one, as "
                f"{str(directory / splits[0])!r}"
            )
    files = expand(paths, suffixes=(".arrow",))
    for file in files:
        if not Path(file).is_file():
            raise FileNotFoundError(f"there is no file {file!r}")
    return files


def _saved_fingerprint(files: list[str]) -> str | None:
    """The fingerprint that `save_to_disk` has written beside all of `files`, if it has."""
    directory = Path(files[0]).parent
    if (directory / _STATE_FILE).is_file():
        names, fingerprint = _saved(directory / _STATE_FILE)
        if [str(directory / name) for name in names] == files:
            return fingerprint
    return None


def _saved(path: Path) -> tuple[list[str], str]:
    """The names of the files, and the fingerprint, that `save_to_disk` has written to `path`."""
    return _from_json(
        path,
        lambda state: (
            [str(each["filename"]) for each in state["_data_files"]],
            str(state["_fingerprint"]),
        ),
    )


def _from_json(path: Path, take: Callable[[Any], Taken]) -> Taken:
    """What `take` takes of a JSON file.

    Raises:
        ValueError: It is damaged.
    """
    try:
        return take(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise ValueError(
            f"{path}: not as `datasets` writes it: {type(failure).__name__}: {failure}"
        ) from failure


def _opened(files: list[str]) -> Any:
    datasets = _datasets()
    directory = str(Path(files[0]).parent)
    if _saved_fingerprint(files) is not None:
        return _intact(directory, datasets.load_from_disk, directory)
    tables = [_intact(file, datasets.Dataset.from_file, file) for file in files]
    return _intact(directory, datasets.concatenate_datasets, tables)


def _intact(path: str, opened: Callable[[Any], Any], argument: Any) -> Any:
    """What `opened` returns for `argument`; its errors name `path`."""
    try:
        return opened(argument)
    except _FAILURES as failure:
        if _is_of_system(failure):
            raise
        raise _damaged(path, "whole file", failure) from failure


def _is_of_system(failure: Exception) -> bool:
    """Whether the system refused a file, which the error names then."""
    return isinstance(failure, OSError) and failure.errno is not None


def _damaged(path: str, place: str, failure: Exception) -> GrainmillError:
    return GrainmillError(f"{path}: {place}: {type(failure).__name__}: {failure}")


def _is_decoded(feature: Any) -> bool:
    """Whether `datasets` makes something else of a column's values, as images of their bytes."""
    if hasattr(feature, "decode_example"):
        return True
    if isinstance(feature, dict):
        return any(_is_decoded(value) for value in feature.values())
    if isinstance(feature, list | tuple):
        return any(_is_decoded(item) for item in feature)
    inner = getattr(feature, "feature", None)
    return inner is not None and _is_decoded(inner)


# --- Arrow to NumPy -------------------------------------------------------------------------------


def _rows(column: Any) -> Sequence[Any]:  # noqa: PLR0911 - one for each kind of column
    """The values of an Arrow column; what a row gives does not depend on the others."""
    if hasattr(column, "chunks"):
        column = column.combine_chunks()
        if hasattr(column, "chunks"):  # several, as they are too large for one
            return [row for chunk in column.chunks for row in _rows(chunk)]
    types: Any = importlib.import_module("pyarrow").types
    kind = column.type
    if hasattr(column, "storage"):  # an extension, such as arrays of a fixed shape
        return _rows(column.storage)
    if types.is_dictionary(kind):
        return _rows(column.dictionary_decode())
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        if not column.null_count:
            return list(column.to_numpy(zero_copy_only=False))
        dtype = np.dtype(kind.to_pandas_dtype()).type
        return [None if value is None else dtype(value) for value in column.to_pylist()]
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and _leaf_is_number(types, kind):
        return _lists(types, column)
    if types.is_struct(kind):
        fields = {field.name: _rows(column.field(k)) for k, field in enumerate(kind)}
        valid = column.is_valid().to_pylist()
        return [
            {name: rows[k] for name, rows in fields.items()} if valid[k] else None
            for k in range(len(column))
        ]
    pylist: list[Any] = column.to_pylist()
    return pylist


def _leaf_is_number(types: Any, kind: Any) -> bool:
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _lists(types: Any, column: Any) -> list[Any]:
    """The rows of lists of numbers, or of lists of these: arrays where they are rectangular."""
    kind = column.type
    if types.is_fixed_size_list(kind):
        stops = (np.arange(len(column) + 1) + column.offset) * kind.list_size
        bounds = stops.tolist()
    else:
        bounds = column.offsets.to_numpy().tolist()
    first, last = bounds[0], bounds[-1]
    values = column.values.slice(first, last - first)
    inner = kind.value_type
    nested = types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner)
    valid = column.is_valid().to_pylist()
    ranges = [(start - first, stop - first) for start, stop in itertools.pairwise(bounds)]
    if nested:
        rows = _lists(types, values)
        return [
            _stacked(rows[start:stop]) if ok else None
            for (start, stop), ok in zip(ranges, valid, strict=True)
        ]
    if values.null_count:
        numbers = _rows(values)
        present = values.is_valid().to_numpy(zero_copy_only=False)
        dtype = np.dtype(inner.to_pandas_dtype())
        return [
            None
            if not ok
            else np.array(numbers[start:stop], dtype)
            if present[start:stop].all()
            else list(numbers[start:stop])
            for (start, stop), ok in zip(ranges, valid, strict=True)
        ]
    array = values.to_numpy(zero_copy_only=False)
    return [
        array[start:stop].copy() if ok else None
        for (start, stop), ok in zip(ranges, valid, strict=True)
    ]


def _stacked(rows: list[Any]) -> Any:
    shapes = {row.shape if isinstance(row, np.ndarray) else None for row in rows}
    return np.stack(rows) if len(shapes) == 1 and None not in shapes else rows


# --- streams --------------------------------------------------------------------------------------


class HuggingFaceIterDataset(IterDataset[Any]):
    """The rows of a streaming Hugging Face data set, with exact states.

    The state of an iterator has that of the stream (`state_dict`), so a restored one continues at
    the same row. A stream that shuffles within a buffer loses the buffer in its state; of such a
    one the rows before are read again and skipped.

    Args:
        dataset: A `datasets.IterableDataset`. Workers of `mp_prefetch` each read some of its
            shards, so it must have at least as many.

    Raises:
        TypeError: `dataset` has no `state_dict` and `load_state_dict`.

    Example:
        >>> import datasets
        >>> stream = datasets.Dataset.from_dict({"n": [1, 2, 3]}).to_iterable_dataset()
        >>> ds = grain.sources.HuggingFaceIterDataset(stream).map(lambda row: row["n"])
        >>> list(ds)
        [1, 2, 3]
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        names = ("state_dict", "load_state_dict", "__iter__")
        if missing := [name for name in names if not hasattr(dataset, name)]:
            raise TypeError(
                f"`dataset` must be a `datasets.IterableDataset`, got {type(dataset).__name__}, "
                f"which has no `{missing[0]}`"
            )
        self._dataset = dataset

    def __iter__(self) -> DatasetIterator[Any]:
        """Returns an iterator at the first row."""
        return _StreamIterator(self._dataset)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as Grain calls it
        """Restricts this dataset, in place, to the shards of one of several workers.

        Args:
            sl: `slice(index, None, count)` for share `index` of `count`.
            sequential_slice: Has no effect: shards are read as a whole.

        Raises:
            ValueError: There are fewer shards than workers.
        """
        if self._dataset.num_shards < sl.step:
            raise ValueError(
                f"the stream has {self._dataset.num_shards} shards, which {sl.step} workers cannot "
                "share; use fewer workers, or a stream of more files"
            )
        self._dataset = self._dataset.shard(num_shards=sl.step, index=sl.start)

    def __repr__(self) -> str:
        stream = self._dataset
        info = getattr(stream, "info", None)
        split = getattr(stream, "split", None)
        values = {
            "dataset_name": getattr(info, "dataset_name", None),
            "config_name": getattr(info, "config_name", None),
            "split": None if split is None else str(split),
            "columns": getattr(stream, "column_names", None),
            "num_shards": getattr(stream, "num_shards", None),
        }
        known = [f"{name}={value!r}" for name, value in values.items() if value is not None]
        return f"{type(self).__name__}({', '.join([type(stream).__name__, *known])})"


class _StreamIterator(DatasetIterator[Any]):
    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self._given = dataset
        self._has_buffer = _has_buffer(dataset)
        self._start()

    def _start(self) -> None:
        # The state is kept in the stream, so each iterator has its own copy.
        self._dataset = copy.deepcopy(self._given)
        self._rows: Iterator[Any] | None = None
        self._num_rows = 0
        self._state: Any = None

    def __next__(self) -> Any:
        if self._rows is None:
            self._rows = iter(self._dataset)
        row = next(self._rows)
        self._num_rows += 1
        if not self._has_buffer:
            self._state = self._dataset.state_dict()
        return row

    def get_state(self) -> dict[str, Any]:
        """Returns the number of rows, and the state of the stream."""
        return {"num_rows": self._num_rows, "stream": copy.deepcopy(self._state)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken."""
        self._start()
        if state["stream"] is not None and state["num_rows"]:
            self._dataset.load_state_dict(copy.deepcopy(state["stream"]))
            self._state = copy.deepcopy(state["stream"])
            self._num_rows = state["num_rows"]
            return
        for _ in range(state["num_rows"]):
            next(self)


def _has_buffer(dataset: Any) -> bool:
    """Whether a stream shuffles within a buffer, which its state does not have."""
    pending = [getattr(dataset, "_ex_iterable", None)]
    while pending:
        examples = pending.pop()
        if "Shuffled" in type(examples).__name__ and hasattr(examples, "buffer_size"):
            return True
        if isinstance(examples, list | tuple):
            pending += examples
        elif type(examples).__name__.endswith("Iterable"):
            pending += [value for name, value in vars(examples).items() if "ex_iterable" in name]
    return False
