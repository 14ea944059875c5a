"""Parquet files that `convert` writes, by the package `pyarrow`.

The engine's own Parquet code reads only: one command writes, whose speed is that of making columns
of Python objects, and a writer of all types and codecs would make every wheel larger.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib
import os
import re
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from grainmill._files import formats, reading, tf_example
from grainmill._files.messages import Argument, Message
from grainmill._native import GrainmillError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill import _native

_LEVELS = ("zstd", "gzip", "brotli")
_CODECS = (*_LEVELS, "snappy", "lz4", "uncompressed")
_ROW_GROUP_BYTES = 64 << 20
# The schema follows from so many records, or fewer that have so many bytes; later records are
# converted as many at a time.
_BLOCK_LEN = 4096
_BLOCK_BYTES = 16 << 20
_SCHEMA = Argument("schema")


class _Taking:
    """What takes records in whatever form they come, as a list."""

    def copy_list(self, records: Sequence[Any], num_threads: int = 1) -> int:
        """Appends records, which are `bytes`, or rows."""
        raise NotImplementedError

    def copy_stream(
        self,
        stream: _native.RecordStream | _native.IndexedRecords,
        max_records: int,
        num_threads: int = 1,
    ) -> int:
        """Appends some of the next records."""
        copied = 0
        while copied < max_records:
            block = stream.read(min(_BLOCK_LEN, max_records - copied))
            if not block:
                break
            copied += self.copy_list(block, num_threads)
        return copied

    copy_indexed = copy_stream


class Sample(_Taking):
    """The first records of several files, which have one schema.

    Attributes:
        records: Those it has taken.
        is_enough: Whether the schema follows from these.
    """

    def __init__(self) -> None:
        self.records: list[Any] = []
        self._byte_len = 0

    @property
    def is_enough(self) -> bool:
        return len(self.records) >= _BLOCK_LEN or self._byte_len >= _BLOCK_BYTES

    def copy_list(self, records: Sequence[Any], num_threads: int = 1) -> int:
        """Appends records."""
        del num_threads
        self.records += records
        self._byte_len += sum(reading.byte_len(record) for record in records)
        return len(records)


class ParquetOutput(_Taking):
    """A file that takes what the engine's `RecordOutput` does, and rows.

    Records that are JSON objects become rows with a column for each field, those that are
    `tf.train.Example` rows with one for each feature: a value where all examples of the first block
    have one, otherwise a list. Other records are the values of one binary column, `record`.

    Args:
        path: The file.
        shown: Its name in messages.
        options: `key:value` items separated by commas; see `formats`.
        schema: `name:type` items separated by commas; without, the types follow from the sample.
        sample: The records that decide about the columns; without, those of the first block.
        writer: What writes the file; without, it is a local one.
    """

    def __init__(
        self,
        path: str,
        shown: str,
        options: str = "",
        schema: str | None = None,
        *,
        sample: Sequence[Any] = (),
        writer: _native.ObjectWriter | None = None,
    ) -> None:
        self._arrow = _pyarrow("pyarrow")
        self._path = shown
        self._codec, self._level, self._group_bytes, self._is_raw = _parsed(options)
        self._stated = None if schema is None else parse_schema(schema)
        self._sample = sample
        self._schema: Any = None
        self._lists: frozenset[str] = frozenset()
        self._rows_of: Callable[[Any], dict[str, Any]] = _raw_row
        self._num_records = 0
        self._num_inferred = 0
        self._pending: list[Any] = []
        self._pending_bytes = 0
        self._group: list[Any] = []
        self._group_len = 0
        self._parquet: Any = None
        self._writer = writer
        self._file: IO[bytes] | None = None
        if writer is None:
            self._file = open(path, "xb")  # noqa: PTH123, SIM115 - closed by `close` and `abort`
            self._sink = _Sink(self._file.write)
        else:
            self._sink = _Sink(writer.write)

    def copy_list(self, records: Sequence[Any], num_threads: int = 1) -> int:
        """Appends records, which are `bytes`, or rows."""
        del num_threads
        for record in records:
            self._pending.append(record)
            self._pending_bytes += reading.byte_len(record)
            if len(self._pending) >= _BLOCK_LEN or self._pending_bytes >= _BLOCK_BYTES:
                self._convert()
        return len(records)

    def close(self) -> None:
        """Writes what follows the records, and syncs and closes the file."""
        self._convert()
        if self._schema is None and self._sample:
            self._begin(self._sample)
        elif self._schema is None:
            self._set_schema(self._stated or self._arrow.schema([_record_field(self._arrow)]))
        self._write_group()
        self._parquet.close()
        self._sink.drop()
        if self._writer is not None:
            self._writer.close()
        elif self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def abort(self) -> None:
        """Closes the file as it is."""
        self._sink.drop()
        if self._parquet is not None:
            with contextlib.suppress(OSError, ValueError):  # it has failed before
                self._parquet.close()
            self._parquet.is_open = False
        if self._writer is not None:
            self._writer.abort()
        elif self._file is not None:
            self._file.close()

    # --- rows -----------------------------------------------------------------------------------

    def _convert(self) -> None:
        """Makes columns of the pending records."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        if not pending:
            return
        if self._schema is None:
            self._begin(self._sample or pending)
        rows = []
        for number, record in enumerate(pending, self._num_records):
            try:
                rows.append(self._rows_of(record))
            except ValueError as error:
                raise self._misfit(number, str(error)) from error
        table = self._table(rows)
        self._num_records += len(rows)
        self._group.append(table)
        self._group_len += table.nbytes
        if self._group_len >= self._group_bytes:
            self._write_group()

    def _write_group(self) -> None:
        group, self._group, self._group_len = self._group, [], 0
        if group:
            table = self._arrow.concat_tables(group)
            self._parquet.write_table(table, row_group_size=table.num_rows)

    def _table(self, rows: list[dict[str, Any]]) -> Any:
        names = self._schema.names
        known = frozenset(names)
        for number, row in enumerate(rows, self._num_records):
            if more := row.keys() - known:
                raise self._misfit(number, f"`{min(more)}` is no column")
        columns = [
            self._column(name, wanted, [row.get(name) for row in rows])
            for name, wanted in zip(names, self._schema.types, strict=True)
        ]
        return self._arrow.table(columns, schema=self._schema)

    def _column(self, name: str, wanted: Any, values: list[Any]) -> Any:
        found = self._array(values, wanted)
        if found is not None:
            return found
        odd = _first_odd(values, lambda some: self._array(some, wanted) is not None)
        problem = f"`{name}` is {_short(values[odd])}, not {wanted}"
        raise self._misfit(self._num_records + odd, problem)

    def _array(self, values: list[Any], wanted: Any) -> Any:
        """The values as an array of a type, or `None` if one does not fit or would be changed."""
        try:
            natural = self._natural(values)
            if natural.type == wanted:
                return natural
            if not self._fits(natural.type, wanted):
                return None
            if self._arrow.types.is_temporal(wanted):
                return natural.cast(wanted)
            made = self._arrow.array(values, type=wanted)
            # Numbers that are too large for a shorter type become infinite.
            return made if self._num_infinite(made) == self._num_infinite(natural) else None
        except (ValueError, TypeError, OverflowError, NotImplementedError):  # also those of Arrow
            return None

    def _natural(self, values: list[Any]) -> Any:
        if values and all(isinstance(value, np.datetime64 | np.timedelta64) for value in values):
            return self._arrow.array(np.array(values))
        return self._arrow.array(values)

    def _fits(self, found: Any, wanted: Any) -> bool:
        """Whether values of the type that Arrow finds for them are kept by another type."""
        types = self._arrow.types
        if types.is_null(found) or found == wanted:
            return True
        texts = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
        for group, others in (
            ((types.is_integer,), (types.is_integer, types.is_floating)),
            ((types.is_floating,), (types.is_floating,)),
            (texts, (*texts, types.is_temporal)),
        ):
            if any(is_kind(found) for is_kind in group):
                return any(is_kind(wanted) for is_kind in others)
        if types.is_list(found):
            return types.is_list(wanted) and self._fits(found.value_type, wanted.value_type)
        if types.is_struct(found):
            return types.is_struct(wanted) and all(
                wanted.get_field_index(field.name) >= 0
                and self._fits(field.type, wanted.field(field.name).type)
                for field in found
            )
        return bool(types.is_temporal(found) and types.is_temporal(wanted))

    def _num_infinite(self, array: Any) -> int:
        types = self._arrow.types
        if types.is_floating(array.type):
            return int(np.isinf(array.to_numpy(zero_copy_only=False)).sum())
        if types.is_list(array.type):
            return self._num_infinite(array.flatten())
        if types.is_struct(array.type):
            return sum(self._num_infinite(part) for part in array.flatten())
        return 0

    def _misfit(self, number: int, problem: str) -> GrainmillError:
        head = f"{self._path}: record {number} does not fit the schema: {problem} ("
        if self._stated is not None:
            return GrainmillError(Message(head, "it is stated by ", _SCHEMA, ")"))
        source = f"it follows from the first {self._num_inferred} records; "
        return GrainmillError(Message(head, source, _SCHEMA, " states it)"))

    # --- the schema -----------------------------------------------------------------------------

    def _begin(self, records: Sequence[Any]) -> None:
        """Decides what the records are, and their schema."""
        self._num_inferred = len(records)
        schema = self._stated
        if not isinstance(records[0], bytes):
            self._rows_of = _plain_row
        elif not self._is_raw and (examples := _all(records, _example)):
            found = self._columns_of(examples) if schema is None else schema
            schema = found
            self._lists = frozenset(
                field.name for field in found if self._arrow.types.is_list(field.type)
            )
            self._rows_of = self._example_row
        elif not self._is_raw and _all(records, reading.json_object):
            self._rows_of = reading.json_object
        if schema is None:
            schema = self._inferred([self._rows_of(record) for record in records])
        self._set_schema(schema)

    def _columns_of(self, examples: list[dict[str, tuple[int, list[Any]]]]) -> Any:
        """The schema of examples: a list for a feature that does not always have one value."""
        arrow = self._arrow
        types = {
            0: arrow.null(),
            tf_example.BYTES_LIST: arrow.binary(),
            tf_example.FLOAT_LIST: arrow.float32(),
            tf_example.INT64_LIST: arrow.int64(),
        }
        kinds: dict[str, int] = {}
        lists = set()
        for example in examples:
            for name, (kind, values) in example.items():
                kinds[name] = kinds.get(name) or kind
                if {kinds[name], kind} == {tf_example.INT64_LIST, tf_example.FLOAT_LIST}:
                    kinds[name] = tf_example.FLOAT_LIST
                if len(values) != 1:
                    lists.add(name)
        return arrow.schema(
            (name, arrow.list_(types[kind]) if name in lists else types[kind])
            for name, kind in kinds.items()
        )

    def _inferred(self, rows: list[dict[str, Any]]) -> Any:
        names = list(dict.fromkeys(name for row in rows for name in row))
        if not names:
            head = f"{self._path}: the first {len(rows)} records have no fields, so that no columns"
            raise GrainmillError(Message(f"{head} follow from them (", _SCHEMA, " states columns)"))
        fields = []
        for name in names:
            values = [row.get(name) for row in rows]
            problem = self._no_type(values)
            if problem is not None:
                odd = _first_odd(values, lambda some: self._no_type(some) is None)
                alone = self._no_type(values[odd : odd + 1])
                head = f"{self._path}: record {odd}: `{name}` "
                if alone is not None:
                    text = f"is {_short(values[odd])}, which no column has: {alone}"
                    raise GrainmillError(f"{head}{text}")
                head += "has another type than before ("
                raise GrainmillError(Message(head, _SCHEMA, " states the types)"))
            fields.append(self._arrow.field(name, self._natural(values).type))
        return self._arrow.schema(fields)

    def _no_type(self, values: list[Any]) -> str | None:
        """Why no column can have these values; `None` if one can."""
        try:
            self._natural(values)
        except (ValueError, TypeError, OverflowError) as error:
            return str(error)
        return None

    def _set_schema(self, schema: Any) -> None:
        self._schema = schema
        self._parquet = _pyarrow("pyarrow.parquet").ParquetWriter(
            self._arrow.PythonFile(self._sink, mode="w"),
            schema,
            compression="none" if self._codec == "uncompressed" else self._codec,
            compression_level=self._level,
        )

    def _example_row(self, record: bytes) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for name, values in tf_example.decode(record).items():
            if name in self._lists:
                row[name] = values
            elif len(values) > 1:
                raise ValueError(f"`{name}` has {len(values)} values, not one")
            else:
                row[name] = values[0] if values else None
        return row


