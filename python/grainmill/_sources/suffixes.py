"""What the names of files end with: which of a directory are taken, and which format they have."""

from __future__ import annotations

from typing import Final

# The one for new files first.
EXTENSIONS: Final = {
    "array_record": (".array_record", ".arrayrecord", ".ar", ".riegeli"),
    "tfrecord": (".tfrecord", ".tfrecords", ".tfrec"),
    "jsonl": (".jsonl", ".ndjson", ".jsonlines"),
    "bagz": (".bagz", ".bag"),
    "parquet": (".parquet", ".pq"),
    "webdataset": (".tar", ".tgz"),
    "megatron": (".bin",),
    "npy": (".npy", ".npz"),
    "mds": (".mds",),
    "arrow": (".arrow", ".feather", ".ipc", ".arrows"),
}
GZIP: Final = (".gz", ".gzip")
# What readers decompress; the last two from begin to end only.
COMPRESSED: Final = (*GZIP, ".zlib", ".z", ".zst", ".zstd", ".xz", ".bz2")
_WHOLE: Final = ("tfrecord", "jsonl", "webdataset", "mds")


def suffixes_of(name: str) -> tuple[str, ...]:
    """What the names of a format's files end with, also of compressed ones if it has such."""
    ends = ("", *COMPRESSED) if name in _WHOLE else ("",)
    return tuple(f"{extension}{end}" for end in ends for extension in EXTENSIONS[name])
