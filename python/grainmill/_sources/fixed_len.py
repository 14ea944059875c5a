"""Sources of arrays of one shape; `grainmill.sources` has their names.

Windows of token files and rows of `.npy` and `.npz` files are records of one length to the engine.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from grainmill._interrupts import raise_interrupt
from grainmill._native import FileBytes, GrainmillError
from grainmill._sources.paths import expand_ranges
from grainmill._sources.record_files import RecordFilesSource
from grainmill._sources.suffixes import EXTENSIONS
from grainmill._url import absolute, identified, is_url, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike

    from grainmill._sources.paths import FileRange
    from grainmill._sources.record_files import Paths

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_NPY, _NPZ = EXTENSIONS["npy"]
# More than the longest header that NumPy reads.
_MAX_HEADER_LEN: Final = 16 << 10
# In archives: before the name of a member, and a bit of its flags.
_MEMBER_HEADER_LEN: Final = 30
_ENCRYPTED: Final = 1


class _Stored(NamedTuple):
    """An array in a file.

    Attributes:
        dtype: The type of its values.
        shape: Its shape.
        begin: Where its values begin in the file.
        end: Where they end.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


class FixedLenSource(RecordFilesSource[Any]):
    """Arrays of one shape, each of which is the bytes of one record.

    Args:
        files: The files.
        stored: The arrays in those that say what they have, by path.
        dtype: The type of values.
        shape: The shape of an element.
        stride: After how many values of one record the next one begins.
        header_bytes: How many bytes precede the values in files that are not in `stored`.

    Attributes:
        dtype: The type of values.
    """

    _yields_records = False

    def __init__(
        self,
        files: Sequence[FileRange],
        stored: dict[str, _Stored],
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        stride: int,
        header_bytes: int = 0,
    ) -> None:
        self.dtype = dtype
        self._shape = shape
        # Batches of other values, which have no place in the engine's memory, are stacked.
        self._row = (shape, dtype) if dtype.kind in "biufc" else None
        extents = {absolute(path): (each.begin, each.end) for path, each in stored.items()}
        record_len, value_len = math.prod(shape) * dtype.itemsize, dtype.itemsize
        layout = (record_len, stride * value_len, value_len, header_bytes)
        arguments = (shape, dtype.str, stride, header_bytes)
        super().__init__(files, ("fixed_len", *layout, extents), arguments)

    def _elements(self, records: list[bytes], keys: Sequence[int]) -> list[Any]:  # noqa: ARG002
        # Of an array without axes, its value.
        return [np.frombuffer(record, self.dtype).reshape(self._shape)[()] for record in records]


