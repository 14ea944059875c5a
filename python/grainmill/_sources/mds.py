"""Data sets of Mosaic Streaming (MDS) as a source; `grainmill.sources` has its name."""

from __future__ import annotations

import functools
import json
import os
import pickle
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from grainmill import _native
from grainmill._interrupts import raise_interrupt
from grainmill._native import GrainmillError
from grainmill._sources.paths import FileRange, listed
from grainmill._sources.record_files import RecordFilesSource, scanned
from grainmill._url import absolute, is_url, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Decode = Callable[[bytes], Any]

_INDEX: Final = "index.json"
_VERSION: Final = 2
# What compresses shards, as it is called in the index and here.
_COMPRESSIONS: Final = {"gz": "gzip", "zstd": "zstd"}
_SCALARS: Final = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
# The codes of types in arrays that state theirs: the bits, and whether values have a sign or parts.
_DTYPES: Final = {
    np.dtype(name).itemsize * 8 + {"u": 0, "i": 1, "f": 2}[np.dtype(name).kind]: np.dtype(name)
    for name in _SCALARS
}
# What the images of `PIL` have in memory: the type of values, and how many a pixel has.
_MODES: Final = {
    "L": ("u1", 1),
    "P": ("u1", 1),
    "LA": ("u1", 2),
    "RGB": ("u1", 3),
    "HSV": ("u1", 3),
    "LAB": ("u1", 3),
    "YCbCr": ("u1", 3),
    "RGBA": ("u1", 4),
    "RGBX": ("u1", 4),
    "CMYK": ("u1", 4),
    "I;16": ("<u2", 1),
    "I": ("<i4", 1),
    "F": ("<f4", 1),
}


