"""Writing a `PCollection` to ArrayRecord files, which get their names together at the end."""

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import apache_beam as beam
from apache_beam.coders.coders import Coder, ToBytesCoder
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.window import GlobalWindows

from grainmill import GrainmillError
from grainmill._beam.files import BeamStore, absolute, delete_folder, matched, rename
from grainmill._beam.sorting import Keyed, sorted_records
from grainmill.array_record import ArrayRecordWriter

OrderBy: TypeAlias = Callable[[Any], Any]

TEMPLATE = "-SSSSS-of-NNNNN"


class WriteToArrayRecord(beam.PTransform):  # type: ignore[misc]
    """Writes a bounded `PCollection` to ArrayRecord files.

    The first arguments are those of Beam's own file sinks. Workers write to temporary files in a
    folder beside the output; when all are complete, they are renamed, and what attempts that failed
    have left is deleted. So no file is visible under its name before everything has been written,
    and a bundle that is tried again neither repeats nor loses records. It yields the paths.

    With `num_shards`, the content of each file follows from the elements alone, whatever the runner
    and its bundles: equal elements give equal files, byte by byte. Without `order_by`, the shard of
    a record and its place in it are given by a hash of its bytes, which also shuffles. With
    `order_by`, a shard is sorted by the keys; records with the integer key `k` are in shard
    `k % num_shards`, so with the keys 0, 1, 2, ... record `j` of shard `s` has the key
    `j * num_shards + s`. Shards are sorted on local disk, within 64 MiB of memory.

    Without `num_shards`, each bundle is written as a file, in the order in which the runner
    delivers its records: that is cheapest, and the number of files and the order are up to the
    runner.

    Args:
        file_path_prefix: What the paths begin with, of any of Beam's file systems. Files elsewhere
            than on a mounted file system are written to local disk first, one per worker thread.
        file_name_suffix: What the paths end with.
        num_shards: The number of files; 0 leaves it to the runner.
        shard_name_template: What is between prefix and suffix: runs of `S` and `N` stand for the
            number of the shard and of all; `-SSSSS-of-NNNNN` if `None`.
        coder: Encodes elements that are not `bytes`.
        options: Options of an `ArrayRecordWriter`.
        order_by: A function from an element to its key: an integer, text, `bytes` or a tuple of
            them, of the same type for all.
        overwrite: Whether files with these names may be replaced.

    Raises:
        ValueError: `num_shards` is negative, or `order_by` is given without `num_shards`.
        FileExistsError: When it is applied, and there are such files.

    Example:
        >>> import apache_beam as beam
        >>> from grainmill.array_record import ArrayRecordReader
        >>> from grainmill.beam import WriteToArrayRecord
        >>> with beam.Pipeline() as pipeline:
        ...     words = pipeline | beam.Create([b"three", b"a", b"to"])
        ...     paths = words | WriteToArrayRecord("w", ".array_record", 1, order_by=len)
        >>> ArrayRecordReader("w-00000-of-00001.array_record").read_all()
        [b'a', b'to', b'three']
    """

    def __init__(
        self,
        file_path_prefix: str | os.PathLike[str],
        file_name_suffix: str = "",
        num_shards: int = 0,
        shard_name_template: str | None = None,
        coder: Coder = ToBytesCoder(),  # noqa: B008 - it has no state
        *,
        options: str = "group_size:1",
        order_by: OrderBy | None = None,
        overwrite: bool = False,
    ) -> None:
        super().__init__()
        if num_shards < 0:
            raise ValueError(f"`num_shards` must not be negative, got {num_shards}")
        if order_by is not None and not num_shards:
            raise ValueError("`order_by` needs `num_shards`: other files have no order")
        template = TEMPLATE if shard_name_template is None else shard_name_template
        self._names = Names(absolute(file_path_prefix), template, file_name_suffix)
        self._num_shards, self._coder, self._options = num_shards, coder, options
        self._order_by, self._overwrite = order_by, overwrite

    def expand(self, pcoll: Any) -> Any:
        """Applies the transform; Beam calls this.

        Args:
            pcoll: The elements.

        Returns:
            The paths of the files.
        """
        names, num_shards = self._names, self._num_shards
        names.check(overwrite=self._overwrite)
        once = pcoll.pipeline | "Once" >> beam.Create([None])
        folder = beam.pvalue.AsSingleton(once | "Begin" >> beam.Map(_begin, names))
        pcoll = pcoll | "One window" >> beam.WindowInto(GlobalWindows())
        if num_shards:
            assign = _Assign(num_shards, self._coder, self._order_by)
            every = pcoll.pipeline | "Every shard" >> beam.Create(range(num_shards))
            parts = (
                (
                    pcoll | "Assign" >> beam.ParDo(assign),
                    every | "Without record" >> beam.Map(_nothing),
                )
                | "Both" >> beam.Flatten()
                | "Group" >> beam.GroupByKey()
                | "Write" >> beam.ParDo(_WriteShard(self._options), folder)
            )
        else:
            parts = pcoll | "Write" >> beam.ParDo(_WriteBundle(self._options, self._coder), folder)
        return once | "Finish" >> beam.FlatMap(
            finish,
            names,
            num_shards,
            self._options,
            folder,
            beam.pvalue.AsList(parts),
            overwrite=self._overwrite,
        )


