"""ArrayRecord files one at a time, with the interface of the `array_record` package.

Programs that import `array_record.python.array_record_module` switch by importing this module
instead. Readers here also have `len`, indexing, iteration and `with`, and take any path.
"""

import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self, overload

import numpy as np

from grainmill import _native
from grainmill._interrupts import raise_interrupt
from grainmill._native import ArrayRecordWriter
from grainmill._url import shown

__all__ = ["ArrayRecordReader", "ArrayRecordWriter"]


def __dir__() -> list[str]:
    return sorted(__all__)


_READ_LEN = 1 << 20
_MAX_BYTES = 1 << 30
_MAX_INT32 = (1 << 31) - 1
_UNITS: dict[str, int] = {unit: 1 << 10 * power for power, unit in enumerate("BKMGTPE")} | {
    "": 1,
    "k": 1024,
}
_BYTES = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([BkKMGTPE]?)", re.ASCII)
_INTEGER = re.compile(r"\s*([+-]?\d+)\s*", re.ASCII)


class _Options(NamedTuple):
    """The parsed options of a reader."""

    readahead_buffer_size: int = 0
    max_parallelism: int | None = None
    index_storage_option: str = "in_memory"
    footer_prefetch_bytes: int = 1 << 20


def _parse_bytes(key: str, text: str, default: int) -> int:
    if text == "auto":
        return default
    if match := _BYTES.fullmatch(text):
        size = float(match[1]) * _UNITS[match[2]]
        if 0 <= size <= _MAX_BYTES:
            return round(size)
    valid = "auto, integers expressed as reals with optional suffix [BkKMGTPE], in the range"
    raise _invalid(key, text, f"{valid} [0..{_MAX_BYTES}]")


def _parse_parallelism(text: str) -> int | None:
    if text == "auto":
        return None
    match = _INTEGER.fullmatch(text)
    if match and 0 <= (value := int(match[1])) <= _MAX_INT32:
        return value
    valid = f"auto, integers in the range [0..{_MAX_INT32}]"
    raise _invalid("max_parallelism", text, valid)


def _invalid(key: str, text: str, valid: str) -> ValueError:
    return ValueError(f"Option {key}: invalid value: {text or '(empty)'}, valid values: {valid}")


def _parse_options(options: str) -> _Options:
    """Parses `key:value` items separated by commas; empty items are skipped."""
    given: dict[str, str] = {}
    for item in filter(None, options.split(",")):
        key, _, text = item.partition(":")
        if key not in _Options._fields:
            known = "max_parallelism, readahead_buffer_size, index_storage_option"
            raise ValueError(f"Unknown option {key}, valid options: {known}, footer_prefetch_bytes")
        if key in given:
            raise ValueError(f"Option {key} is present more than once")
        given[key] = text
    storage = given.get("index_storage_option") or "in_memory"
    if storage not in {"in_memory", "offloaded"}:
        raise _invalid("index_storage_option", storage, "(empty), in_memory, offloaded")
    parsed = _Options(
        readahead_buffer_size=_parse_bytes(
            "readahead_buffer_size", given.get("readahead_buffer_size", "auto"), 0
        ),
        max_parallelism=_parse_parallelism(given.get("max_parallelism", "auto")),
        index_storage_option=storage,
        footer_prefetch_bytes=_parse_bytes(
            "footer_prefetch_bytes", given.get("footer_prefetch_bytes", "auto"), 1 << 20
        ),
    )
    if storage == "offloaded" and parsed.footer_prefetch_bytes > 0:
        raise ValueError(
            "footer_prefetch_bytes > 0 is only supported with index_storage_option:in_memory."
        )
    return parsed


def check_reader_options(options: Mapping[str, object]) -> None:
    """Checks options of a reader that are given as a dict.

    Args:
        options: The `key:value` options of `ArrayRecordReader`.

    Raises:
        ValueError: An option is unknown or has an invalid value.
    """
    _parse_options(",".join(f"{key}:{value}" for key, value in options.items()))


