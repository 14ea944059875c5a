"""Data sources: the interface of any source, and those of files, tables and data sets."""

import hashlib
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, SupportsIndex, TypeVar, runtime_checkable

from grainmill._lazy_names import lazy_names
from grainmill._sources.paths import expand, expand_ranges, file_range
from grainmill._sources.record_files import RecordFilesSource
from grainmill._sources.suffixes import suffixes_of
from grainmill._url import absolute
from grainmill.array_record import check_reader_options

if TYPE_CHECKING:
    from grainmill._shared_memory_source import SharedMemoryDataSource
    from grainmill._sources.arrow import ArrowDataSource
    from grainmill._sources.bagz import BagzDataSource
    from grainmill._sources.fixed_len import NpyDataSource, TokensDataSource
    from grainmill._sources.folder import FolderDataSource
    from grainmill._sources.hugging_face import HuggingFaceDataSource, HuggingFaceIterDataset
    from grainmill._sources.json_lines import JsonLinesDataSource
    from grainmill._sources.json_lines_dataset import JsonLinesIterDataset
    from grainmill._sources.mds import MDSDataSource
    from grainmill._sources.megatron import MegatronDataSource
    from grainmill._sources.mixture import mix_from_text, parse_mixture
    from grainmill._sources.parquet import ParquetDataSource
    from grainmill._sources.tfrecord import TFRecordDataSource
    from grainmill._sources.web_dataset import WebDatasetDataSource
else:
    # Imported when they are used: what they need takes long to import.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grainmill._shared_memory_source": ["SharedMemoryDataSource"],
            "grainmill._sources.arrow": ["ArrowDataSource"],
            "grainmill._sources.bagz": ["BagzDataSource"],
            "grainmill._sources.folder": ["FolderDataSource"],
            "grainmill._sources.fixed_len": ["NpyDataSource", "TokensDataSource"],
            "grainmill._sources.hugging_face": ["HuggingFaceDataSource", "HuggingFaceIterDataset"],
            "grainmill._sources.json_lines": ["JsonLinesDataSource"],
            "grainmill._sources.json_lines_dataset": ["JsonLinesIterDataset"],
            "grainmill._sources.mds": ["MDSDataSource"],
            "grainmill._sources.megatron": ["MegatronDataSource"],
            "grainmill._sources.mixture": ["mix_from_text", "parse_mixture"],
            "grainmill._sources.parquet": ["ParquetDataSource"],
            "grainmill._sources.tfrecord": ["TFRecordDataSource"],
            "grainmill._sources.web_dataset": ["WebDatasetDataSource"],
        },
    )


__all__ = [
    "ArrayRecordDataSource",
    "ArrowDataSource",
    "BagzDataSource",
    "FolderDataSource",
    "HuggingFaceDataSource",
    "HuggingFaceIterDataset",
    "JsonLinesDataSource",
    "JsonLinesIterDataset",
    "MDSDataSource",
    "MegatronDataSource",
    "NpyDataSource",
    "ParquetDataSource",
    "RandomAccessDataSource",
    "RangeDataSource",
    "SharedMemoryDataSource",
    "TFRecordDataSource",
    "TokensDataSource",
    "WebDatasetDataSource",
    "expand_paths",
    "mix_from_text",
    "parse_mixture",
]


T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class RandomAccessDataSource(Protocol[T_co]):
    """Any object with `len` and indexing by position, which can be a source.

    `isinstance` checks for both methods. If an object also has `__getitems__(keys)`, which returns
    a list, pipelines call it for many records at once. Several threads may read a source at the
    same time, and it is pickled for worker processes.

    Example:
        >>> class Words:
        ...     def __init__(self, text):
        ...         self.words = text.split()
        ...
        ...     def __len__(self):
        ...         return len(self.words)
        ...
        ...     def __getitem__(self, record_key):
        ...         return self.words[record_key]
        >>> isinstance(Words("one two"), grain.sources.RandomAccessDataSource)
        True
        >>> list(grain.MapDataset.source(Words("one two")))
        ['one', 'two']
    """

    def __len__(self) -> int:
        """Returns the number of records."""

    if TYPE_CHECKING:  # a source may name its parameter as it likes

        def __getitem__(self, index: SupportsIndex, /) -> T_co: ...
    else:

        def __getitem__(self, index: SupportsIndex) -> T_co:
            """Returns the record at a position.

            Args:
                index: From 0 to `len(self) - 1`.
            """