class Names:
    """The names of shards."""

    def __init__(self, prefix: str, template: str, suffix: str) -> None:
        self.prefix, self._template, self.suffix = prefix, template, suffix

    def path(self, shard: int, num_shards: int) -> str:
        """The path of a shard."""
        return self.prefix + self._filled(f"{shard}", f"{num_shards}") + self.suffix

    def existing(self) -> list[str]:
        """The files with any number that are there."""
        pieces = re.split("(S+|N+)", f"{self._template}{self.suffix}")
        # Every other piece is a run of the template.
        pattern = "*".join(pieces[::2])
        name = re.compile(r"\d+".join(map(re.escape, pieces[::2])) + "$")
        return list(filter(name.search, matched(self.prefix + pattern, allow_none=True)))

    def check(self, *, overwrite: bool) -> None:
        """Raises a `FileExistsError` if there are files already.

        Called when the pipeline is built: one that is tried again finds its own.
        """
        existing = self.existing()
        if existing and not overwrite:
            raise FileExistsError(
                f"{existing[0]}: the file exists ({len(existing)} of this name); delete it, write "
                "under another name, or say `overwrite=True`"
            )

    def _filled(self, shard: str, num_shards: str) -> str:
        values = {"S": shard, "N": num_shards}
        return re.sub("S+|N+", lambda run: values[run[0][0]].zfill(len(run[0])), self._template)


def _begin(_: None, names: Names) -> str:
    """The folder for temporary files."""
    return f"{names.prefix}.{uuid.uuid4().hex}.tmp"


def _nothing(shard: int) -> tuple[int, None]:
    """So that a shard without records is written, too."""
    return shard, None


class _Assign(beam.DoFn):  # type: ignore[misc]
    """From elements to shards, keys and records."""

    def __init__(self, num_shards: int, coder: Coder, order_by: OrderBy | None) -> None:
        self._num_shards, self._coder, self._order_by = num_shards, coder, order_by

    def process(self, element: Any) -> Iterator[tuple[int, Keyed]]:
        record = encoded(element, self._coder)
        if self._order_by is None:
            key: Any = hashlib.blake2b(record, digest_size=8).digest()
            shard = int.from_bytes(key, "big") % self._num_shards
        else:
            key = self._order_by(element)
            shard = _place(key) % self._num_shards
        yield shard, (key, record)


def encoded(element: Any, coder: Coder) -> bytes:
    """The record of an element."""
    return element if isinstance(element, bytes) else bytes(coder.encode(element))


def _place(key: Any) -> int:
    if isinstance(key, int):
        return key
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class _WriteShard(beam.DoFn):  # type: ignore[misc]
    """Writes the records of a shard to a temporary file."""

    def __init__(self, options: str) -> None:
        self._options = options

    def process(
        self, element: tuple[int, Iterable[Keyed | None]], folder: str
    ) -> Iterator[tuple[int, str]]:
        shard, pairs = element
        records = sorted_records(pair for pair in pairs if pair is not None)
        part = FileSystems.join(folder, f"{shard}-{uuid.uuid4().hex}")
        BeamStore().write_records(part, records, self._options)
        yield shard, part


class _WriteBundle(beam.DoFn):  # type: ignore[misc]
    """Writes each bundle to a temporary file."""

    def __init__(self, options: str, coder: Coder) -> None:
        self._options, self._coder = options, coder

    def start_bundle(self) -> None:
        self._writer: ArrayRecordWriter | None = None
        self._placed = contextlib.ExitStack()

    def process(self, element: Any, folder: str) -> None:
        if self._writer is None:
            self._part = FileSystems.join(folder, f"bundle-{uuid.uuid4().hex}")
            local = self._placed.enter_context(BeamStore().placed(self._part))
            self._writer = ArrayRecordWriter(str(local), self._options)
        self._writer.write(encoded(element, self._coder))

    def finish_bundle(self) -> Iterator[Any]:
        if self._writer is not None:
            self._writer.close()
            self._placed.close()
            self._writer = None
            yield GlobalWindows.windowed_value((0, self._part))


def finish(
    _: None,
    names: Names,
    num_shards: int,
    options: str,
    folder: str,
    parts: list[tuple[int, str]],
    *,
    overwrite: bool,
) -> list[str]:
    """Gives the files their names; may be repeated after it was interrupted."""
    store = BeamStore()
    ordered = [part for _, part in sorted(parts)]
    if num_shards and len(ordered) != num_shards:
        raise GrainmillError(f"{len(ordered)} of {num_shards} shards were written")
    if not ordered:  # a set of files has at least one
        ordered = [FileSystems.join(folder, "empty")]
        if not store.exists(names.path(0, 1)):
            store.write_records(ordered[0], [], options)
    paths = [names.path(shard, len(ordered)) for shard in range(len(ordered))]
    outdated = set(names.existing()) - set(paths) if overwrite else set()
    rename(list(zip(ordered, paths, strict=True)))
    for path in outdated:  # of an earlier run with another number, which is overwritten
        store.remove(path)
    delete_folder(folder)
    return paths
