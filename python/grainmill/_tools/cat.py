"""`grainmill cat` and `grainmill head`: prints records."""

from __future__ import annotations

import itertools
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from grainmill import GrainmillError, files
from grainmill._tools.console import CommandError, ExitCode, add_inputs, print_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_VIEWS = ("auto", "raw", "json", "example", "hex")
_HEAD = 10
_HEX_WIDTH = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of both commands."""
    is_head = parser.get_default("command") == "head"
    add_inputs(parser)
    parser.add_argument(
        "--as",
        dest="view",
        choices=_VIEWS,
        default="auto",
        help="how records are printed; auto: as JSON, text or tf.train.Example where they are "
        "that, otherwise hex; rows of Parquet and WebDataset files, and tokens: as JSON only",
    )
    parser.add_argument(
        "-n",
        "--count",
        type=int,
        metavar="N",
        default=_HEAD if is_head else None,
        help="how many records at most, of all files together "
        f"(default: {_HEAD if is_head else 'all'})",
    )
    if not is_head:
        parser.add_argument(
            "-i",
            "--index",
            action="append",
            metavar="I|A:B",
            help="print record I, or records A to B - 1; repeat it, or separate by commas",
        )


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    if options.count is not None and options.count < 0:
        raise CommandError(f"--count must be at least 0, got {options.count}")
    paths = files.find_files(options.paths)
    chosen = getattr(options, "index", None)
    if chosen and len(paths) > 1:
        raise CommandError(f"--index selects records of one file, got {len(paths)} files")
    left = options.count
    for path in paths:
        if left == 0:
            break
        found = files.detect_format(path, options.format)
        if found.rows and options.view not in {"auto", "json"}:
            raise CommandError(
                f"{path}: rows of {found.title} files are printed as JSON, not as {options.view}"
            )
        numbered = (
            _chosen(path, found.name, chosen)
            if chosen
            else enumerate(files.read_records(path, format=found.name))
        )
        for index, record in itertools.islice(numbered, left):
            _show(path, index, record, options)
            left = None if left is None else left - 1
    return ExitCode.OK


def _chosen(path: str, found: str, given: list[str]) -> Iterator[tuple[int, Any]]:
    """The records that `--index` names, in that order."""
    for part in ",".join(given).split(","):
        match = re.fullmatch(r"\s*(\d+)\s*|\s*(\d*):(\d*)\s*", part)
        if match is None:
            raise CommandError(f"--index must be a number or a range `A:B`, got `{part}`")
        if match[1]:
            at = int(match[1])
            yield at, files.read_at(path, [at], format=found)[0]
            continue
        first = int(match[2] or 0)
        count = int(match[3]) - first if match[3] else None
        if count is not None and count < 0:
            raise CommandError(f"--index `{part}` ends before it starts")
        records = files.read_records(path, format=found, start=first)
        yield from itertools.islice(enumerate(records, first), count)


def _show(path: str, index: int, record: Any, options: argparse.Namespace) -> None:
    if options.json:
        print_json({"path": files.redacted(path), "index": index, **_as_dict(record, options.view)})
        return
    if not isinstance(record, bytes):
        print_json(files.as_json(record))
        return
    view = options.view if options.view != "auto" else _view_of(record)
    if view == "raw":
        sys.stdout.flush()
        sys.stdout.buffer.write(record + b"\n")
        sys.stdout.buffer.flush()
    elif view == "json":
        print_json(_parsed(path, index, record, json.loads))
    elif view == "example":
        print_json(_parsed(path, index, record, files.example_as_json))
    else:
        print(f"record {index}, {len(record)} bytes\n{_hex(record)}")


def _parsed(path: str, index: int, record: bytes, parse: Any) -> Any:
    try:
        return parse(record)
    except (ValueError, RecursionError) as error:
        raise GrainmillError(f"{path}: record {index}: {error}") from error


def _view_of(record: bytes) -> str:
    """How a record is best shown."""
    if record[:1] in {b"{", b"["}:
        try:
            json.loads(record)
        except (ValueError, RecursionError):
            pass
        else:
            return "raw"
    if record[:1] == b"\n":
        try:
            files.example_as_json(record)
        except ValueError:
            pass
        else:
            return "example"
    try:
        text = record.decode("utf-8")
    except UnicodeDecodeError:
        return "hex"
    return "raw" if all(char.isprintable() or char in "\t\n\r" for char in text) else "hex"


def _as_dict(record: Any, view: str) -> dict[str, Any]:
    """A record for programs."""
    if not isinstance(record, bytes):
        return {"record": files.as_json(record)}
    if view == "auto":
        view = _view_of(record)
        if view == "raw" and record[:1] in {b"{", b"["}:
            view = "json"
    if view == "json":
        try:
            return {"record": json.loads(record)}
        except (ValueError, RecursionError):
            view = "raw"
    if view == "example":
        return {"record": files.example_as_json(record)}
    if view == "hex":
        return {"hex": record.hex()}
    found = files.as_json(record)
    return {"text": found} if isinstance(found, str) else found


def _hex(record: bytes) -> str:
    lines = []
    for at in range(0, len(record), _HEX_WIDTH):
        part = record[at : at + _HEX_WIDTH]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"  {at:08x}  {part.hex(' '):<{3 * _HEX_WIDTH - 1}}  {text}")
    return "\n".join(lines)
