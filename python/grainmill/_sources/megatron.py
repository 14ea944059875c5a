"""A source of token files of Megatron-LM; `grainmill.sources` has its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from grainmill import _native
from grainmill._sources.paths import expand_ranges
from grainmill._sources.record_files import RecordFilesSource
from grainmill._sources.suffixes import suffixes_of
from grainmill._url import absolute, is_url, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._sources.record_files import Paths

_HEADER_LEN: Final = 34


class MegatronDataSource(RecordFilesSource["np.ndarray[tuple[int], np.dtype[Any]]"]):
    r"""The documents in token files of Megatron-LM, as one sequence of arrays with random access.

    Of `corpus.bin`, which has the tokens, and `corpus.idx` beside it, as `preprocess_data.py` and
    its relatives write them. An element is a read-only array of the tokens of one document, of all
    of its sequences where it has several. The bytes that files with images have of each sequence
    are not read. Neither file has checksums: an index that contradicts itself or the length of the
    tokens raises a `GrainmillError`, changed tokens are not noticed.

    Args:
        paths: A path or a sequence of paths: that of the `.bin` file, or what precedes `.bin`.

    Attributes:
        dtype: The type of tokens, which all files must have.

    Raises:
        ValueError: There is no path, or a URL has a query, which signs it alone.
        FileNotFoundError: There is no such file, or no `.idx` file beside it.
        GrainmillError: A file is damaged, or has tokens of another type.

    Example:
        >>> import struct
        >>> tokens = np.array([5, 6, 7, 8, 9], np.uint16)
        >>> with open("corpus.bin", "wb") as file:
        ...     _ = file.write(tokens)
        >>> header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)  # version, uint16, counts
        >>> with open("corpus.idx", "wb") as file:
        ...     _ = file.write(header + struct.pack("<2i2q3q", 3, 2, 0, 6, 0, 1, 2))
        >>> source = grain.sources.MegatronDataSource("corpus")
        >>> len(source), source[1]
        (2, array([8, 9], dtype=uint16))
    """

    _yields_records = False

    def __init__(self, paths: Paths) -> None:
        files = expand_ranges(paths, suffixes=suffixes_of("megatron"))
        files = [file._replace(path=f"{file.path.removesuffix('.bin')}.bin") for file in files]
        for file in files:
            if is_url(file.path) and "?" in file.path:
                text = (
                    "a URL with a query stands for one file, but tokens have their index in another"
                )
                raise ValueError(f"{shown(file.path)}: {text}")
        index = absolute(f"{files[0].path.removesuffix('.bin')}.idx")
        header = _native.FileBytes(index).read(_HEADER_LEN)
        code, name = _native.megatron_token_type(index, header)
        self.dtype = np.dtype(name).newbyteorder("<")
        super().__init__(files, ("megatron", code))

    def _elements(self, records: list[bytes], keys: Sequence[int]) -> list[Any]:  # noqa: ARG002
        return [np.frombuffer(record, self.dtype) for record in records]
