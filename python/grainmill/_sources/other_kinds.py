"""What nothing here reads: how it is recognised, and what to use instead.

By the first bytes of a file, by the end of its name, or by what a directory has in it. The files of
such a directory are refused by all sources, which would read other records than it has.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_UNPACKED = "decompress it"


class Kind(NamedTuple):
    """A kind of files or directories.

    Attributes:
        title: What it is, with an article.
        do: What to do.
        page: The title of the page of the documentation that says more, if one does.
        section: That of its section, if it has one.
        begins: A regular expression for the first bytes.
        ends: What names end with, in lower case.
        has: Whether a directory is of this kind, given the paths below it; those of directories,
            if there are any, end with `/`.
        key_of_index: What the file `index.json` of such a directory has in it, if it has one.
        has_own_reader: Whether sources read its files in a way of their own.
        whatever_name: Whether it is one even where the name says a format that is read.
    """

    title: str
    do: str
    page: str = ""
    section: str = ""
    begins: bytes = b""
    ends: tuple[str, ...] = ()
    has: Callable[[Collection[str]], bool] | None = None
    key_of_index: bytes = b""
    has_own_reader: bool = False
    whatever_name: bool = False

    def message(self, path: str) -> str:
        """The message for a file or directory of this kind."""
        section = f'"{self.section}" on ' if self.section else ""
        where = f"; see {section}the page *{self.page}*" if self.page else ""
        return f"{path}: {self.title}, which is not read as records: {self.do}{where}"


def _recipe(title: str, do: str, section: str, **recognised: Any) -> Kind:
    return Kind(title, do, "Recipes for other files", section, **recognised)


def _has(*names: str) -> Callable[[Collection[str]], bool]:
    return lambda found: any(name in found for name in names)


def _has_below(directory: str, end: str = "") -> Callable[[Collection[str]], bool]:
    return lambda found: any(name.startswith(directory) and name.endswith(end) for name in found)


def _has_partitions(names: Collection[str]) -> bool:
    shown = [name for name in names if not name.startswith((".", "_"))]
    return bool(shown) and all("=" in name.partition("/")[0] and "/" in name for name in shown)


# The first that recognises something decides, so what others consist of comes last.
KINDS = (
    Kind(
        "a pointer of Git LFS in place of the file",
        "fetch the file by `git lfs pull`",
        begins=rb"version https://git-lfs\.github\.com/spec/",
        whatever_name=True,
    ),
    Kind(
        "a page of HTML, perhaps a server's error in place of the file",
        "download the file again",
        begins=rb"(?i)\s*<(?:!doctype )?html",
        whatever_name=True,
    ),
    _recipe(
        "an HDF5 file",
        "read it by `h5py`",
        "HDF5",
        begins=rb"\x89HDF\r\n\x1a\n",
        ends=(".h5", ".hdf5"),
    ),
    Kind(
        "a Feather file of version 1",
        "write it anew by `feather.write_feather(feather.read_table(path), path)` of `pyarrow`",
        begins=rb"FEA1",
        whatever_name=True,
    ),
    _recipe(
        "an Avro file", "convert it by `fastavro`", "Avro", begins=rb"Obj\x01", ends=(".avro",)
    ),
    _recipe(
        "an ORC file",
        "convert it by `pyarrow.orc`, as a CSV file",
        "CSV",
        begins=rb"ORC",
        ends=(".orc",),
    ),
    _recipe(
        "a CSV file",
        "convert it by `pyarrow.csv`",
        "CSV",
        ends=(".csv", ".tsv", ".csv.gz", ".tsv.gz"),
    ),
    _recipe(
        "a JSON array",
        "convert it into JSON lines",
        "JSON arrays",
        begins=rb"(?:\xef\xbb\xbf)?\s*\[",
    ),
    _recipe(
        "a compressed tar file",
        _UNPACKED,
        "Compressed tar files",
        ends=(".tar.xz", ".txz", ".tar.bz2", ".tbz2", ".tbz", ".tar.lz4"),
        whatever_name=True,
    ),
    Kind(
        "an image",
        "`transforms.DecodeImage` decodes the bytes of a record",
        "Images",
        begins=rb"\xff\xd8\xff|\x89PNG\r\n|GIF8[79]a|RIFF....WEBP|....ftypavi[fs]",
    ),
    Kind(
        "a sound or video file",
        "decode its bytes in a function of your own",
        begins=rb"RIFF....WAVE|fLaC|OggS|ID3|\xff\xfb|....ftyp|\x1a\x45\xdf\xa3",
    ),
    Kind(
        "a file of PyTorch",
        "`MapDataset.source` takes what `torch.load` returns, if it has rows",
        ends=(".pt", ".pth"),
    ),
    Kind(
        "a file of tensors",
        "load it by `safetensors.numpy.load_file`",
        begins=rb"......\x00\x00\{\"",
        ends=(".safetensors",),
    ),
    Kind(
        "a pickle",
        "if you trust it, `MapDataset.source` takes what it loads as, if that has rows",
        begins=rb"\x80[\x02-\x05]",
        ends=(".pkl", ".pickle"),
    ),
    Kind(
        "an SQLite database",
        "read it by `sqlite3`, in a source of your own",
        "Data sources",
        "Your own source",
        begins=rb"SQLite format 3\x00",
    ),
    Kind(
        "an LMDB database",
        "read it by `lmdb`, in a source of your own",
        "Data sources",
        "Your own source",
        begins=rb".{16}\xde\xc0\xef\xbe",
        ends=(".mdb",),
    ),
    Kind(
        "a NetCDF file",
        "read it by `xarray`, in a source of your own",
        "Data sources",
        "Your own source",
        begins=rb"CDF[\x01\x02\x05]",
        ends=(".nc",),
    ),
    Kind("a spreadsheet", "convert it to CSV first", ends=(".xls", ".xlsx", ".ods")),
    Kind("a zip archive", "unpack it", begins=rb"PK\x03\x04"),
    Kind("a 7z archive", "unpack it", begins=rb"7z\xbc\xaf\x27\x1c"),
    Kind("compressed by xz", _UNPACKED, begins=rb"\xfd7zXZ\x00"),
    Kind("compressed by bzip2", _UNPACKED, begins=rb"BZh[1-9]1AY&SY"),
    Kind("compressed by LZ4", _UNPACKED, begins=rb"\x04\x22\x4d\x18"),
    _recipe(
        "a table of Delta Lake",
        "`deltalake` says which of its files belong to a version",
        "Delta Lake",
        has=_has_below("_delta_log/"),
    ),
    _recipe(
        "an Iceberg table",
        "`pyiceberg` says which of its files belong to a snapshot",
        "Iceberg",
        has=_has_below("metadata/", ".metadata.json"),
    ),
    _recipe(
        "a Zarr array or group",
        "read it by `zarr`",
        "Zarr",
        has=_has("zarr.json", ".zarray", ".zgroup"),
    ),
    _recipe("a data set of LitData", "read it by `litdata`", "LitData", key_of_index=b'"chunks"'),
    _recipe(
        "a directory of Hive partitions",
        "`pyarrow.dataset` finds its files and the values of their columns",
        "Hive partitions",
        has=_has_partitions,
    ),
    Kind(
        "a data set that Hugging Face saved",
        "`datasets.load_from_disk` opens it for `HuggingFaceDataSource`",
        "Hugging Face",
        has=lambda names: "state.json" in names and "dataset_info.json" in names,
        has_own_reader=True,
    ),
)


def entries(path: str) -> list[str]:
    """The names in a directory; those of directories end with `/`."""
    with os.scandir(path) as found:
        return [f"{entry.name}/" if entry.is_dir() else entry.name for entry in found]


def of_directory(path: str, names: Collection[str]) -> Kind | None:
    """The kind of a directory, given its `entries`, if it is one of these."""
    below, index = (os.path.join(path, name) for name in ("metadata", "index.json"))  # noqa: PTH118
    names, text = [*names], b""
    with contextlib.suppress(OSError):
        if "metadata/" in names:
            names += [f"metadata/{name}" for name in entries(below)]
    with contextlib.suppress(OSError):
        if "index.json" in names:
            with open(index, "rb") as file:  # noqa: PTH123 - see paths.py
                text = file.read()
    return of_names(names, text)


def of_names(names: Collection[str], index: bytes = b"") -> Kind | None:
    """The kind of a directory with these paths below it, and what its `index.json` has in it."""
    names = frozenset(names)
    for kind in KINDS:
        is_named = kind.has is not None and kind.has(names)
        if is_named or (kind.key_of_index and kind.key_of_index in index):
            return kind
    return None


def of_file(path: str, first: bytes) -> Kind | None:
    """The kind of a file, if it is one of these, by its first bytes or its name."""
    name = path.lower()
    for kind in KINDS:
        begins = kind.begins and re.match(kind.begins, first, re.DOTALL)
        if begins or (kind.ends and name.endswith(kind.ends)):
            return kind
    return None
