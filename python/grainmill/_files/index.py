"""`write_index`: what lets files open, and be read by position, without a scan."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from grainmill._files import formats
from grainmill._files.messages import Argument, Message
from grainmill._index_file import read_entries
from grainmill._url import absolute

if TYPE_CHECKING:
    from collections.abc import Sequence

_OUTPUT = Argument("output")


def write_index(
    paths: Sequence[str],
    *,
    format: str | None = None,  # noqa: A002 - of the files
    output: str | os.PathLike[str] | None = None,
) -> list[int]:
    r"""Writes what lets files of one format open quickly, unless it is there already.

    ArrayRecord files have one index file together, for `ArrayRecordDataSource(paths, index=...)`.
    TFRecord, JSON Lines and WebDataset files have one each, which their sources find.

    Args:
        paths: The files, as `find_files` returns them.
        format: Their format, one of `FORMATS`; by default what `detect_format` says.
        output: The index file of ArrayRecord files.

    Returns:
        The number of records of each file.

    Raises:
        ValueError: The files have several formats, or one that needs no index; or `output` is
            missing, not needed, or no index.
        FileNotFoundError: There is no such file.
        OSError: A file is no regular one, or cannot be read or written.
        GrainmillError: A file is damaged.

    Example:
        >>> from grainmill import files
        >>> with open("words.jsonl", "w") as file:
        ...     _ = file.write('{"word": "one"}\n{"word": "two"}')
        >>> files.write_index(["words.jsonl"])
        [2]
    """
    kinds = {formats.detect_format(path, format).name for path in paths}
    if len(kinds) > 1:
        raise ValueError(f"files of one format are indexed at a time, got {', '.join(kinds)}")
    found = formats.FORMATS[kinds.pop()]
    if found.name == "array_record":
        if output is None:
            raise ValueError(Message(_OUTPUT, " must name the index file for ArrayRecord files"))
        entries = read_entries(os.fspath(output), [absolute(path) for path in paths])
        return [count for count, _, _ in entries]
    if not found.scanned:
        raise ValueError(f"{found.title} files need no index: they have one inside")
    if output is not None:
        head = f"the index of {found.title} files is kept beside each; no "
        raise ValueError(Message(head, _OUTPUT))
    return [len(found.open([path])) for path in paths]