@runtime_checkable
class FileInstruction(Protocol):
    """A file and a range of its records; any object with these attributes.

    Attributes:
        filename: The path of the file.
        skip: Number of records to skip at its start.
        take: Number of records to read after that.
        examples_in_shard: Number of records in the file; not used. Whoever made this object knows
            the file, so it is opened when it is first read.
    """

    filename: str
    skip: int
    take: int
    examples_in_shard: int


PathLike = str | os.PathLike[str] | FileInstruction


class _Instruction:
    """A range of records that the file has."""

    def __init__(self, path: str) -> None:
        self.filename, self.skip, take, _ = file_range(path)
        self.take = take or 0
        self.examples_in_shard = self.skip + self.take


class ArrayRecordDataSource(RecordFilesSource[bytes]):
    """The records of ArrayRecord files, as one sequence of `bytes`.

    It can be indexed from 0 to `len(source) - 1`; other positions raise a `ValueError`. Pipelines
    read it in blocks, in the engine. Its pickle contains paths and numbers of records. Checksums
    are verified when a record is read; damage raises a `GrainmillError` that names the file.

    States of a `DataLoader` contain `repr`, which has a hash of the paths. It is that of Grain, so
    it does not tell ranges of a file apart, except for those of `from_tfds_dir`.

    Args:
        paths: A path, a `FileInstruction`, or a sequence of them, as for `expand_paths`. A path may
            be a URL, such as `s3://bucket/name`, `gs://`, `az://` or `https://`. A string of the
            form `path[a:b]` selects records `a` to `b - 1` of that file, which must have them.
            Files of a `FileInstruction` are opened when they are first read, all others
            immediately.
        reader_options: Options of an `ArrayRecordReader`, as a dict. They are checked, but have no
            effect.
        index: Path of an index file with the number of records of each file, so that no file has
            to be opened before it is read. It is written if it does not exist or does not contain
            all files; those it lacks are opened for that. If the length or modification time of a
            file differs from the index, its first read raises an error; delete the index then.

    Raises:
        ValueError: A path has an unsupported type, there is none, a range is reversed, an option is
            invalid, or the index is damaged.
        FileNotFoundError: There is no such file, or none that matches.
        IndexError: A file has fewer records than its range needs.

    Example:
        >>> from grainmill.array_record import ArrayRecordWriter
        >>> for name in ("0.array_record", "1.array_record"):
        ...     with ArrayRecordWriter(name, "group_size:1") as writer:
        ...         writer.write(name.encode())
        >>> source = grain.sources.ArrayRecordDataSource(["0.array_record", "1.array_record"])
        >>> len(source), source[1]
        (2, b'1.array_record')
        >>> list(grain.MapDataset.source(source).map(bytes.decode))
        ['0.array_record', '1.array_record']
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        reader_options: dict[str, str] | None = None,
        *,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        files = expand_ranges(paths, suffixes=suffixes_of("array_record"), looks_up=index is None)
        self._reader_options = dict(reader_options or {})
        if "readahead_buffer_size" in self._reader_options:
            raise ValueError("Option readahead_buffer_size is present more than once")
        check_reader_options(self._reader_options)
        self._features: dict[str, Any] | None = None
        # Files with their ranges, if `repr` is to tell these apart.
        self._named: list[str] | None = None
        entries = None
        if index is not None:
            from grainmill._index_file import read_entries  # noqa: PLC0415

            entries = read_entries(os.fspath(index), [absolute(file.path) for file in files])
        super().__init__(files, entries=entries)

    @classmethod
    def from_tfds_dir(cls, path: str | os.PathLike[str], split: str = "train") -> Self:
        """The records of a split of a directory that TensorFlow Datasets has written.

        They are serialized `tf.train.Example` messages of the fields in `features`. The numbers of
        records come from `dataset_info.json`, so no file is opened before it is read.

        Args:
            path: The directory of one version, with `dataset_info.json`, or its URL. Its files
                must have the format `array_record`.
            split: The name of a split, or `all`; with a range of records (`train[100:200]`),
                percent (`train[:10%]`, rounded to the nearest record) or files (`train[2shard:]`),
                whose bounds may be negative; or several, joined by `+`. `repr` tells all of them
                apart.

        Raises:
            FileNotFoundError: There is no `dataset_info.json`.
            ValueError: The files have another format, there is no such split, it is empty or not
                understood, or `dataset_info.json` is damaged.
        """
        from grainmill._sources.tfds import read_directory  # noqa: PLC0415

        found = read_directory(path, split)
        source = cls([_Instruction(path) for path in found.paths])
        source._named = found.paths
        source._features = found.features
        return source

    @property
    def features(self) -> dict[str, Any] | None:
        """The contents of `features.json`, if it is from `from_tfds_dir`; else `None`."""
        return self._features

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened = None

    def __repr__(self) -> str:
        # Saved states contain this text, so it is the same as in the `array_record` package.
        named = self._paths if self._named is None else self._named
        digest = hashlib.sha1("".join(named).encode(), usedforsecurity=False)
        return f"ArrayRecordDataSource(hash_of_paths={digest.hexdigest()})"

    def _checked(self, record_key: SupportsIndex) -> int:
        key = operator.index(record_key)
        if not 0 <= key < self._len:
            raise ValueError(
                f"Record key should be in [0, num_records), got {key} of {self._len} records"
            )
        return key


def expand_paths(paths: PathLike | Sequence[PathLike]) -> list[str]:
    """Returns the files that a path argument stands for; every source of files takes such.

    A string may be

    - a path, which stands for itself if the file exists, whatever characters it has;
    - a glob pattern: `*`, `?` and `[...]` within a name, `**` for any directories, in sorted order;
    - `name@N` or `name@N.suffix`, the shards `name-00000-of-0000N`; with `*` in place of the
      number, as many as there are;
    - a directory: its files in sorted order, without those that start with `.` or `_`. Sources take
      only those with a suffix of their format;
    - one of these as a URL. Patterns and URLs that end with `/` list the objects of a bucket;
    - with `[a:b]` at its end, records `a` to `b - 1` of that file.

    Args:
        paths: A path, a `FileInstruction`, or a sequence of them.

    Raises:
        ValueError: The argument is empty or of an unsupported type, a range is reversed or
            concerns several files, or a directory is a table of Delta Lake or another whose files
            are not its records.
        FileNotFoundError: A pattern matches no file, or a directory has none.

    Example:
        >>> from pathlib import Path
        >>> for name in ("b-1.txt", "a-1.txt", "a-2.txt"):
        ...     _ = Path(name).write_text("")
        >>> grain.sources.expand_paths(["a-*.txt", "b-1.txt[0:5]", "c@2"])
        ['a-1.txt', 'a-2.txt', 'b-1.txt[0:5]', 'c-00000-of-00002', 'c-00001-of-00002']
    """
    return expand(paths)


class RangeDataSource:
    """The integers of `range(start, stop, step)`, as a source for tests and examples.

    Indices outside `0 <= index < len(source)` raise an `IndexError`.

    Args:
        start: The first integer.
        stop: The end (exclusive).
        step: The difference between consecutive integers, not 0.

    Raises:
        ValueError: `step` is 0.

    Example:
        >>> list(grain.sources.RangeDataSource(0, 6, 2))
        [0, 2, 4]
    """

    def __init__(self, start: int, stop: int, step: int) -> None:
        if step == 0:
            raise ValueError("`step` must not be 0")
        self._range = range(start, stop, step)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, record_key: SupportsIndex) -> int:
        index = operator.index(record_key)
        if not 0 <= index < len(self._range):
            raise IndexError(f"Index {index} out of range for {len(self._range)}")
        return self._range[index]

    def __repr__(self) -> str:
        """Saved states contain this text, so it must not change."""
        numbers = self._range
        return f"RangeDataSource(start={numbers.start}, stop={numbers.stop}, step={numbers.step})"