class _Sink:
    """What Arrow writes to: passes the bytes on, until it is told to drop them.

    Arrow may write when its writer is collected, whatever has failed before; that must not complete
    an object, nor reach a file that is closed.
    """

    closed = False

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write: Callable[[bytes], object] | None = write
        self._len = 0

    def write(self, data: Any) -> int:
        if self._write is not None:
            self._write(bytes(data))
        self._len += len(data)
        return len(data)

    def tell(self) -> int:
        return self._len

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def drop(self) -> None:
        """Passes on nothing more."""
        self._write = None


def _all(records: Sequence[Any], row_of: Callable[[bytes], Any]) -> list[Any] | None:
    """What each record is made into, or `None` if one is something else."""
    rows = []
    for record in records:
        try:
            rows.append(row_of(record))
        except ValueError:
            return None
    return rows


def _first_odd(values: list[Any], fits: Callable[[list[Any]], bool]) -> int:
    """The position of the first value for which those up to it do not fit; all together do not."""
    return bisect.bisect_right(range(1, len(values)), 0, key=lambda count: not fits(values[:count]))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _example(record: bytes) -> dict[str, tuple[int, list[Any]]]:
    found = tf_example.decode_kinds(record)
    if not found:
        raise ValueError("an example without features")  # or an empty record
    return found