class TokensDataSource(FixedLenSource):
    """Windows of token files, as arrays of one length, with random access.

    Of flat files of numbers of one type, as nanoGPT (`.bin`), llm.c (`.bin` with a header of 1,024
    bytes) and build-nanogpt (`.npy`) have them. A window does not reach from one file into the
    next, and what is left at the end of a file and shorter than a window is left out. Files have no
    checksums. Where batches follow, windows are copied into their rows by the engine.

    Args:
        paths: A path or a sequence of paths, as for `expand_paths`.
        dtype: The type of tokens, such as `np.uint16`; may be left out for `.npy` files, which
            state it.
        length: How many tokens a window has. For inputs and targets that are shifted by one, it is
            one more than those have.
        stride: After how many tokens the next window begins; by default `length`, so that windows
            do not overlap.
        header_bytes: How many bytes precede the tokens of each file, except `.npy` files.

    Attributes:
        dtype: The type of tokens.

    Raises:
        ValueError: There is no path, an argument is invalid, or a `.npy` file has another type.
        TypeError: `dtype` is not given, or no type of numbers.
        FileNotFoundError: There is no such file.
        GrainmillError: A file has no whole number of tokens, or a damaged header.

    Example:
        >>> np.arange(100, dtype=np.uint16).tofile("train.bin")
        >>> source = grain.sources.TokensDataSource("train.bin", np.uint16, length=9, stride=8)
        >>> len(source), source[1]
        (12, array([ 8,  9, 10, 11, 12, 13, 14, 15, 16], dtype=uint16))
    """

    def __init__(
        self,
        paths: Paths,
        dtype: DTypeLike | None = None,
        *,
        length: int,
        stride: int | None = None,
        header_bytes: int = 0,
    ) -> None:
        stride = length if stride is None else stride
        for name, value in (("length", length), ("stride", stride)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        if header_bytes < 0:
            raise ValueError(f"`header_bytes` must not be negative, got {header_bytes}")
        files = expand_ranges(paths, suffixes=(".bin", _NPY))
        names = dict.fromkeys(file.path for file in files)
        stored = _all_stored([path for path in names if _ends_with(path, _NPY)])
        if dtype is None:
            if len(stored) < len(names):
                path = next(path for path in names if path not in stored)
                raise TypeError(f"{shown(path)}: `dtype` must be given: it does not say its type")
            tokens = next(iter(stored.values())).dtype
        else:
            tokens = np.dtype(dtype)
        if tokens.kind not in "iuf":
            raise TypeError(f"`dtype` must be a type of numbers, got {tokens}")
        for path, each in stored.items():
            if each.dtype != tokens:
                raise ValueError(f"{shown(path)}: tokens are {each.dtype}, expected {tokens}")
        super().__init__(files, stored, tokens, (length,), stride=stride, header_bytes=header_bytes)


class NpyDataSource(FixedLenSource):
    """The rows of `.npy` and `.npz` files of NumPy, as one sequence with random access.

    Row `i` is `array[i]`, without reading the rest: a read-only array, or a number where the array
    has one axis. All arrays must have rows of one shape and type. Where batches follow, rows are
    copied into theirs by the engine. Files may be in buckets, too. Nothing is loaded by `pickle`.

    An array in a `.npz` file can be read where it lies if it is stored, as by `np.savez`; what
    `np.savez_compressed` wrote is refused, since it could only be decompressed as a whole. `.npy`
    files have no checksums, and those of `.npz` files are of whole arrays, and not verified.

    Args:
        paths: A path or a sequence of paths, as for `expand_paths`.
        array: The name of the array in `.npz` files; not needed where they have a single one.

    Attributes:
        dtype: The type of values.

    Raises:
        ValueError: There is no path, no such array, or rows differ.
        FileNotFoundError: There is no such file.
        GrainmillError: A file is damaged, has no rows, Python objects, or compressed arrays, or is
            in Fortran's order.

    Example:
        >>> np.savez("digits.npz", images=np.zeros((10, 8, 8), np.uint8), labels=np.arange(10))
        >>> images = grain.sources.NpyDataSource("digits.npz", array="images")
        >>> labels = grain.sources.NpyDataSource("digits.npz", array="labels")
        >>> len(images), images[3].shape, labels[3]
        (10, (8, 8), np.int64(3))
    """

    def __init__(self, paths: Paths, *, array: str | None = None) -> None:
        files = expand_ranges(paths, suffixes=(_NPY, _NPZ))
        stored = _all_stored(list(dict.fromkeys(file.path for file in files)), array)
        first = next(iter(stored.values()))
        for path, each in stored.items():
            if (each.dtype, each.shape[1:]) != (first.dtype, first.shape[1:]):
                rows = [f"{one.dtype} of shape {one.shape[1:]}" for one in (each, first)]
                raise ValueError(f"{shown(path)}: rows are {rows[0]}, expected {rows[1]}")
        shape = first.shape[1:]
        super().__init__(files, stored, first.dtype, shape, stride=math.prod(shape))


def _all_stored(paths: list[str], array: str | None = None) -> dict[str, _Stored]:
    """The array in each `.npy` file, or the one of that name in each `.npz` file.

    The headers of `.npy` files in buckets are read concurrently.
    """
    known = {}
    far = [path for path in paths if is_url(path) and not _ends_with(path, _NPZ)]
    if len(far) > 1:
        opened = FileBytes.open_all(far)
        lens = [len(file) for file in opened]
        heads = [(0, min(byte_len, _MAX_HEADER_LEN)) for byte_len in lens]
        read = FileBytes.read_all(opened, heads)
        known = dict(zip(far, zip(lens, read, strict=True), strict=True))
    return {path: _stored(path, array, known.get(path)) for path in paths}


def _stored(path: str, array: str | None, known: tuple[int, bytes] | None) -> _Stored:
    """The array in a file, of which the length and the first bytes may be `known`."""
    begin, name = 0, shown(path)
    if known is not None:
        end, first = known
    else:
        file = FileBytes(absolute(path))
        end = len(file)
        if _ends_with(path, _NPZ):
            begin, end, member = _member(file, name, array)
            name = f"{name}: {member}"
        file.seek(begin)
        first = file.read(min(end - begin, _MAX_HEADER_LEN))
    head = io.BytesIO(first)
    try:
        shape, is_fortran, dtype = _header(head)
    except Exception as error:  # whatever the text in it makes of NumPy's parser
        raise_interrupt(error)
        raise GrainmillError(f"{name}: header at byte {begin}: {error}") from None
    begin += head.tell()
    problem = None
    if dtype.hasobject:
        problem = "has Python objects, which only `pickle` reads"
    elif is_fortran:
        problem = "is in Fortran's order, so rows do not lie together; save `np.ascontiguousarray`"
    elif not shape or min(shape) < 0 or not dtype.itemsize or 0 in shape[1:]:
        problem = f"has no rows of values: it is {dtype} of shape {shape}"
    elif begin + math.prod(shape) * dtype.itemsize != end:
        count = (end - begin) // dtype.itemsize
        problem = f"should have {math.prod(shape)} values by its shape {shape}, but has {count}"
    if problem:
        raise GrainmillError(f"{name}: {problem}")
    return _Stored(dtype, shape, begin, end)


def _header(head: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(head)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(head)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(head)
    raise ValueError(f"version {version} of the format is not supported")


def _member(file: FileBytes, name: str, array: str | None) -> tuple[int, int, str]:
    """Where a stored member of a `.npz` file begins and ends, and its name."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Seekable(file))) as archive:
            members = {info.filename.removesuffix(_NPY): info for info in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise_interrupt(error)
        raise GrainmillError(f"{name}: not a `.npz` file: {error}") from None
    known = ", ".join(members) or "none"
    if array is None and len(members) == 1:
        (array,) = members
    if array is None:
        raise ValueError(f"{name}: `array` must name one of its arrays: {known}")
    if array not in members:
        raise ValueError(f"{name}: has no array {array!r}; it has {known}")
    info = members[array]
    if info.flag_bits & _ENCRYPTED or info.compress_type != zipfile.ZIP_STORED:
        raise GrainmillError(
            f"{name}: {info.filename}: is compressed or encrypted, so that rows cannot be read by "
            "themselves; save it by `np.savez`, or load it: `np.load(path)[name]` is a source, too"
        )
    file.seek(max(0, info.header_offset))
    head = file.read(_MEMBER_HEADER_LEN)
    is_cut = info.header_offset < 0 or len(head) < _MEMBER_HEADER_LEN
    if is_cut or head[:4] != b"PK\3\4":
        raise GrainmillError(f"{name}: {info.filename}: no header at byte {info.header_offset}")
    lens = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
    begin = info.header_offset + len(head) + sum(lens)
    end = begin + info.file_size
    if end > len(file):
        raise GrainmillError(f"{name}: {info.filename}: ends at byte {end} of {len(file)}")
    return begin, end, info.filename


class _Seekable(io.RawIOBase):
    """A file of any storage as one of Python, for `zipfile`."""

    def __init__(self, file: FileBytes) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._file)}[whence]
        if base + offset < 0:
            raise ValueError(f"a position of {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._at)
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _ends_with(path: str, suffix: str) -> bool:
    return identified(path).lower().endswith(suffix)
