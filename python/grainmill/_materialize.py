"""A pipeline's elements written to shards, each of which holds a range of positions.

What runs the shards, and where the files are, is up to `grainmill.beam` and `grainmill.ray`. The
content of a shard depends on the pipeline and the numbers only, so that a shard may be written
twice, and at the same time, with the same result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import cloudpickle

from grainmill import GrainmillError, MapDataset, ReadOptions, pipelines
from grainmill.array_record import ArrayRecordWriter

Serialize: TypeAlias = Callable[[Any], bytes]

MANIFEST_SUFFIX = "materialize.json"
# A longer dataset has no end for practical purposes, such as that of `repeat()`.
_MAX_ELEMENTS = 1 << 48
_MAX_REPORTED = 3


@dataclasses.dataclass(frozen=True)
class Shards:
    """The names of shards, and the positions that each holds."""

    prefix: str
    suffix: str
    num_shards: int
    num_elements: int

    def path(self, shard: int) -> str:
        """The name of a shard, such as `prefix-00000-of-00010.array_record`."""
        return f"{self.prefix}-{shard:05}-of-{self.num_shards:05}{self.suffix}"

    def range(self, shard: int) -> tuple[int, int]:
        """The positions of a shard: ranges of lengths that differ by one at most, in order."""
        return (
            self.num_elements * shard // self.num_shards,
            self.num_elements * (shard + 1) // self.num_shards,
        )

    @property
    def manifest(self) -> str:
        """The name of the file that says what the shards hold."""
        return f"{self.prefix}-of-{self.num_shards:05}.{MANIFEST_SUFFIX}"


@dataclasses.dataclass(frozen=True)
class Job:
    """A pipeline and the shards to write; can be pickled."""

    pickled: bytes
    shards: Shards
    options: str
    manifest: dict[str, Any]
    overwrite: bool

    def begin(self, store: LocalStore) -> list[int]:
        """Checks what is there already, and writes the manifest.

        Returns:
            The shards that are still to be written.

        Raises:
            GrainmillError: There are shards of another pipeline, or of an unknown one.
        """
        written = [n for n in range(self.shards.num_shards) if store.exists(self.shards.path(n))]
        text = store.read_text(self.shards.manifest)
        problem = self._problem(text, written)
        if problem is not None:
            if not self.overwrite:
                raise GrainmillError(
                    f"{self.shards.manifest}: {problem}; write under another name, delete the "
                    "files, or say `overwrite=True`"
                )
            for shard in written:
                store.remove(self.shards.path(shard))
            written = []
        if problem is not None or text is None:
            store.write_text(self.shards.manifest, json.dumps(self.manifest, indent=1) + "\n")
        return sorted(set(range(self.shards.num_shards)) - set(written))

    def _problem(self, text: str | None, written: list[int]) -> str | None:
        """Why the shards that are there cannot be kept; `None` if they can."""
        if text is None:
            path = self.shards.path(written[0]) if written else ""
            return f"it is missing, but `{path}` exists" if written else None
        try:
            saved = json.loads(text)
            found = [
                f"{name} was {saved[name]!r}, and is {value!r} now"
                for name, value in self.manifest.items()
                if name != "stages" and saved[name] != value
            ]
            found += pipelines.differences(saved["stages"], self.manifest["stages"])
        except (ValueError, TypeError, KeyError, AttributeError):
            return "it is damaged"
        more = f"; and {len(found) - _MAX_REPORTED} more" if len(found) > _MAX_REPORTED else ""
        text = "; ".join(found[:_MAX_REPORTED]) + more
        return f"the shards are of another pipeline: {text}" if found else None

    def write(self, shard: int, store: LocalStore) -> int:
        """Writes a shard; returns the number of its records."""
        return store.write_records(self.shards.path(shard), self._records(shard), self.options)

    def finish(self, store: LocalStore) -> list[str]:
        """Cleans up after all shards have been written; returns their paths."""
        shards = self.shards
        store.remove_parts(f"{shards.prefix}-", f"-of-{shards.num_shards:05}{shards.suffix}")
        return [shards.path(shard) for shard in range(shards.num_shards)]

    def _records(self, shard: int) -> Iterator[bytes]:
        ds, serialize, read_options = cloudpickle.loads(self.pickled)
        start, stop = self.shards.range(shard)
        if start == stop:  # a slice must not be empty
            return
        for element in ds[start:stop].to_iter_dataset(read_options):
            record = serialize(element) if serialize is not None else element
            if not isinstance(record, bytes):
                made = "`serialize` returned" if serialize is not None else "an element is"
                raise TypeError(
                    f"records must be `bytes`, but {made} a `{type(record).__name__}`; pass a "
                    "function as `serialize`, such as `to_example` for a dict of arrays"
                )
            yield record


class JobOptions(NamedTuple):
    """What `MaterializeDataset` and `materialize` take besides a dataset and where it goes."""

    serialize: Serialize | None
    options: str
    file_name_suffix: str
    read_options: ReadOptions | None
    version: str
    overwrite: bool


def job_of(
    ds: MapDataset[Any],
    num_shards: int,
    file_path_prefix: str | os.PathLike[str],
    options: JobOptions,
) -> Job:
    """Checks the arguments of `MaterializeDataset` and `materialize`."""
    if not isinstance(ds, MapDataset):
        raise TypeError(f"`ds` must be a `MapDataset`, got {type(ds).__name__}")
    if num_shards < 1:
        raise ValueError(f"`num_shards` must be at least 1, got {num_shards}")
    num_elements = len(ds)
    if num_elements > _MAX_ELEMENTS:
        raise ValueError(
            f"`ds` must have an end to be written, got {num_elements} elements; give `repeat` a "
            "number of epochs"
        )
    suffix = options.file_name_suffix
    shards = Shards(os.fspath(file_path_prefix), suffix, num_shards, num_elements)
    manifest = {
        "num_elements": num_elements,
        "num_shards": num_shards,
        "options": options.options,
        "version": options.version,
        "stages": pipelines.describe(ds),
    }
    pickled = pipelines.dumps((ds, options.serialize, options.read_options))
    return Job(pickled, shards, options.options, manifest, options.overwrite)


def part_name(path: str) -> str:
    """A temporary name beside `path` that no other writer has."""
    return f"{path}.{uuid.uuid4().hex}.part"


class LocalStore:
    """Mounted file systems; whatever it writes appears under its name when it is complete."""

    @contextlib.contextmanager
    def placed(self, path: str) -> Iterator[Path]:
        """A local file to write, which gets the name `path` at the end, or is deleted."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        part = Path(part_name(path))
        try:
            yield part
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def exists(self, path: str) -> bool:
        """Whether there is a file."""
        return Path(path).exists()

    def read_text(self, path: str) -> str | None:
        """The text of a file; `None` if there is none."""
        return Path(path).read_text("utf-8") if Path(path).exists() else None

    def write_text(self, path: str, text: str) -> None:
        """Writes a small file."""
        with self.placed(path) as part:
            part.write_text(text, "utf-8")

    def write_records(self, path: str, records: Iterable[bytes], options: str) -> int:
        """Writes an ArrayRecord file; returns the number of its records."""
        count = 0
        with self.placed(path) as part, ArrayRecordWriter(str(part), options) as writer:
            for record in records:
                writer.write(record)
                count += 1
        return count

    def remove(self, path: str) -> None:
        """Deletes a file, if there is one."""
        Path(path).unlink(missing_ok=True)

    def remove_parts(self, prefix: str, suffix: str) -> None:
        """Deletes what writers of such paths that were killed have left."""
        folder, name = os.path.split(prefix)
        part_of = re.compile(rf"{re.escape(name)}.*{re.escape(suffix)}\.[0-9a-f]{{32}}\.part")
        for part in Path(folder).iterdir():
            if part_of.fullmatch(part.name):
                part.unlink(missing_ok=True)
