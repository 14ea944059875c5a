"""A source of Bagz files; `grainmill.sources` has its name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from grainmill._sources.paths import expand_ranges, listed
from grainmill._sources.record_files import RecordFilesSource
from grainmill._sources.suffixes import suffixes_of
from grainmill._url import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._sources.record_files import Indices, Paths

_LAYOUTS = ("concatenated", "interleaved")
_LIMITS = ("tail", "separate")


class BagzDataSource(RecordFilesSource[bytes]):
    """The records of Bagz files, as one sequence of `bytes`.

    A damaged file or record raises a `GrainmillError` that names the file, the record and its
    offset. Bagz has no checksums: damage is noticed where limits or compressed data are no longer
    valid, but changed bytes of an uncompressed record are not.

    Args:
        paths: A path or a sequence of paths. `name@4.bagz` stands for the shards
            `name-00000-of-00004.bagz` to `name-00003-of-00004.bagz`, `name@*.bagz` for as many as
            the name of the first one says. A string may list several of them, separated by commas.
        compression: `"auto"` decides by the name of each file: `.bagz` is zstd, any other is not
            compressed; otherwise `"none"` or `"zstd"`.
        limits: Where the ends of records are: `"tail"` of the file, or in a `"separate"` file
            `limits.NAME`.
        layout: `"concatenated"` shards follow each other; with `"interleaved"`, record `i` of `n`
            shards is record `i // n` of shard `i % n`.
        dictionary: The zstd dictionary that records were compressed with, if there is one.

    Raises:
        ValueError: There is no path, an argument is unknown, or the lengths of interleaved shards
            differ by more than 1 or do not fall.
        FileNotFoundError: There is no such file or shard.
        GrainmillError: A file is not a Bagz file, or is damaged.

    Example:
        >>> import struct
        >>> records = [b"one", b"two", b"three"]
        >>> with open("words.bag", "wb") as file:
        ...     _ = file.write(b"".join(records) + struct.pack("<3Q", 3, 6, 11))
        >>> source = grain.sources.BagzDataSource("words.bag")
        >>> len(source), source[1]
        (3, b'two')
    """

    def __init__(
        self,
        paths: Paths,
        *,
        compression: str = "auto",
        limits: str = "tail",
        layout: str = "concatenated",
        dictionary: bytes | None = None,
    ) -> None:
        _check("limits", limits, _LIMITS)
        _check("layout", layout, _LAYOUTS)
        self._is_concatenated = layout == "concatenated"
        each: list[object] = []
        for path in listed(paths):
            each += path.split(",") if isinstance(path, str) else [path]
        files = expand_ranges(each, suffixes=suffixes_of("bagz"))
        if limits == "separate":  # those are beside the files, and match the same patterns
            files = [
                file
                for file in files
                if not os.path.basename(file.path).startswith("limits.")  # noqa: PTH119 - it may be a URL
            ]
        format_of = ("bagz", compression, limits == "separate", dictionary)
        super().__init__(files, format_of, (compression, limits, layout, dictionary))
        self._counts = self._files.num_records
        if not self._is_concatenated:
            self._check_interleaved()

    @property
    def _numbers_of(self) -> Callable[[Indices], Indices] | None:
        return None if self._is_concatenated else self._interleaved

    def _interleaved(self, index: Indices) -> Indices:
        """The numbers of records, which the engine counts one file after the other."""
        number, shard = np.divmod(index, len(self._starts))
        # What is out of range stays so, and the engine refuses it.
        return np.where(index < self._len, np.array(self._starts)[shard] + number, index)

    def _check_interleaved(self) -> None:
        num_shards = len(self._counts)
        full, rest = divmod(sum(self._counts), num_shards)
        expected = [full + (shard < rest) for shard in range(num_shards)]
        if self._counts != expected:
            raise ValueError(
                "Interleaved error - shard sizes must be within 1 of each other, the larger ones "
                f"first: expected {expected}, got {self._counts}"
            )
        self._starts = [sum(self._counts[:shard]) for shard in range(num_shards)]

    def _checked(self, record_key: object) -> int:
        key = super()._checked(record_key)  # type: ignore[arg-type]
        if self._is_concatenated:
            return key
        number, shard = divmod(key, len(self._starts))
        return self._starts[shard] + number

    def _record_location(self, index: int) -> tuple[str, int]:
        if self._is_concatenated:
            return super()._record_location(index)
        number, shard = divmod(index, len(self._starts))
        path, skip, _ = self._sources[shard]
        return shown(path), skip + number


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(known)}, got {value!r}")