def _raw_row(record: bytes) -> dict[str, Any]:
    return {"record": record}


def _plain_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a source; Arrow takes arrays of one dimension only."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) and value.ndim > 1 else value
        for name, value in row.items()
    }


def _record_field(arrow: Any) -> Any:
    return arrow.field("record", arrow.binary())


def _pyarrow(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            "Parquet files are written by the package `pyarrow`, which cannot be imported: "
            f"`pip install 'grainmill[parquet]'` ({error})"
        ) from error


def check(options: str, schema: str | None) -> None:
    """Checks the options of a Parquet file before one is begun.

    Raises:
        ValueError: One is unknown or invalid.
        ImportError: The package that writes the file is missing.
    """
    codec, level, _, _ = _parsed(options)
    _pyarrow("pyarrow.parquet")
    if level is not None:
        found = _pyarrow("pyarrow").Codec
        lowest = max(1, found.minimum_compression_level(codec))
        highest = found.maximum_compression_level(codec)
        if not lowest <= level <= highest:
            raise ValueError(f"levels of {codec} are from {lowest} to {highest}, got {level}")
    if schema is not None:
        parse_schema(schema)


def _parsed(options: str) -> tuple[str, int | None, int, bool]:
    """The codec, its level, the bytes of a row group, and whether records stay bytes."""
    codec, level, group_bytes, is_raw = "zstd", None, _ROW_GROUP_BYTES, False
    for option in filter(None, options.split(",")):
        name, _, text = option.partition(":")
        if name == "record" and not text:
            is_raw = True
        elif name in _CODECS and (not text or name in _LEVELS):
            codec, level = name, _number(option, text) if text else None
        elif name == "row_group_bytes" and text:
            group_bytes = _number(option, text)
        else:
            raise ValueError(
                f"unknown option `{option}`, valid options: {formats.FORMATS['parquet'].options}"
            )
    return codec, level, group_bytes, is_raw


