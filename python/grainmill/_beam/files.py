"""Files wherever Beam's file systems reach: read in the engine, written to their name at once.

Local files are read and written by their path. Of others, the engine reads the ranges of bytes that
it needs; they are written to a local temporary file first, of one shard at a time.
"""

import contextlib
import dataclasses
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from grainmill import _native
from grainmill._materialize import LocalStore, part_name

_COPY_LEN = 1 << 20
_BINARY = "application/octet-stream"


def is_local(path: str) -> bool:
    """Whether a path is one of the local file system."""
    return FileSystems.get_scheme(path) is None


def absolute(path: str | os.PathLike[str]) -> str:
    """A path or pattern that means the same on a worker with another working directory."""
    path = os.fspath(path)
    return str(Path(path).absolute()) if is_local(path) else path


def matched(pattern: str, *, allow_none: bool = False) -> list[str]:
    """The paths of the files that match a pattern, in order.

    Raises:
        FileNotFoundError: There is none.
    """
    (match,) = FileSystems.match([pattern])
    if not match.metadata_list and not allow_none:
        raise FileNotFoundError(f"no file matches `{pattern}`")
    return sorted(str(metadata.path) for metadata in match.metadata_list)


@dataclasses.dataclass(frozen=True)
class BlockFile:
    """A file of records that is read in blocks, the same ones by every worker.

    Attributes:
        path: The path of the file.
        num_records: How many records there are.
        byte_len: Their bytes, about.
        starts: The number of the first record of each block.
    """

    path: str
    num_records: int
    byte_len: float
    starts: Sequence[int]

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.starts)

    @property
    def block_len(self) -> float:
        """The mean size of a block in bytes."""
        return self.byte_len / max(self.num_blocks, 1)

    def start(self, block: int) -> int:
        """The number of the first record of a block, or of all records."""
        return self.starts[block] if block < self.num_blocks else self.num_records


def opened(path: str) -> _native.RecordFiles:
    """An ArrayRecord file."""
    if is_local(path):
        return _native.RecordFiles([(path, 0, None)])
    return _native.RecordFiles.opened_by(_open, [path])


def _open(path: str) -> tuple[int, int, Callable[[int, int], bytes]]:
    """The length of a file, when it was last written, and a function that reads ranges of it."""
    metadata = FileSystems.get_filesystem(path).metadata(path)
    file = open_bytes(path, CompressionTypes.UNCOMPRESSED)
    lock = threading.Lock()  # a file has one position

    def read(at: int, length: int) -> bytes:
        with lock:
            file.seek(at)
            pieces, missing = [], length
            while missing and (piece := file.read(missing)):
                pieces.append(piece)
                missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    weakref.finalize(read, file.close)  # with the engine's last reference
    seconds = metadata.last_updated_in_seconds or 0
    return int(metadata.size_in_bytes), int(seconds * 1_000_000_000), read


def open_bytes(path: str, compression: str) -> BinaryIO:
    """Opens a file for reading."""
    return cast("BinaryIO", FileSystems.open(path, _BINARY, compression_type=compression))


class BeamStore(LocalStore):
    """Beam's file systems."""

    @contextlib.contextmanager
    def placed(self, path: str) -> Iterator[Path]:
        """See `LocalStore.placed`; a file for elsewhere is uploaded."""
        if is_local(path):
            with super().placed(path) as part:
                yield part
            return
        with tempfile.TemporaryDirectory(prefix="grainmill-") as folder:
            local = Path(folder, "part")
            yield local
            _upload(local, path)

    def exists(self, path: str) -> bool:
        """Whether there is a file."""
        return bool(FileSystems.exists(path))

    def read_text(self, path: str) -> str | None:
        """The text of a file; `None` if there is none."""
        if not self.exists(path):
            return None
        with open_bytes(path, CompressionTypes.UNCOMPRESSED) as file:
            return file.read().decode("utf-8")

    def remove(self, path: str) -> None:
        """Deletes a file, if there is one."""
        if self.exists(path):
            FileSystems.delete([path])

    def remove_parts(self, prefix: str, suffix: str) -> None:
        """Deletes what writers of such paths that were killed have left."""
        if is_local(prefix):
            super().remove_parts(prefix, suffix)
            return
        parts = matched(f"{prefix}*{suffix}.*.part", allow_none=True)
        if parts:
            FileSystems.delete(parts)


def _upload(local: Path, path: str) -> None:
    """Copies a file under a temporary name, which is replaced by `path` at the end."""
    part, (folder, _) = part_name(path), FileSystems.split(path)
    with contextlib.suppress(BeamIOError):  # it exists
        FileSystems.mkdirs(folder)
    try:
        out = FileSystems.create(part, _BINARY, compression_type=CompressionTypes.UNCOMPRESSED)
        with contextlib.closing(out), local.open("rb") as file:
            shutil.copyfileobj(file, cast("BinaryIO", out), _COPY_LEN)
        rename([(part, path)])
    except BaseException:
        with contextlib.suppress(BeamIOError):
            FileSystems.delete([part])
        raise


def rename(pairs: Sequence[tuple[str, str]]) -> None:
    """Renames files, replacing those that exist; may be repeated after it was interrupted.

    Raises:
        FileNotFoundError: A file exists under neither of its names.
    """
    for part, path in pairs:
        if is_local(part):
            _rename_local(part, path)
            continue
        try:
            FileSystems.rename([part], [path])
        except BeamIOError:
            if not FileSystems.exists(part):
                if FileSystems.exists(path):
                    continue  # by the call that was interrupted
                raise
            if not FileSystems.exists(path):
                raise
            FileSystems.delete([path])  # this file system does not replace files
            FileSystems.rename([part], [path])


def _rename_local(part: str, path: str) -> None:
    try:
        Path(part).replace(path)
    except FileNotFoundError:
        if not Path(path).exists():
            raise


def delete_folder(folder: str) -> None:
    """Deletes a folder of temporary files, with what writers that were killed have left there."""
    with contextlib.suppress(BeamIOError, FileNotFoundError):  # where nothing has been written
        FileSystems.delete([folder])