class ArrayRecordReader:
    """Reads one ArrayRecord file.

    Records are `bytes`, read by index, slice, `read` or iteration; a `with` block closes the
    reader. As in the `array_record` package, a file that cannot be opened raises no error here:
    `ok()` is `False`, and every method that reads raises a `RuntimeError` with the reason.
    Checksums are verified; reading a damaged record raises a `RuntimeError`, and other records stay
    readable. `reader[index]` raises an `IndexError` if there is no such record.

    Args:
        path: The file, or its URL, such as `s3://bucket/name`.
        options: `key:value` items separated by commas: `readahead_buffer_size` (bytes that `read()`
            reads at a time, at least 1 MiB), `max_parallelism` (0 disables read-ahead),
            `index_storage_option` and `footer_prefetch_bytes` (accepted, without effect).
        **kwargs: Accepted and ignored, like `file_reader_buffer_size` in the `array_record`
            package.

    Raises:
        ValueError: An option is unknown, given twice, or has an invalid value.

    Example:
        >>> from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter
        >>> with ArrayRecordWriter("words.array_record", "group_size:1") as writer:
        ...     for word in (b"one", b"two", b"three"):
        ...         writer.write(word)
        >>> with ArrayRecordReader("words.array_record") as reader:
        ...     len(reader), reader[0], reader[-1], reader.read(1, 3)
        (3, b'one', b'three', [b'two', b'three'])
    """

    def __init__(
        self, path: str | bytes | os.PathLike[str], options: str = "", **kwargs: object
    ) -> None:
        del kwargs
        self._options = _parse_options(options)
        self._path = os.fsdecode(path)
        self._files: _native.RecordFiles | None = None
        self._failure: Exception | None = None
        self._is_open = True
        self._next_index = 0
        self._prefetched: Iterator[bytes] = iter(())
        self._pending: tuple[range, _native.PendingRead] | None = None
        self._writer_options: str | None = None
        try:
            self._files = _native.RecordFiles([(self._path, 0, None)])
            self._writer_options = self._files.writer_options[0]
        except (OSError, RuntimeError) as error:
            self._failure = error

    def ok(self) -> bool:
        """Returns whether the file is open and no damage was found when opening it."""
        return self._files is not None

    def is_open(self) -> bool:
        """Returns whether `close` has not been called."""
        return self._is_open

    def num_records(self) -> int:
        """Returns the number of records; 0 if the reader is closed or could not open the file."""
        return len(self._files) if self._files is not None else 0

    def record_index(self) -> int:
        """Returns the index of the record that `read()` returns next."""
        return self._next_index

    def writer_options_string(self) -> str | None:
        """Returns the writer's options as stored in the file; `None` if there are none."""
        return self._writer_options

    @overload
    def read(self, /) -> bytes: ...
    @overload
    def read(self, indices: Sequence[int], /) -> list[bytes]: ...
    @overload
    def read(self, start: int, stop: int, /) -> list[bytes]: ...
    def read(self, *args: object) -> bytes | list[bytes]:
        """Reads the next record, those at a sequence of indices, or those of a range.

        Args:
            *args: Nothing; a sequence of non-negative integers; or a start and an end, where
                negative integers count from the end.

        Returns:
            One record, or a list of records in the requested order.

        Raises:
            IndexError: There is no next record, or the range is empty or out of range.
            RuntimeError: An index is out of range, the file is damaged, or the reader is closed.
            TypeError: The arguments are none of these.
        """
        match args:
            case ():
                return self._read_next()
            case (indices,) if isinstance(indices, Sequence | np.ndarray | range):
                return self._read_indices(indices)
            case (start, stop):
                return self._read_range(_index(start), _index(stop))
            case _:
                raise TypeError(
                    "`read` must be called without arguments, with a sequence of indices, or with "
                    f"a start and an end, got {args!r}"
                )

    def read_all(self) -> list[bytes]:
        """Returns every record, in order.

        Raises:
            RuntimeError: The file is damaged or could not be opened, or the reader is closed.
        """
        files = self._opened()
        return files.read(np.arange(len(files), dtype=np.int64))

    def seek(self, index: int) -> None:
        """Makes `read()` continue at `index`, or at the end if there is no such record.

        Args:
            index: The index of a record, from 0.

        Raises:
            RuntimeError: The file could not be opened, or the reader is closed.
        """
        num_records = len(self._opened())
        index = operator.index(index)
        self._go_to(index if 0 <= index <= num_records else num_records)

    def close(self) -> None:
        """Closes the reader; safe to call again.

        Raises:
            RuntimeError: The file could not be opened.
        """
        was_open, self._is_open = self._is_open, False
        self._go_to(0)
        self._files = None
        if was_open and self._failure is not None:
            raise self._reason()

    def __len__(self) -> int:
        return len(self._opened())

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        files = self._opened()
        if isinstance(index, slice):
            return files.read(np.arange(*index.indices(len(files)), dtype=np.int64))
        at = operator.index(index)
        if not -len(files) <= at < len(files):
            raise IndexError(
                f"{shown(self._path)}: index {at} is out of range for {len(files)} records"
            )
        return files.read_one(at % len(files))

    def __iter__(self) -> Iterator[bytes]:
        files = self._opened()
        for block in self._blocks(0):
            yield from files.read(np.arange(block.start, block.stop, dtype=np.int64))

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ArrayRecordReader({shown(self._path)!r})"

    def _opened(self) -> _native.RecordFiles:
        if self._files is None:
            raise self._reason()
        return self._files

    def _reason(self) -> RuntimeError:
        """The reason why nothing can be read."""
        if self._failure is None:
            return RuntimeError("Object closed")
        if isinstance(self._failure, OSError) and self._failure.errno is not None:
            text = os.strerror(self._failure.errno)
            error = RuntimeError(f"open() failed: {text}; opening {shown(self._path)}")
        else:
            error = RuntimeError(str(self._failure))
        error.__cause__ = self._failure
        return error

    def _read_next(self) -> bytes:
        files = self._opened()
        record = next(self._prefetched, None)
        if record is None:
            if self._next_index >= len(files):
                raise IndexError(f"Out of range of num_records: {len(files)}")
            self._prefetched = iter(self._next_block(files))
            record = next(self._prefetched)
        self._next_index += 1
        return record

    def _next_block(self, files: _native.RecordFiles) -> list[bytes]:
        """The records to read at a time, starting at the next one."""
        pending, self._pending = self._pending, None
        blocks = self._blocks(self._next_index)
        block = next(blocks)
        try:
            if pending is not None and pending[0] == block:
                records = pending[1].finish()
            else:
                records = files.read(np.arange(block.start, block.stop, dtype=np.int64))
        except RuntimeError as failure:
            raise_interrupt(failure)
            # One of them is damaged; those before it are still readable.
            return [files.read_one(self._next_index)]
        following = next(blocks, None)
        if following is not None and self._options.max_parallelism != 0:
            indices = np.arange(following.start, following.stop, dtype=np.int64)
            self._pending = following, files.start(indices)
        return records

    def _blocks(self, start: int) -> Iterator[range]:
        """Ranges of records to read at a time, which end at chunk boundaries."""
        files = self._opened()
        group_size = max(files.group_sizes[0], 1)
        byte_len = max(self._options.readahead_buffer_size, _READ_LEN)
        groups = max(int(byte_len / max(files.mean_byte_len, 1.0)) // group_size, 1)
        step = groups * group_size
        while start < len(files):
            stop = min((start // step + 1) * step, len(files))
            yield range(start, stop)
            start = stop

    def _go_to(self, index: int) -> None:
        self._next_index = index
        self._prefetched, self._pending = iter(()), None

    def _read_indices(self, given: Iterable[object]) -> list[bytes]:
        indices = [_index(index) for index in given]
        files = self._opened()
        for index in indices:
            if index < 0:
                raise TypeError(f"`indices` must not be negative, got {index}")
            if index >= len(files):
                raise RuntimeError(f"index {index} out of bound {len(files)}")
        return files.read(np.array(indices, dtype=np.int64))

    def _read_range(self, start: int, stop: int) -> list[bytes]:
        files = self._opened()
        num_records = len(files)
        begin = start + num_records if start < 0 else start
        end = stop + num_records if stop < 0 else stop
        if not 0 <= begin < end <= num_records:
            raise IndexError(f"[{start}, {stop}) is of range of [0, {num_records})")
        return files.read(np.arange(begin, end, dtype=np.int64))


def _index(value: object) -> int:
    """`value` as an integer; raises a `TypeError` if it is not one."""
    return operator.index(value)  # type: ignore[arg-type]
