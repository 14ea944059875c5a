"""Lines of text files as a sequential dataset; `grainmill.sources` has its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill._dataset.iter_dataset import IterDataset
from grainmill._dataset.iterator import DatasetIterator
from grainmill._native import RecordCursor
from grainmill._sources.files_in_order import FilesIterator, position_of, state_of
from grainmill._sources.paths import expand, shown
from grainmill._sources.suffixes import suffixes_of
from grainmill._url import absolute

if TYPE_CHECKING:
    from grainmill._sources.record_files import Paths


class JsonLinesIterDataset(IterDataset[bytes]):
    r"""The lines of JSON-lines files, in order, as `bytes`, however the files are compressed.

    Lines are those of `grain.sources.JsonLinesDataSource`, which has random access but needs a scan
    and files that are plain or compressed by gzip, zlib or zstd in frames. This dataset
    decompresses as it reads, also files of one long frame of zstd, of xz and of bzip2, locally and
    in buckets.
    Several files are read one after another;
    `MapDataset.source(expand_paths(path)).map(JsonLinesIterDataset)` is a dataset of datasets,
    which `InterleaveIterDataset` reads at the same time and worker processes share.

    A saved state is the offset of the next line in the decompressed data. To continue there, a
    plain file is read from that byte on. A compressed one is decompressed from the last member of
    gzip, frame of zstd, or stream of xz or bzip2 before it, which the state names, and so from its
    beginning if it has only one, as `gzip`, `zstd`, `xz` and `bzip2` write it; `pigz`, too.
    `pzstd`, `pbzip2`, `bgzip` and files joined by `cat` have many.

    Args:
        paths: A path, or a sequence of paths, as for `expand_paths`: patterns, directories and URLs
            are expanded when the dataset is made. How a file is compressed is recognised by its
            first bytes and its name (`.gz`, `.zst`, `.xz`, `.bz2`).

    Raises:
        FileNotFoundError: No file matches a pattern, or is in a directory. When iterated: there is
            no such file.
        GrainmillError: When read: the compressed data are damaged or cut short, or the file is of
            another kind, binary, or in UTF-16. The lines before the damage are delivered.

    Example:
        >>> import lzma
        >>> with lzma.open("words.jsonl.xz", "wt") as file:
        ...     _ = file.write('{"word": "one"}\n\n{"word": "two"}')
        >>> iterator = iter(grain.sources.JsonLinesIterDataset("words.jsonl.xz"))
        >>> next(iterator), iterator.get_state(), list(iterator)
        (b'{"word": "one"}', {'reader_offset': 16}, [b'{"word": "two"}'])
    """

    _is_native = True  # not where a derived class has another `__iter__`

    def __init__(self, paths: Paths) -> None:
        super().__init__()
        self._paths = expand(paths, suffixes=suffixes_of("jsonl"))

    def __iter__(self) -> DatasetIterator[bytes]:
        if len(self._paths) == 1:
            return _LinesIterator(self._paths[0])
        return FilesIterator(self._paths, _LinesIterator)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._paths)})"


class _LinesIterator(DatasetIterator[bytes]):
    """Reads the lines of one file in order."""

    def __init__(self, path: str) -> None:
        super().__init__()
        # The engine may open the file again, after the working directory has changed.
        self._cursor = RecordCursor(absolute(path), "jsonl")

    def __next__(self) -> bytes:
        line = self._cursor.next()
        if line is None:
            raise StopIteration
        return line

    def get_state(self) -> dict[str, Any]:
        """Returns the offset of the next line, and where decompression begins to get there."""
        return state_of(*self._cursor.place())

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a line.

        Args:
            state: What `get_state` returned.

        Raises:
            ValueError: The state is none of this file.
        """
        self._cursor.seek(*position_of(state))