def _number(option: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < 1:
        raise ValueError(f"`{option}` must have a positive number")
    return int(text)


def parse_schema(text: str) -> Any:
    """The schema that `name:type,...` states; types are those of Arrow, and `list<type>`.

    Raises:
        ValueError: It is not of this form, or there is no such type.
    """
    arrow = _pyarrow("pyarrow")
    fields = []
    for item in re.split(r",(?![^\[]*\])", text):  # `timestamp[us, tz=UTC]` is one type
        name, colon, kind = item.strip().partition(":")
        if not (name and colon):
            text = f" must be `name:type,...`, got `{item.strip()}`"
            raise ValueError(Message(_SCHEMA, text))
        fields.append(arrow.field(name.strip(), _type_of(arrow, kind.strip())))
    if len({field.name for field in fields}) < len(fields):
        raise ValueError(Message(_SCHEMA, " names a column twice"))
    return arrow.schema(fields)


def _type_of(arrow: Any, text: str) -> Any:
    if match := re.fullmatch(r"list<(.+)>", text):
        return arrow.list_(_type_of(arrow, match[1]))
    if match := re.fullmatch(r"timestamp\[(s|ms|us|ns), *tz=([\w/+:-]+)\]", text):
        return arrow.timestamp(match[1], match[2])
    try:
        return arrow.type_for_alias(text)
    except ValueError:
        known = "bool, int8 to int64, uint8 to uint64, float, double, string, binary, date32"
        problem = f": there is no type `{text}`; types are {known}, timestamp[us] and list<...>"
        raise ValueError(Message(_SCHEMA, problem)) from None
