"""`convert`: what is to be written where, and what is refused; `conversion` writes it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grainmill._files import formats, parquet_output
from grainmill._files.bucket_outputs import BucketOutputs
from grainmill._files.conversion import Conversion, Request
from grainmill._files.copying import total_of
from grainmill._files.local_outputs import LocalOutputs
from grainmill._files.messages import Argument, Message, check_at_least, check_choice
from grainmill._files.outputs import Kind, Shard, exists_error, resolved
from grainmill._native import num_cores
from grainmill._sources.suffixes import COMPRESSED, GZIP
from grainmill._url import is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from grainmill._files.conversion import ConversionProgress, Outputs

CONTENTS = ("same", "json", "example")
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_NUM_SHARDS, _OPTIONS, _SHUFFLE = Argument("num_shards"), Argument("options"), Argument("shuffle")


def convert(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - of the inputs
    target_format: str | None = None,
    num_shards: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    options: str = "",
    content: str = "same",
    schema: str | None = None,
    num_threads: int | None = None,
    read_back: bool = False,
    overwrite: bool = False,
    progress: Callable[[ConversionProgress], object] | None = None,
) -> dict[str, Any]:
    r"""Copies records to files of another format, number or order.

    Records go from reader to writer in the engine, without a Python object for each, unless their
    content is converted. An output gets its name when all of it is written, so what has its name is
    complete. Finished outputs are noted in a hidden file beside them, and an equal call after an
    interruption continues there. `grainmill convert` is this function.

    Args:
        inputs: Files, patterns, `name@N`, directories or URLs, as for `find_files`.
        output: A file, for the records of all inputs in order; `name@N` for that many; or a
            directory (one that exists, or a text that ends with `/`), for one output for each
            input. Any of these may be in a bucket.
        format: The format of the inputs, one of `FORMATS`; by default each is detected.
        target_format: The format of the outputs; by default by the name of `output`, and
            ArrayRecord in a directory.
        num_shards: Writes so many files, with equal shares of the records in order.
        shuffle: Whether all records are shuffled, in the order of `MapDataset.shuffle(seed)`.
        seed: The seed of the order, from 0 to 2**32 - 1.
        options: `key:value` items separated by commas; `Format.options` says which.
        content: `"same"` keeps the bytes, and makes JSON of rows of tables; `"json"` makes JSON of
            `tf.train.Example`, and `"example"` these of JSON.
        schema: The columns of Parquet files, `name:type,...`; by default as the first records have
            them.
        num_threads: How many threads encode records; by default one for each core that it may use.
        read_back: Whether each output is read back when it is written.
        overwrite: Whether existing files are replaced.
        progress: Called now and then, by one thread at a time; what it raises ends the conversion.

    Returns:
        A dict with `files`, a list of dicts with the `path` and the number of `records` of each
        output; the `records` and `bytes` of all; and how many outputs were `kept` of an earlier
        call.

    Raises:
        ValueError: An argument is invalid or contradicts another, or a format is unknown.
        FileNotFoundError: There is no such input.
        FileExistsError: An output exists and `overwrite` is not set, or another conversion is
            writing it.
        OSError: A file cannot be read or written.
        GrainmillError: An input is damaged, or a record does not fit what is written.
        ImportError: Parquet files are written, and there is no `pyarrow`.

    Example:
        >>> from grainmill import files
        >>> with open("words.jsonl", "w") as file:
        ...     _ = file.write('{"word": "one"}\n{"word": "two"}')
        >>> found = files.convert("words.jsonl", "words@2.array_record", shuffle=True, seed=1)
        >>> [file["path"] for file in found["files"]], found["records"]
        (['words-00000-of-00002.array_record', 'words-00001-of-00002.array_record'], 2)
    """
    output = os.fspath(output)
    num_threads = num_threads if num_threads is not None else num_cores()
    check_at_least("num_threads", num_threads, 1)
    check_at_least("num_shards", num_shards, 1)
    check_choice("content", content, CONTENTS)
    check_choice("target_format", target_format, formats.WRITTEN)
    _check_url(output)
    paths = formats.find_files(inputs)
    found = [formats.detect_format(path, format) for path in paths]
    target = _target_format(output, target_format)
    options = _with_compression(options, output, target)
    if schema is not None and target.name != "parquet":
        text = f" states the columns of Parquet files, not of {target.title}"
        raise ValueError(Message(Argument("schema"), text))
    if target.name == "parquet":
        parquet_output.check(options, schema)
    shards = _shards(output, num_shards, paths, found, target, is_shuffled=shuffle)
    _check_outputs(shards, paths)
    _check_mixture(shards, found, target, content, is_shuffled=shuffle)
    if content == "example" or (target.rows and content == "same"):
        _refuse_lists(paths, found)
    if target.name == "bagz" and options:
        _check_compression(shards[0].path, options)
    order = seed if shuffle else None
    request = Request(target, options, content, schema, order, num_threads, read_back, progress)
    conversion = Conversion(request, paths, found, shards)
    kind = Kind(target, options, schema)
    place = BucketOutputs if is_url(output) else LocalOutputs
    with place(shards, output, kind, conversion.header(), force=overwrite) as outputs:
        if not overwrite:
            _refuse_existing(outputs)
        if target.name == "parquet" and len(shards) > 1 and shards[0].count is not None:
            kind.sample.extend(conversion.sample())
        conversion.run(outputs)
        written = outputs.byte_len()
        outputs.remove_journal()
    counts = [outputs.records[shard.name] for shard in shards]
    return {
        "files": [
            {"path": shard.path, "records": count}
            for shard, count in zip(shards, counts, strict=True)
        ],
        "records": sum(counts),
        "bytes": written,
        "kept": len(outputs.kept()),
    }


def _target_format(output: str, given: str | None) -> formats.Format:
    if given is not None:
        return formats.FORMATS[given]
    found = formats.of_name(output)
    if found is None and _is_directory(output):
        return formats.FORMATS["array_record"]
    if found is None:
        head = f"{output}: its format is not known from its name; pass "
        hint = "; a directory of a bucket ends with /" if is_url(output) else ""
        names = f" ({', '.join(formats.WRITTEN)}){hint}"
        raise ValueError(Message(head, Argument("target_format"), names))
    if not found.written:
        why = ""
        if found.name == "webdataset":
            why = (
                ": a record does not say which files it consists of; ArrayRecord and Parquet keep "
                "rows; to copy a WebDataset, copy its .tar files"
            )
        raise ValueError(f"{output}: {found.title} files are not written{why}")
    return found


def _with_compression(given: str, output: str, target: formats.Format) -> str:
    """`options` with what the name of the output says: readers go by names, too."""
    suffix = "" if _is_directory(output) else formats.compression_suffix(output)
    if not suffix:
        return given
    if not target.in_order:
        head = f"{output}: {target.title} files are compressed inside, as "
        tail = f" say ({target.options}), not as a whole; name it without {suffix}"
        raise ValueError(Message(head, _OPTIONS, tail))
    if suffix not in GZIP:
        raise ValueError(
            f"{output}: {target.title} files are written without compression, or by gzip; "
            f"end the name with .gz, or leave out {suffix}"
        )
    is_stated = any(option.partition(":")[0] == "gzip" for option in given.split(","))
    return given if is_stated else ",".join(filter(None, (given, "gzip")))


def _check_url(path: str) -> None:
    """Refuses an output that is in no bucket."""
    if not is_url(path):
        return
    scheme = path.partition("://")[0]
    if scheme in {"http", "https"}:
        raise ValueError(
            f"{path}: a web server's files cannot be written; name a bucket (s3://, gs://, az://), "
            "or a local file"
        )
    if scheme not in _BUCKETS:
        raise ValueError(
            f"{path}: `{scheme}://` is not supported; buckets are {'://, '.join(_BUCKETS)}://"
        )


def _is_directory(path: str) -> bool:
    if is_url(path):
        return path.endswith("/")
    return path.endswith(("/", os.sep)) or Path(path).is_dir()


def _shards(
    given: str,
    number: int | None,
    inputs: list[str],
    found: list[formats.Format],
    target: formats.Format,
    *,
    is_shuffled: bool,
) -> list[Shard]:
    """The outputs that `given` names, each with its share of the records."""
    is_remote = is_url(given)

    def clean(path: str) -> str:  # without `./`, but a URL stays as it is
        return path if is_remote else str(Path(path))

    output = clean(given)
    everything = tuple(range(len(inputs)))
    # As sources read it: the numbers of shards are where the `@` is.
    stated = re.fullmatch(r"(.*[^/\\@])@(\d{1,5})((?:\.[^/\\@]*)?)", given)
    if stated is not None:
        if number is not None and number != int(stated[2]):
            raise ValueError(Message(f"{given} states another number of files than ", _NUM_SHARDS))
        number, output = int(stated[2]), clean(f"{stated[1]}{stated[3]}")
        if number < 1:
            raise ValueError(f"{given} must state at least 1 file")
    if _is_directory(given):
        if number is not None or is_shuffled:
            raise ValueError(
                f"{given}: a directory; give the name of the files, such as "
                f"{output.rstrip('/')}/train{target.extensions[0]}"
            )
        directory = output if is_remote else f"{output}{os.sep}"
        paths = [clean(f"{directory}{_matching_name(path, target)}") for path in inputs]
        if len(set(paths)) < len(paths):
            head = "two inputs have the same name; name the outputs with "
            raise ValueError(Message(head, _NUM_SHARDS))
        return [Shard(path, (at,)) for at, path in enumerate(paths)]
    if number is None:
        count = total_of(inputs, found) if is_shuffled else None
        return [Shard(output, everything, 0, count)]
    total = total_of(inputs, found)
    bounds = [total * at // number for at in range(number + 1)]
    shard_of = [f"-{at:05}-of-{number:05}" for at in range(number)]
    if stated is not None and stated[3]:
        paths = [clean(f"{stated[1]}{shard}{stated[3]}") for shard in shard_of]
    else:
        paths = [_named(output, shard, target) for shard in shard_of]
    return [
        Shard(path, everything, bounds[at], bounds[at + 1] - bounds[at])
        for at, path in enumerate(paths)
    ]


def _matching_name(path: str, target: formats.Format) -> str:
    """The name of an input, with the extension of another format and the same shard."""
    if path.startswith(("http://", "https://")):
        path = path.partition("?")[0]
    name = Path(path).name
    shard = re.search(r"-\d{5,}-of-\d{5,}", name)
    if shard is not None:
        name = name.replace(shard[0], "", 1)
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    for found in formats.FORMATS.values():
        for extension in found.extensions:
            name = name.removesuffix(extension)
    return _named(f"{name}{target.extensions[0]}", shard[0] if shard else "", target)


def _named(path: str, shard: str, target: formats.Format) -> str:
    """A path with the number of a shard, where files of a format have it."""
    for extension in target.extensions if target.numbers_first else ():
        if path.endswith(extension):
            return f"{path.removesuffix(extension)}{shard}{extension}"
    return f"{path}{shard}"


def _check_outputs(shards: list[Shard], inputs: list[str]) -> None:
    read = {resolved(path) for path in inputs}
    for shard in shards:
        if resolved(shard.path) in read:
            raise ValueError(f"{shard.path}: is an input, too")


def _check_mixture(
    shards: list[Shard],
    found: list[formats.Format],
    target: formats.Format,
    content: str,
    *,
    is_shuffled: bool,
) -> None:
    """Refuses inputs of several formats where one file cannot have the records of all of them."""
    titles = list(dict.fromkeys(each.title for each in found))
    if len(titles) < 2 or all(len(shard.inputs) < 2 for shard in shards):
        return
    names = " and ".join(titles)
    if is_shuffled:
        head = f"inputs of several formats ({names}) cannot be shuffled together; convert them to "
        raise ValueError(Message(f"{head}one file without ", _SHUFFLE, " first"))
    if target.rows and content == "same" and len({each.rows for each in found}) > 1:
        raise ValueError(
            f"records of {names} inputs cannot be rows of one {target.title} file; convert them to "
            "JSON Lines first"
        )


def _refuse_lists(paths: list[str], found: list[formats.Format]) -> None:
    for path, each in zip(paths, found, strict=True):
        if each.name in {"megatron", "npy"}:
            raise ValueError(
                f"{path}: {each.title} files have lists of numbers, without names for columns or "
                "features; convert them to JSON Lines"
            )


def _check_compression(path: str, options: str) -> None:
    """Refuses a Bagz file whose name says something else than what it would contain."""
    if path.endswith(".bagz") == ("uncompressed" in options.split(",")):
        head = f"{path}: Bagz files are read as compressed if their name ends with .bagz, otherwise"
        text = f" {options} contradicts that"
        raise ValueError(Message(f"{head} as uncompressed; ", _OPTIONS, text))


def _refuse_existing(outputs: Outputs) -> None:
    existing = outputs.existing()
    if existing:
        more = f" (and {len(existing) - 1} more)" if len(existing) > 1 else ""
        raise exists_error(existing[0], more)
