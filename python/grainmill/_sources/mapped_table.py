"""Pages of memory-mapped Arrow tables, requested before rows are read, where these would wait.

Reading a row touches memory, and a page that is not in memory yet is read while the thread waits.
The system can be asked for the pages of many rows at once, and reads them meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_WILL_NEED: Final = 3
# What the system reads for one call at most.
_MAX_LEN: Final = 128 << 10
# For so many blocks storage counts as slow; then one without requests shows whether it still is.
_SLOW_BLOCKS: Final = 256


class Ranges(NamedTuple):
    """Addresses of bytes: where each range begins and ends."""

    begins: Indices
    ends: Indices


class _Buffers(NamedTuple):
    """Where the values of a column are in memory, for a run of its rows.

    Attributes:
        address: Of the value of row 0, or of where it begins in `values`.
        width: The bytes of each value, or of each number that says where one begins.
        offsets: Those numbers, if lengths vary.
        values: Where they count from, the bytes of what they count, and how many bytes there are.
    """

    address: int
    width: int
    offsets: np.ndarray[Any, Any] | None
    values: tuple[int, int, int]

    @property
    def row_len(self) -> int:
        """The bytes of a row: its value, or the numbers that say where it begins and ends."""
        return self.width if self.offsets is None else 2 * self.width


class MappedTable:
    """The rows of a table whose memory may be that of files.

    Args:
        table: A `pyarrow.Table`.
    """

    def __init__(self, table: Any) -> None:
        self._columns = [column.chunks for column in table.columns]
        self._starts = [
            np.cumsum([0, *(len(chunk) for chunk in chunks)]) for chunks in self._columns
        ]
        self._buffers: dict[tuple[int, int], list[_Buffers]] = {}
        self._num_slow = 0

    @property
    def is_slow(self) -> bool:
        """Whether reading rows waited for storage lately."""
        return self._num_slow > 0

    def record(self, num_faults: int) -> None:
        """Records that a block of rows was read, and how many pages its thread waited for."""
        self._num_slow = _SLOW_BLOCKS if num_faults else max(0, self._num_slow - 1)

    def request(self, rows: Indices) -> None:
        """Requests the pages that say where the values of `rows` are, and those of fixed length."""
        _request(
            [
                Ranges(begins := buffers.address + buffers.width * own, begins + buffers.row_len)
                for own, buffers in self._parts(rows)
            ]
        )

    def request_values(self, rows: Indices) -> None:
        """Requests the pages of the values of `rows` whose lengths vary; see `request`."""
        ranges = []
        for own, buffers in self._parts(rows):
            if buffers.offsets is not None:
                address, unit, byte_len = buffers.values
                offsets = buffers.offsets
                bounds = np.stack([offsets[own], offsets[own + 1]]).astype(np.int64)
                # A damaged file may have any.
                begins, ends = address + unit * np.clip(bounds, 0, byte_len // unit)
                ranges.append(Ranges(begins, ends))
        _request(ranges)

    def _parts(self, rows: Indices) -> Iterator[tuple[Indices, _Buffers]]:
        """The rows that each of the buffers has, as numbers in it."""
        for number, (chunks, starts) in enumerate(zip(self._columns, self._starts, strict=True)):
            places = np.searchsorted(starts, rows, side="right") - 1
            for place in np.unique(places).tolist():
                key = number, place
                if key not in self._buffers:
                    self._buffers[key] = list(_buffers_of(chunks[place]))
                own = rows[places == place] - starts[place]
                for buffers in self._buffers[key]:
                    yield own, buffers


def _buffers_of(array: Any) -> Iterator[_Buffers]:
    """The buffers of an Arrow array; none of types that are not known."""
    types: Any = importlib.import_module("pyarrow").types
    kind = array.type
    if hasattr(array, "storage"):
        yield from _buffers_of(array.storage)
    elif types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _buffers_of(array.field(number))
    elif _width(types, kind):
        width = _width(types, kind)
        address = array.buffers()[1].address + width * array.offset
        yield _Buffers(address, width, None, (0, 0, 0))
    elif types.is_fixed_size_list(kind) and _width(types, kind.value_type):
        (values,) = _buffers_of(array.values)
        width = values.width * kind.list_size
        yield _Buffers(values.address + width * array.offset, width, None, (0, 0, 0))
    else:
        is_list = types.is_list(kind) or types.is_large_list(kind)
        is_large = (
            types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
        )
        is_bytes = is_large or types.is_string(kind) or types.is_binary(kind)
        unit = _width(types, kind.value_type) if is_list else int(is_bytes)
        buffers = array.buffers()
        values = array.values.buffers()[1] if is_list and unit else buffers[-1]
        if unit and buffers[1] is not None and values is not None:
            dtype = np.dtype(np.int64 if is_large else np.int32)
            skip = array.offset * dtype.itemsize
            offsets = np.frombuffer(buffers[1], dtype, len(array) + 1, skip)
            address = buffers[1].address + skip
            skipped = array.values.offset * unit if is_list else 0
            byte_len = max(0, values.size - skipped)
            start = values.address + skipped
            yield _Buffers(address, dtype.itemsize, offsets, (start, unit, byte_len))


def _width(types: Any, kind: Any) -> int:
    """The bytes of a number; 0 for other types."""
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind)
    return int(kind.bit_width) // 8 if is_number else 0


def _request(ranges: Sequence[Ranges]) -> None:
    """Asks the system to read the pages of these bytes; returns before they are there."""
    advise = _madvise()
    if advise is None or not ranges:
        return
    begins = np.concatenate([each.begins for each in ranges]) // mmap.PAGESIZE
    ends = -(-np.concatenate([each.ends for each in ranges]) // mmap.PAGESIZE)
    order = np.argsort(begins)
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    is_first = np.ones(len(begins), bool)
    is_first[1:] = begins[1:] > ends[:-1]
    firsts = begins[is_first] * mmap.PAGESIZE
    lasts = ends[np.append(is_first[1:], True)] * mmap.PAGESIZE
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        for at in range(first, last, _MAX_LEN):
            advise(at, min(_MAX_LEN, last - at), _WILL_NEED)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's call, which changes no memory whatever its arguments are."""
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    call.restype = ctypes.c_int
    function: Callable[[int, int, int], int] = call
    return function


def num_faults() -> int:
    """For how many pages the calling thread has waited since it started; 0 where unknown."""
    if sys.platform != "linux":
        return 0
    resource = importlib.import_module("resource")
    count: int = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    return count


class RequestedRows:
    """Rows whose pages were requested.

    Attributes:
        keys: The rows of the data set.
    """

    def __init__(self, keys: Sequence[int], table: MappedTable, rows: Indices) -> None:
        self.keys = keys
        self._table = table
        self._rows = rows
        table.request(rows)

    def wait(self) -> None:
        """Waits for the pages that say where values are; requests those of the values."""
        self._table.request_values(self._rows)
