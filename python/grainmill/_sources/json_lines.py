"""A source of JSON lines; `grainmill.sources` has its name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from grainmill._interrupts import raise_interrupt
from grainmill._sources.record_files import ScannedFilesSource

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from grainmill._sources.record_files import Paths


class JsonLinesDataSource(ScannedFilesSource[Any]):
    r"""The lines of JSON-lines files, as one sequence with random access.

    An element is a line without its end, which is `\n` or `\r\n`; the last line needs none. Lines
    that are empty or consist of blanks are not counted, and a byte order mark before a line is no
    part of it. Lines are found by one scan of each file and kept in an index file, as by
    `TFRecordDataSource`; compressed files likewise have points at which decompression can start.

    Args:
        paths: A path or a sequence of paths.
        parse: Whether elements are the objects that `json.loads` makes of the lines, instead of
            `bytes`.
        compression: `"auto"` decides by the first bytes of each file, and takes one named `.gz` for
            gzip and one named `.zst` for zstd in any case; otherwise `"none"`, `"gzip"`, `"zlib"`
            or `"zstd"`.
        index_dir: The directory of index files; see `TFRecordDataSource`.

    Raises:
        ValueError: There is no path, or `compression` is unknown.
        FileNotFoundError: There is no such file.
        GrainmillError: A file is damaged, of another kind, binary, or in UTF-16.

    Example:
        >>> with open("words.jsonl", "w") as file:
        ...     _ = file.write('{"word": "one"}\n\n{"word": "two"}')
        >>> source = grain.sources.JsonLinesDataSource("words.jsonl")
        >>> len(source), source[1]
        (2, b'{"word": "two"}')
        >>> parsed = grain.sources.JsonLinesDataSource("words.jsonl", parse=True)
        >>> list(grain.MapDataset.source(parsed).map(lambda line: line["word"]))
        ['one', 'two']
    """

    _format = "jsonl"
    _scan = "json_lines"

    def __init__(
        self,
        paths: Paths,
        *,
        parse: bool = False,
        compression: str = "auto",
        index_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._parse = parse
        self._yields_records = not parse
        self._more_arguments = (parse,)
        super().__init__(paths, compression=compression, index_dir=index_dir)

    def _elements(self, records: list[bytes], keys: Sequence[int]) -> list[Any]:
        if not self._parse:
            return records
        try:
            return [json.loads(record) for record in records]
        except (ValueError, RecursionError) as failure:
            raise_interrupt(failure)  # parsing one by one finds the line
        return [self._parsed(record, key) for record, key in zip(records, keys, strict=True)]

    def _parsed(self, record: bytes, key: int) -> Any:
        try:
            return json.loads(record)
        except (ValueError, RecursionError) as error:
            raise_interrupt(error)
            path, number = self._record_location(key)
            raise ValueError(f"{path}: record {number}: not valid JSON: {error}") from None
