"""`describe`: what a file contains."""

from __future__ import annotations

import os
from typing import Any

from grainmill import _native, sources
from grainmill._files import reading
from grainmill._files.formats import detect_format
from grainmill._files.messages import check_at_least
from grainmill._url import shown

_GZIP = b"\x1f\x8b"


def describe(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - of the file
    max_sampled: int | None = 10_000,
) -> dict[str, Any]:
    r"""Returns what one file contains: its records, bytes, compression, chunks or columns.

    Args:
        path: The file, or its URL.
        format: Its format, one of `FORMATS`; by default what `detect_format` says.
        max_sampled: Of how many records, evenly spaced, the sizes are read; `None` for all. Files
            without an index are read to their end in any case.

    Returns:
        A dict with `path`, `format`, the number of `records`, the `bytes` of the file, the
        `record_bytes` of all records, the `ratio` of both (`None` if these are 0), `compression`
        (of the file as a whole, of each record, or the codecs of columns; `None` for none), and
        `sizes` of records: whether they are `exact`, their `min`, `mean` and `max`, and a
        `histogram` of tuples, from one power of two to the next, and how many there are. Of an
        ArrayRecord file also `chunks`, `records_per_chunk` and the writer's `options`; of a
        Parquet file the lengths of its `row_groups`, and the types of its `columns` by name; of
        an Arrow file those of its `batches`, and its `columns`.

    Raises:
        ValueError: `max_sampled` is less than 1, or the format is unknown.
        FileNotFoundError: There is no such file.
        OSError: It is no regular file, or cannot be read.
        GrainmillError: The file is damaged.

    Example:
        >>> from grainmill import files
        >>> with open("words.jsonl", "w") as file:
        ...     _ = file.write('{"word": "one"}\n{"word": "two"}')
        >>> found = files.describe("words.jsonl")
        >>> found["records"], found["bytes"], found["sizes"]["max"]
        (2, 31, 15)
    """
    check_at_least("max_sampled", max_sampled, 1)
    path, found = os.fspath(path), detect_format(path, format)
    limit = 1 << 62 if max_sampled is None else max_sampled
    num_records, lengths = reading.sample(path, found, limit)
    exact = lengths.count == num_records
    record_bytes = lengths.total if exact else round(lengths.mean * num_records)
    stored = len(_native.FileBytes(path))
    info: dict[str, Any] = {
        "path": shown(path),
        "format": found.name,
        "records": num_records,
        "bytes": stored,
        "record_bytes": record_bytes,
        "ratio": round(stored / record_bytes, 4) if record_bytes else None,
        "compression": None,
    }
    if found.in_order:
        info["compression"] = _native.RecordStream(path, found.name).compression
    elif found.name == "webdataset":
        info["compression"] = "gzip" if _native.FileBytes(path).read(2) == _GZIP else None
    elif found.name == "mds":
        info["compression"] = sources.MDSDataSource(path).compression
    elif found.name == "bagz":  # each record on its own
        info["compression"] = "zstd" if path.endswith(".bagz") else None
    elif found.name == "parquet":
        table = _native.ParquetFiles([(path, None)], None, 0)
        info["compression"] = ",".join(table.codecs()) or None
        info["row_groups"] = table.row_group_lens()[0]
        info["columns"] = dict(table.column_types())
    elif found.name == "arrow":
        source = sources.ArrowDataSource(path)
        info["compression"] = ",".join(source.codecs) or None
        info["batches"] = source.batch_lens
        info["columns"] = source.column_types
    elif found.name == "array_record":
        files = reading.files_of(found.open([path]))
        if files is not None:
            group_size = files.group_sizes[0]
            info["chunks"] = -(-num_records // group_size) if group_size else 0
            info["records_per_chunk"] = group_size
            info["options"] = files.writer_options[0]
    info["sizes"] = {
        "exact": exact,
        "min": lengths.least,
        "mean": round(lengths.mean, 1),
        "max": lengths.most,
        "histogram": lengths.histogram(),
    }
    return info