class MDSDataSource(RecordFilesSource[dict[str, Any]]):
    r"""The samples of data sets of Mosaic Streaming (MDS), as one sequence with random access.

    Of directories as `streaming.MDSWriter` writes them, with `index.json` and shards, local or in a
    bucket; the package `streaming` is not needed. An element is a dict of the columns, with the
    values that its reader has, except for images: `jpeg` and `png` are the `bytes` of the file, for
    `transforms.DecodeImage`, lists of them lists, and `pil` is an array. Numbers of the encoding
    `int` are Python's, those of others NumPy's. Arrays are read-only.

    Shards that are compressed by `gz` or `zstd` are read where they are; if the shards lie
    decompressed beside them, these are. The first read of a compressed one decompresses all of it
    to find out where samples are, which is kept in an index as of `JsonLinesDataSource`. One of
    `zstd` can only be decompressed as a whole, which is once where samples are read in order, but
    for nearly each sample where they are shuffled globally: decompress it before that. One of more
    than 128 MiB is refused. Neither kind has checksums in it, and those in `index.json` are not
    compared.

    Args:
        paths: A directory, or a sequence of them; or a shard, whose directory has `index.json`. All
            must have the same columns. For a split, name its directory.
        columns: The columns to decode, in this order; all if `None`.
        allow_pickle: Whether to decode columns of the encoding `pkl`. To load a pickle is to run
            what it says: allow it for data that you trust only.
        index_dir: Where indices of compressed shards are written; by default beside the shards, or
            in the cache directory.

    Raises:
        ValueError: There is no path or no such column, a column would be unpickled, shards differ,
            or are compressed by something else.
        FileNotFoundError: There is no `index.json`, or no such shard.
        GrainmillError: A file is damaged.

    Example:
        >>> import json, struct
        >>> columns = {"column_names": ["id", "text"], "column_encodings": ["int", "str"]}
        >>> config = json.dumps({**columns, "column_sizes": [8, None]}).encode()
        >>> samples = [struct.pack("<Iq", 3, 0) + b"one", struct.pack("<Iq", 3, 1) + b"two"]
        >>> begin = 16 + len(config)
        >>> header = struct.pack("<4I", 2, begin, begin + 15, begin + 30)
        >>> with open("shard.00000.mds", "wb") as file:
        ...     size = file.write(header + config + b"".join(samples))
        >>> shard = {"raw_data": {"basename": "shard.00000.mds", "bytes": size}, "zip_data": None}
        >>> shard |= {"version": 2, "format": "mds", "compression": None, "samples": 2}
        >>> with open("index.json", "w") as file:
        ...     json.dump({"version": 2, "shards": [{**shard, **json.loads(config)}]}, file)
        >>> source = grain.sources.MDSDataSource(".")
        >>> len(source), source[1]
        (2, {'id': 1, 'text': 'two'})
    """

    _yields_records = False

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        index_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(columns, str):
            raise ValueError(f"`columns` must be a sequence of names, got {columns!r}")
        given: list[Any] = list(listed(paths))
        shards = [shard for path in given for shard in _shards_of(os.fspath(path))]
        if not shards:
            raise ValueError(f"{shown(os.fspath(given[0]))}: the data set has no shards")
        for shard in shards:
            if shard.columns != shards[0].columns:
                names = [
                    ", ".join(f"{each.name} ({each.encoding})" for each in one.columns)
                    for one in (shard, shards[0])
                ]
                raise ValueError(
                    f"{shown(shard.path)}: has the columns {names[0]}; expected {names[1]}"
                )
        self._columns = shards[0].columns
        known = [column.name for column in self._columns]
        self._names = known if columns is None else [str(name) for name in columns]
        if missing := [name for name in self._names if name not in known]:
            raise ValueError(f"there is no column {missing[0]!r}; there are {known}")
        self._allow_pickle = allow_pickle
        try:
            self._decoders = self._made_decoders()
        except ValueError as failure:
            raise ValueError(f"{shown(shards[0].path)}: {failure}") from None
        files, self._compression = _stored(shards)
        format_of: tuple[Any, ...] = ("mds",)
        if self._compression is not None:
            format_of = scanned("compressed_mds", self._compression, index_dir)
        super().__init__(files, format_of, () if columns is None else (self._names,))

    def _made_decoders(self) -> dict[str, Decode]:
        decoders = {}
        for column in self._columns:
            if column.name not in self._names:
                continue
            if column.encoding == "pkl" and not self._allow_pickle:
                raise ValueError(
                    f"column {column.name!r} has pickles, and to load one is to run what it says: "
                    "leave it out by `columns`, or pass `allow_pickle=True` if you trust the data"
                )
            try:
                decoders[column.name] = decoder_of(column.encoding)
            except ValueError as failure:
                raise ValueError(f"column {column.name!r}: {failure}") from None
        return decoders

    @property
    def column_encodings(self) -> dict[str, str]:
        """The encoding of each column of the data set."""
        return {column.name: column.encoding for column in self._columns}

    @property
    def compression(self) -> str | None:
        """What compresses the shards that are read: `gzip` or `zstd`, or nothing."""
        return self._compression

    def _elements(self, records: list[bytes], keys: Sequence[int]) -> list[dict[str, Any]]:
        elements = []
        for record, key in zip(records, keys, strict=True):
            try:
                elements.append(self._element(record))
            except Exception as failure:
                raise_interrupt(failure)
                path, number = self._record_location(key)
                raise GrainmillError(f"{path}: sample {number}: {failure}") from failure
        return elements

    def _element(self, record: bytes) -> dict[str, Any]:
        num_lens = sum(not column.byte_len for column in self._columns)
        lens = iter(np.frombuffer(record, "<u4", num_lens).tolist())
        at, found = 4 * num_lens, {}
        for column in self._columns:
            begin, at = at, at + (column.byte_len or next(lens))
            decode = self._decoders.get(column.name)
            if decode is not None and at <= len(record):
                try:
                    found[column.name] = decode(record[begin:at])
                except Exception as failure:
                    raise_interrupt(failure)
                    raise ValueError(f"column {column.name!r}: {failure}") from failure
        if at != len(record):
            raise ValueError(f"its columns have {at} bytes, it has {len(record)}")
        return {name: found[name] for name in self._names}

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_decoders": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._decoders = self._made_decoders()


