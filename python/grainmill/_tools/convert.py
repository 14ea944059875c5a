"""`grainmill convert`: copies records to files of another format, number or order."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grainmill import files
from grainmill._tools.console import (
    CommandError,
    ExitCode,
    Progress,
    byte_text,
    count_text,
    print_json,
)

if TYPE_CHECKING:
    import argparse

_CONTENTS = ("same", "json", "example")

_EXAMPLES = """\
examples:
  grainmill convert train.tfrecord-* out/              one output for each input
  grainmill convert train.tfrecord-* all.array_record  one file with all records, in order
  grainmill convert train.tfrecord train.array_record --options group_size:1,uncompressed
  grainmill convert 'raw/*.jsonl' out/train.array_record --shards 10 --shuffle --seed 1
  grainmill convert train.tfrecord-* s3://bucket/train/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="files, globs, name@N, directories, URLs"
    )
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="a file, for the records of all inputs in order; a directory, for one output for "
        "each input; either may be in a bucket (s3://, gs://, az://)",
    )
    parser.add_argument(
        "--from", dest="format", choices=tuple(files.FORMATS), help="the inputs' format"
    )
    parser.add_argument(
        "--to",
        dest="target_format",
        choices=[found.name for found in files.FORMATS.values() if found.written],
        help="the outputs' format (default: by OUTPUT's name)",
    )
    parser.add_argument(
        "--shards",
        dest="num_shards",
        type=int,
        metavar="N",
        help="write N files OUTPUT-00000-of-0000N with equal shares of the records",
    )
    parser.add_argument("--shuffle", action="store_true", help="shuffle all records, globally")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the shuffle (default: 0)"
    )
    options = "; ".join(
        f"{found.name}: {found.options}" for found in files.FORMATS.values() if found.options
    )
    parser.add_argument(
        "--options",
        default="",
        metavar="OPTIONS",
        help=f"of the outputs, `key:value,...` ({options})",
    )
    parser.add_argument(
        "--content",
        choices=_CONTENTS,
        default="same",
        help="what records contain: the same bytes (rows of a table: JSON), JSON made of "
        "tf.train.Example, or tf.train.Example made of JSON",
    )
    parser.add_argument(
        "--schema",
        metavar="SCHEMA",
        help="the columns of Parquet outputs, `name:type,...`, with types such as int64, float, "
        "string, binary, list<int32> (default: as the first records have them)",
    )
    parser.add_argument(
        "--threads",
        dest="num_threads",
        type=int,
        metavar="N",
        help="that encode records (default: one per core)",
    )
    parser.add_argument(
        "--verify",
        dest="read_back",
        action="store_true",
        help="read back each output when it is written",
    )
    parser.add_argument(
        "--force", dest="overwrite", action="store_true", help="replace existing outputs"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


# What `convert` takes, by the same names.
_ARGUMENTS = (
    *("format", "target_format", "num_shards", "shuffle", "seed", "options", "content"),
    *("schema", "num_threads", "read_back", "overwrite"),
)


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    started = time.monotonic()
    progress = Progress("convert", shown=False if options.quiet else None)

    def tell(now: files.ConversionProgress) -> None:
        note = f"{now.num_files_done} of {now.num_files} files"
        if now.bytes_sent is not None:
            note += f"  {byte_text(now.bytes_sent)} uploaded"
        progress.tell(now.bytes_read, now.num_records, note, total=now.byte_len)

    given: dict[str, Any] = {name: getattr(options, name) for name in _ARGUMENTS}
    try:
        found = files.convert(options.inputs, options.output, **given, progress=tell)
    except ImportError as error:
        raise CommandError(str(error)) from error
    finally:
        progress.close()
    if options.json:
        print_json({**found, "seconds": round(time.monotonic() - started, 3)})
    else:
        _show(found)
    return ExitCode.OK


def _show(found: dict[str, Any]) -> None:
    paths = [file["path"] for file in found["files"]]
    name = paths[0]
    if len(paths) > 1:
        is_remote = files.is_url(name)
        name = name.rpartition("/")[0] + "/" if is_remote else os.fspath(Path(name).parent)
    kept = f", {found['kept']} of them from an earlier run" if found["kept"] else ""
    print(
        f"{name}: {count_text(len(paths), 'file')}{kept}, "
        f"{count_text(found['records'], 'record')}, {byte_text(found['bytes'])}"
    )
