"""Where a conversion writes: files of a directory, or objects of a bucket, and the journal of both.

A local file is written under a hidden name, synced and renamed. An object is uploaded while it is
written, and the last request makes it visible, so neither is ever seen before it is complete. A
journal beside the outputs, `.NAME.converting`, lists those that are finished: a later run of the
same command continues there.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from grainmill import _native
from grainmill._files.messages import Argument, Message
from grainmill._files.parquet_output import ParquetOutput
from grainmill._url import is_url

if TYPE_CHECKING:
    from grainmill._files import formats


@dataclasses.dataclass(frozen=True)
class Shard:
    """An output file, and the records that it gets.

    Attributes:
        path: Its final path, or its URL.
        inputs: The numbers of the inputs.
        first: The number of its first record among those of the inputs.
        count: How many records; `None`: all of the inputs.
    """

    path: str
    inputs: tuple[int, ...]
    first: int = 0
    count: int | None = None

    @property
    def directory(self) -> str:
        """Where it is; the URL of a bucket's directory ends with a slash."""
        if is_url(self.path):
            return self.path.removesuffix(self.name)
        return str(Path(self.path).parent)

    @property
    def name(self) -> str:
        """Its name there."""
        return self.path.rpartition("/")[2] if is_url(self.path) else Path(self.path).name


Records: TypeAlias = "_native.RecordOutput | ParquetOutput"
"""An output that records are copied to."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """How outputs are written.

    Attributes:
        format: Their format.
        options: Its options.
        schema: Of columns, if it has some and one is stated.
        sample: Records that decide about the columns of all outputs; none: each has its own.
    """

    format: formats.Format
    options: str
    schema: str | None
    sample: list[Any] = dataclasses.field(default_factory=list)

    def create(self, path: str, final: str, writer: _native.ObjectWriter | None = None) -> Records:
        """Begins a file, or an object that `writer` writes; `final` is its path at the end."""
        if self.format.name == "parquet":
            return ParquetOutput(
                path, final, self.options, self.schema, sample=self.sample, writer=writer
            )
        options = self.options
        if self.format.name == "bagz" and not path.endswith(".bagz"):
            options = options or "uncompressed"
        return _native.RecordOutput(path, self.format.name, options, writer)


class Outputs:
    """The outputs of a conversion.

    Args:
        shards: The outputs.
        journal: The path or URL of the journal.
        kind: How they are written.
        header: What is converted how; outputs of another conversion are not kept.
        force: Whether existing outputs are replaced.

    Attributes:
        records: Of each output that is finished, by name.
    """

    def __init__(
        self, shards: list[Shard], journal: str, kind: Kind, header: dict[str, Any], *, force: bool
    ) -> None:
        self._shards = shards
        self._journal = journal
        self._kind = kind
        self._header = header
        self._force = force
        self._lock = threading.Lock()
        self._kept: frozenset[str] = frozenset()
        self.records: dict[str, int] = {}

    def kept(self) -> frozenset[str]:
        """The names of those that an interrupted run of this conversion has finished."""
        return self._kept

    def cancel(self) -> None:
        """Makes all that wait for the network fail."""

    def num_sent(self) -> int | None:
        """How many bytes a server has received; `None` where there is none."""
        return None


def identity(path: str) -> list[Any] | None:
    """What tells a file from one that has replaced it; `None` for none."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def identities(paths: list[str]) -> list[list[Any] | None]:
    """The same of files and objects.

    Raises:
        OSError: One of the objects is not there, or cannot be reached.
    """
    urls = [path for path in paths if is_url(path)]
    objects = (list(found) for found in _native.object_identities(urls))
    return [next(objects) if is_url(path) else identity(path) for path in paths]


def busy_error(journal: str, more: str = "") -> FileExistsError:
    """The error of a conversion whose files another one is writing."""
    return FileExistsError(f"{journal}: another conversion is writing these files{more}")


def exists_error(path: str, more: str = "") -> FileExistsError:
    """The error of a conversion that would replace a file."""
    message = Message(f"{path}: exists already{more}; ", Argument("overwrite"), " replaces it")
    return FileExistsError(message)


def resolved(path: str) -> str:
    """What two names of the same file have in common."""
    return path if is_url(path) else str(Path(path).resolve())
