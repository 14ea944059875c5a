"""A source of TFRecord files; `grainmill.sources` has its name."""

from __future__ import annotations

from grainmill._sources.record_files import ScannedFilesSource


class TFRecordDataSource(ScannedFilesSource[bytes]):
    """The records of TFRecord files, as one sequence of `bytes` with random access.

    TFRecord has no index, so each file is scanned once: only the lengths of its records are read,
    and their checksums verified. What the scan finds is kept in an index file, and used as long as
    the file's length, its modification time and a hash of its first and last bytes are the same.
    The checksum of a record is verified whenever it is read; damage raises a `GrainmillError` that
    names the file, the record and its offset.

    Files compressed as a whole by gzip, zlib or zstd are decompressed for the scan. Their index has
    a point about every mebibyte at which decompression can start, so a record costs up to a
    mebibyte of decompression, and neighbours share it. Points take at most 64 MiB of memory for
    each file; in files that would need more, they are further apart. In files of zstd they are
    where frames begin, of which there must be one for every 128 MiB of data.

    Args:
        paths: A path or a sequence of paths.
        compression: `"auto"` decides by the first bytes of each file; otherwise `"none"`, `"gzip"`,
            `"zlib"` or `"zstd"`.
        index_dir: The directory of index files. By default they are hidden files beside the data,
            `.NAME.grainmill_index`; where none can be written, they are in
            `$GRAINMILL_CACHE_DIR/grainmill/index`, by default in `~/.cache`. Where that cannot be
            written either, each process scans for itself.

    Raises:
        ValueError: There is no path, or `compression` is unknown.
        FileNotFoundError: There is no such file.
        GrainmillError: A file is not a TFRecord file, is cut short, or has too large a zstd frame.

    Example:
        >>> import struct
        >>> from grainmill._native import masked_crc32c
        >>> def frame(record):
        ...     head = struct.pack("<Q", len(record))
        ...     crcs = [struct.pack("<I", masked_crc32c(part)) for part in (head, record)]
        ...     return head + crcs[0] + record + crcs[1]
        >>> with open("words.tfrecord", "wb") as file:
        ...     _ = file.write(b"".join(map(frame, [b"one", b"two", b"three"])))
        >>> source = grain.sources.TFRecordDataSource("words.tfrecord")
        >>> len(source), source[2]
        (3, b'three')
        >>> list(grain.MapDataset.source(source)[::-1])
        [b'three', b'two', b'one']
    """

    _format = "tfrecord"
    _scan = "tfrecord"
