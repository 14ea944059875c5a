"""`grainmill info`: what files contain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grainmill import files
from grainmill._tools.console import (
    ExitCode,
    add_inputs,
    byte_text,
    count_text,
    print_json,
    table,
)

if TYPE_CHECKING:
    import argparse

_SAMPLE = 10_000
_BAR = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_inputs(parser)
    parser.add_argument(
        "--full",
        action="store_true",
        help=f"read all records for the sizes, not a sample of {_SAMPLE:,}",
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    max_sampled = None if options.full else _SAMPLE
    infos = [
        files.describe(path, format=options.format, max_sampled=max_sampled)
        for path in files.find_files(options.paths)
    ]
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


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    sizes = found["sizes"]
    about = "" if sizes["exact"] else "about "
    rows = [
        ("format", files.FORMATS[found["format"]].title),
        ("records", f"{found['records']:,}"),
    ]
    rows.append(("bytes", f"{found['bytes']:,} ({byte_text(found['bytes'])})"))
    rows.append(("bytes of records", f"{about}{found['record_bytes']:,}"))
    if found["ratio"] is not None:
        rows.append(("stored / records", f"{about}{found['ratio']:.2f}"))
    if found["format"] != "array_record":  # which has it in its options
        rows.append(("compression", found["compression"] or "none"))
    if "columns" in found:
        name = "row_groups" if "row_groups" in found else "batches"
        lens = found[name]
        most = f" of up to {count_text(max(lens), 'row')}" if lens else ""
        rows.append((name.replace("_", " "), f"{len(lens):,}{most}"))
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


def _sums(infos: list[dict[str, Any]]) -> dict[str, int]:
    return {
        "records": sum(found["records"] for found in infos),
        "bytes": sum(found["bytes"] for found in infos),
    }
