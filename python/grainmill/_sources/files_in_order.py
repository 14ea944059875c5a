"""What sequential datasets of record files have in common, whatever their format."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from grainmill._dataset.iterator import DatasetIterator
from grainmill._interrupts import raise_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OFFSET, _START = "reader_offset", "decompress_from"


class FilesIterator(DatasetIterator[bytes]):
    """Reads the records of several files, one file after another.

    Args:
        paths: The files, at least one.
        open_file: Makes an iterator of one file.
    """

    def __init__(
        self, paths: Sequence[str], open_file: Callable[[str], DatasetIterator[bytes]]
    ) -> None:
        super().__init__()
        self._paths = paths
        self._open_file = open_file
        self._open(0)

    def _open(self, file_index: int) -> None:
        self._records = self._open_file(self._paths[file_index])
        self._file_index = file_index

    def __next__(self) -> bytes:
        while True:
            try:
                return next(self._records)
            except StopIteration as stop:
                raise_interrupt(stop)
                if self._file_index + 1 == len(self._paths):
                    raise
            self._open(self._file_index + 1)

    def get_state(self) -> dict[str, Any]:
        """Returns the number of the file, and the state in it."""
        return {"file_index": self._file_index, **self._records.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a record.

        Args:
            state: What `get_state` returned.

        Raises:
            ValueError: There is no such file, or the offset is negative.
        """
        if "file_index" not in state:
            raise ValueError("state was saved with a single file; restore needs the same file")
        in_file = dict(state)
        file_index = operator.index(in_file.pop("file_index"))
        position_of(in_file)
        if not 0 <= file_index < len(self._paths):
            raise ValueError(
                f"state was saved in file {file_index}, but there are {len(self._paths)} files; "
                "restore needs the same files"
            )
        if file_index != self._file_index:
            self._open(file_index)
        self._records.set_state(in_file)


def state_of(offset: int, stored: int = 0, decompressed: int = 0) -> dict[str, Any]:
    """The state of a reader whose next record begins at byte `offset` of the decompressed file.

    It says where decompression begins to get there, unless that is at the first byte of the file:
    at byte `stored`, which has what is at byte `decompressed` of the decompressed one.
    """
    state: dict[str, Any] = {_OFFSET: offset}
    if stored:
        state[_START] = [stored, decompressed]
    return state


def position_of(state: dict[str, Any]) -> tuple[int, tuple[int, int] | None]:
    """The offset that `state_of` was given, and where decompression begins.

    Raises:
        ValueError: The state is of several files, or not one that `state_of` returned.
    """
    if "file_index" in state:
        raise ValueError("state was saved with several files; restore needs the same files")
    offset = operator.index(state[_OFFSET])
    if offset < 0:
        raise ValueError(f"`{_OFFSET}` of a state must not be negative, got {offset}")
    if _START not in state:
        return offset, None
    stored, decompressed = (operator.index(number) for number in state[_START])
    if stored < 0 or not 0 <= decompressed <= offset:
        raise ValueError(f"`{_START}` of a state must be before {offset}, got {state[_START]}")
    return offset, (stored, decompressed)