class _Column(NamedTuple):
    """A column: its name, how values are encoded, and their length if all have the same."""

    name: str
    encoding: str
    byte_len: int | None


class _Shard(NamedTuple):
    """A shard, as the index describes it.

    Attributes:
        path: Where it is, not compressed.
        packed_path: Where it is compressed, if it is.
        compression: By what.
        num_samples: How many samples it has.
        columns: Their columns.
    """

    path: str
    packed_path: str | None
    compression: str | None
    num_samples: int
    columns: list[_Column]


def _shards_of(path: str) -> list[_Shard]:
    """The shards of a directory, or the one that `path` names."""
    if is_url(path) and "?" in path:
        raise ValueError(
            f"{shown(path)}: a URL with a query stands for one file, but shards have an index"
        )
    name = path.rstrip("/").rpartition("/")[2]
    is_shard = ".mds" in name and not (not is_url(path) and os.path.isdir(path))  # noqa: PTH112 - `pathlib` takes long to import
    directory = path[: len(path) - len(name)].rstrip("/") or "." if is_shard else path.rstrip("/")
    if name == _INDEX:
        directory = path[: -len(_INDEX)].rstrip("/") or "."
    index = f"{directory or '/'}/{_INDEX}"
    data = _all_bytes(index)
    try:
        shards = [_shard(directory, each) for each in json.loads(data)["shards"]]
    except (LookupError, TypeError, ValueError, RecursionError) as failure:
        raise GrainmillError(
            f"{shown(index)}: no index of Mosaic Streaming, or damaged: {failure!r}"
        ) from failure
    if not is_shard:
        return shards
    named = [shard for shard in shards if name in _names_of(shard)]
    if not named:
        raise ValueError(f"{shown(path)}: is not in {shown(index)}")
    return named


def _names_of(shard: _Shard) -> list[str]:
    paths = [path for path in (shard.path, shard.packed_path) if path is not None]
    return [path.rpartition("/")[2] for path in paths]


def _all_bytes(path: str) -> bytes:
    file = _native.FileBytes(absolute(path))
    parts = []
    while part := file.read(1 << 20):
        parts.append(part)
    return b"".join(parts)


