"""`grainmill info`: what files contain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill import _native
from grainmill._tools import formats, reading
from grainmill._tools.console import ExitCode, byte_text, count_text, print_json, table
from grainmill._url import shown

if TYPE_CHECKING:
    import argparse

_SAMPLE = 10_000
_BAR = 30
_GZIP = b"\x1f\x8b"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    formats.add_inputs(parser)
    parser.add_argument(
        "--full",
        action="store_true",
        help=f"read all records for the sizes, not a sample of {_SAMPLE:,}",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    paths = formats.expanded(options.paths)
    limit = 1 << 62 if options.full else _SAMPLE
    infos = [info_of(path, options.format, limit) for path in paths]
    if options.json:
        print_json({"files": infos, **_sums(infos)})
        return ExitCode.OK
    for found in infos:
        print(f"{found['path']}\n{table(_rows(found))}")
        if found["sizes"]["histogram"]:
            print("  sizes of records" + ("" if found["sizes"]["exact"] else " (a sample)"))
            print(_bars(found["sizes"]["histogram"]))
    if len(infos) > 1:
        sums = _sums(infos)
        print(
            f"{count_text(len(infos), 'file')}: {count_text(sums['records'], 'record')}, "
            f"{byte_text(sums['bytes'])}"
        )
    return ExitCode.OK


def info_of(path: str, given: str | None, max_records: int) -> dict[str, Any]:
    """What one file contains."""
    found = formats.detect(path, given)
    num_records, lengths = reading.sample(path, found, max_records)
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
    elif found.name == "bagz":  # each record on its own
        info["compression"] = "zstd" if path.endswith(".bagz") else None
    elif found.name == "parquet":
        table = _native.ParquetFiles([(path, None)], None, 0)
        info["compression"] = ",".join(table.codecs()) or None
        info["row_groups"] = table.row_group_lens()[0]
        info["columns"] = dict(table.column_types())
    else:
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
        "histogram": histogram(lengths),
    }
    return info


def histogram(lengths: reading.Lengths) -> list[tuple[int, int, int]]:
    """Counts of lengths from one power of two (inclusive) to the next (exclusive)."""
    counts = lengths.counts
    if not counts:
        return []
    return [
        (1 << bits >> 1, 1 << bits, counts[bits]) for bits in range(min(counts), max(counts) + 1)
    ]


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    sizes = found["sizes"]
    about = "" if sizes["exact"] else "about "
    rows = [
        ("format", formats.FORMATS[found["format"]].title),
        ("records", f"{found['records']:,}"),
    ]
    rows.append(("bytes", f"{found['bytes']:,} ({byte_text(found['bytes'])})"))
    rows.append(("bytes of records", f"{about}{found['record_bytes']:,}"))
    if found["ratio"] is not None:
        rows.append(("stored / records", f"{about}{found['ratio']:.2f}"))
    if found["format"] != "array_record":  # which has it in its options
        rows.append(("compression", found["compression"] or "none"))
    if "columns" in found:
        lens = found["row_groups"]
        most = f" of up to {count_text(max(lens), 'row')}" if lens else ""
        rows.append(("row groups", f"{len(lens):,}{most}"))
        rows += [
            ("columns" if at == 0 else "", f"{name}: {kind}")
            for at, (name, kind) in enumerate(found["columns"].items())
        ]
    if "chunks" in found:
        rows.append(("chunks", f"{found['chunks']:,} of {found['records_per_chunk']:,} records"))
    if found.get("options"):
        rows.append(("options", found["options"]))
    if found["records"]:
        text = f"{sizes['min']:,} to {sizes['max']:,} bytes, mean {sizes['mean']:,.1f}"
        rows.append(("size of a record", text))
    return rows


def _bars(bins: list[tuple[int, int, int]]) -> str:
    most = max(count for _, _, count in bins)
    names = [f"{low:,} to {high - 1:,}" for low, high, _ in bins]
    names = ["0" if high == 1 else name for name, (_, high, _) in zip(names, bins, strict=True)]
    width = max(map(len, names))
    return "\n".join(
        f"    {name:>{width}}  {'#' * round(_BAR * count / most):<{_BAR}}  {count:,}"
        for name, (_, _, count) in zip(names, bins, strict=True)
    )


def _sums(shown: list[dict[str, Any]]) -> dict[str, int]:
    return {
        "records": sum(found["records"] for found in shown),
        "bytes": sum(found["bytes"] for found in shown),
    }