def _shard(directory: str, found: dict[str, Any]) -> _Shard:
    if (found["version"], found["format"]) != (_VERSION, "mds"):
        raise ValueError(f"format {found['format']!r} of version {found['version']}")
    parts = [found[f"column_{part}"] for part in ("names", "encodings", "sizes")]
    columns = [
        _Column(str(name), str(encoding), None if not byte_len else _count(byte_len))
        for name, encoding, byte_len in zip(*parts, strict=True)
    ]
    packed = found["zip_data"]
    compression = found["compression"]
    return _Shard(
        _beside(directory, found["raw_data"]["basename"]),
        _beside(directory, packed["basename"]) if packed else None,
        str(compression).partition(":")[0] if compression else None,
        _count(found["samples"]),
        columns,
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise ValueError(f"a count of {value!r}")
    return value


def _beside(directory: str, name: str) -> str:
    """The path of a file below the directory; an index must not name others."""
    parts = name.replace(os.sep, "/").split("/")
    if "" in parts or ".." in parts or ":" in parts[0]:
        raise ValueError(f"a shard named {name!r}")
    return f"{directory}/{name}"


def _stored(shards: list[_Shard]) -> tuple[list[FileRange], str | None]:
    """The files that are read, and what compresses them."""
    packed = [shard for shard in shards if shard.packed_path is not None]
    if packed and not all(not is_url(each.path) and os.path.exists(each.path) for each in shards):  # noqa: PTH110 - `pathlib` takes long to import
        names = {shard.compression if shard.packed_path else None for shard in shards}
        name = next(iter(names)) if len(names) == 1 else None
        if name not in _COMPRESSIONS:
            text = " and ".join(sorted(f"`{each}`" if each else "nothing" for each in names))
            raise ValueError(
                f"{shown(str(packed[0].packed_path))}: shards are compressed by {text}; those are "
                "read that are all compressed by `gz` or all by `zstd`, and others if all lie "
                f"decompressed beside them, as {shown(shards[0].path)!r}"
            )
        paths = [str(shard.packed_path) for shard in shards]
        compression = _COMPRESSIONS[str(name)]
    else:
        paths, compression = [shard.path for shard in shards], None
    ranges = zip(paths, shards, strict=True)
    files = [FileRange(path, 0, shard.num_samples, is_trusted=True) for path, shard in ranges]
    return files, compression


# --- values ---------------------------------------------------------------------------------------


def decoder_of(encoding: str) -> Decode:
    """What makes values of the bytes of a column.

    Raises:
        ValueError: The encoding is unknown.
    """
    if encoding in _DECODERS:
        return _DECODERS[encoding]
    kind, _, arguments = encoding.partition(":")
    if encoding in _SCALARS:
        return functools.partial(_scalar, np.dtype(encoding).newbyteorder("<"))
    if kind == "ndarray":
        name, _, shape = arguments.partition(":")
        if name and name not in _SCALARS:
            raise ValueError(f"arrays of the type {name!r} are not known")
        dtype = np.dtype(name).newbyteorder("<") if name else None
        return functools.partial(
            _array, dtype, tuple(map(int, shape.split(","))) if shape else None
        )
    raise ValueError(f"the encoding {encoding!r} is not known; choose others by `columns`")


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    (value,) = np.frombuffer(data, dtype)
    return value


def _array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: bytes) -> Any:
    at = 0
    if dtype is None:
        if data[0] not in _DTYPES:
            raise ValueError(f"arrays of the type {data[0]} are not known")
        dtype, at = _DTYPES[data[0]].newbyteorder("<"), 1
    if shape is None:
        num_axes, unit = data[at] >> 2, 1 << data[at] % 4
        begin, at = at + 1, at + 1 + num_axes * unit
        shape = tuple(np.frombuffer(data[begin:at], f"<u{unit}", num_axes).tolist())
    return np.frombuffer(data, dtype, offset=at).reshape(shape)


def _image(data: bytes) -> Any:
    """The pixels of an image as `PIL` has them in memory, as `np.asarray` shows them."""
    width, height, mode_len = np.frombuffer(data, "<u4", 3).tolist()
    mode, pixels = data[12 : 12 + mode_len].decode(), data[12 + mode_len :]
    if mode == "1":
        rows = np.frombuffer(pixels, np.uint8).reshape(height, -(-width // 8))
        return np.unpackbits(rows, axis=1, count=width).astype(np.bool_)
    if mode not in _MODES:
        raise ValueError(f"images of the mode {mode!r} are not known")
    dtype, num_values = _MODES[mode]
    shape = (height, width) if num_values == 1 else (height, width, num_values)
    return np.frombuffer(pixels, dtype).reshape(shape)


def _several(decode: Decode, skipped: int, data: bytes) -> list[Any]:
    """The values of a list: how many they are, their lengths, and one after the other."""
    (count,) = np.frombuffer(data, "<u4", 1, skipped).tolist()
    lens = np.frombuffer(data, "<u4", count, skipped + 4).tolist()
    at, values = skipped + 4 + 4 * count, []
    for byte_len in lens:
        values.append(decode(data[at : at + byte_len]))
        at += byte_len
    if at != len(data):
        raise ValueError(f"{count} values have {at} bytes, of {len(data)}")
    return values


_DECODERS: Final[dict[str, Decode]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda data: int(_scalar(np.dtype("<i8"), data)),
    "str_int": lambda data: int(data.decode()),
    "str_float": lambda data: float(data.decode()),
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": lambda data: json.loads(data.decode()),
    "pkl": pickle.loads,
    "jpeg": bytes,
    "png": bytes,
    "pil": _image,
    "jpeg_array": functools.partial(_several, bytes, 0),
    "jpegarray": functools.partial(_several, bytes, 0),
    "list[jpeg]": functools.partial(_several, bytes, 4),
    "list[png]": functools.partial(_several, bytes, 4),
    "list[pil]": functools.partial(_several, _image, 4),
}
