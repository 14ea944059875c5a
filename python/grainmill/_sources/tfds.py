"""Directories that TensorFlow Datasets has written in the format ArrayRecord.

`dataset_info.json` has, for each split, the number of records of each file and a template of the
files' names; `features.json` says what the records are. Both are read as JSON.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from grainmill._native import read_object
from grainmill._sources.paths import expand
from grainmill._url import is_url, shown

_INFO: Final = "dataset_info.json"
_FEATURES: Final = "features.json"
_FORMAT: Final = "array_record"
_TEMPLATE: Final = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_PART: Final = re.compile(r"(?P<split>[\w-]+)(?:\[(?P<slice>[^\]]*)\])?", re.ASCII)
_BOUND: Final = re.compile(r"(?P<number>-?\d[\d_]*(?:\.\d+)?)(?P<unit>%|shard)?", re.ASCII)


class TfdsDirectory(NamedTuple):
    """The records of a split.

    Attributes:
        paths: Its files, in the form `path[a:b]`.
        features: The contents of `features.json`; `None` if there is none.
    """

    paths: list[str]
    features: dict[str, Any] | None


def read_directory(path: str | os.PathLike[str], split: str) -> TfdsDirectory:
    """Finds the files of a split, without opening any.

    Raises:
        FileNotFoundError: `path` has no `dataset_info.json`.
        ValueError: There is no such split, the split's text is not understood or selects nothing,
            the files have another format, or `dataset_info.json` is damaged.
    """
    directory = os.fspath(path)
    if not is_url(directory):
        directory = str(Path(directory))
    info = _json(_joined(directory, _INFO))
    if info is None:
        below = [found.removesuffix(f"/{_INFO}") for found in _below(directory)]
        hint = f"; there is one in {', '.join(below)}" if below else ""
        raise FileNotFoundError(f"there is no {_INFO} in {shown(directory)!r}{hint}")
    found = info.get("fileFormat", "tfrecord")
    if found != _FORMAT:
        raise ValueError(
            f"{shown(directory)} has files of the format {found!r}, expected {_FORMAT!r}; read or "
            "convert them by the source of that format"
        )
    splits = _splits(directory, info)
    paths = [
        f"{file}[{start}:{stop}]"
        for part in split.split("+")
        for file, start, stop in _selected(part.strip(), splits, directory)
        if start < stop
    ]
    if not paths:
        raise ValueError(f"the split {split!r} of {shown(directory)} has no records")
    return TfdsDirectory(paths, _json(_joined(directory, _FEATURES)))


def _joined(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}" if is_url(directory) else str(Path(directory) / name)


def _below(directory: str) -> list[str]:
    """The descriptions of data sets in directories below."""
    found: list[str] = []
    if directory.lower().startswith(("http://", "https://")):  # which has no lists
        return found
    for pattern in (f"*/{_INFO}", f"*/*/{_INFO}"):
        with contextlib.suppress(OSError, ValueError):  # none, or a server that does not list
            escaped = directory if is_url(directory) else glob.escape(directory)
            found += expand(_joined(escaped, pattern))
    return found


def _json(path: str) -> dict[str, Any] | None:
    try:
        data = read_object(path) if is_url(path) else Path(path).read_bytes()
        found = json.loads(data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as failure:
        raise ValueError(f"{shown(path)}: not JSON: {failure}") from failure
    if not isinstance(found, dict):
        raise ValueError(f"{shown(path)}: expected a JSON object, got {type(found).__name__}")
    return found


def _splits(directory: str, info: dict[str, Any]) -> dict[str, list[tuple[str, int]]]:
    """The files of each split, with their numbers of records."""
    splits = {}
    try:
        for each in info["splits"]:
            lengths = [int(length) for length in each.get("shardLengths", ())]
            if any(length < 0 for length in lengths):
                raise ValueError("a length is negative")  # noqa: TRY301
            template = each.get("filepathTemplate") or _TEMPLATE
            names = [
                _file_name(template, info["name"], each["name"], number, len(lengths))
                for number in range(len(lengths))
            ]
            files = [_joined(directory, name) for name in names]
            splits[str(each["name"])] = list(zip(files, lengths, strict=True))
    except (KeyError, TypeError, ValueError, AttributeError) as failure:
        raise ValueError(
            f"{_joined(directory, _INFO)}: not as TensorFlow Datasets writes it: "
            f"{type(failure).__name__}: {failure}"
        ) from failure
    return splits


def _file_name(template: str, dataset: str, split: str, number: int, count: int) -> str:
    values = {
        "DATASET": dataset,
        "SPLIT": split,
        "FILEFORMAT": _FORMAT,
        "SHARD_INDEX": f"{number:05}",
        "NUM_SHARDS": f"{count:05}",
        "SHARD_X_OF_Y": f"{number:05}-of-{count:05}",
    }
    name = re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]), template)
    if "/" in name or "\\" in name:
        raise ValueError(f"a file name contains a directory: {name!r}")
    return name


def _selected(
    part: str, splits: dict[str, list[tuple[str, int]]], directory: str
) -> list[tuple[str, int, int]]:
    """The files of one part of a split's text, with the range of records in each."""
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(
            f"`split` must be like 'train', 'train[:10%]' or 'train+validation', got {part!r}"
        )
    name = match["split"]
    if name in splits:
        files = splits[name]
    elif name == "all":
        files = [file for each in splits.values() for file in each]
    else:
        raise ValueError(f"{directory} has no split {name!r}; it has {sorted(splits)}")
    total = sum(length for _, length in files)
    start, stop = _bounds(part, match["slice"], [length for _, length in files])
    selected, first = [], 0
    for file, length in files:
        selected.append((file, max(0, start - first), min(length, stop - first)))
        first += length
    if not 0 <= start <= stop <= total:
        raise ValueError(f"{part!r} must lie within {total} records, got {start} to {stop}")
    return selected


def _bounds(part: str, text: str | None, lengths: list[int]) -> tuple[int, int]:
    total = sum(lengths)
    if text is None:
        return 0, total
    start_text, colon, stop_text = text.partition(":")
    if colon:
        start = _bound(part, start_text, lengths) if start_text.strip() else 0
        stop = _bound(part, stop_text, lengths) if stop_text.strip() else total
        return start, max(start, stop)
    match = _BOUND.fullmatch(text.strip())
    if match is None or match["unit"] != "shard":  # one shard, as `train[3shard]`
        raise ValueError(f"{part!r} must have a range, such as [10:20], [:10%] or [1shard:]")
    shard, count = float(match["number"].replace("_", "")), len(lengths)
    if not (shard.is_integer() and -count <= shard < count):
        raise ValueError(f"{part!r} must be one of {count} shards")
    number = int(shard) % count
    return sum(lengths[:number]), sum(lengths[: number + 1])


def _bound(part: str, text: str, lengths: list[int]) -> int:
    """A bound of a range, as a number of records from the start."""
    match = _BOUND.fullmatch(text.strip())
    total = sum(lengths)
    if match is None:
        raise ValueError(f"{part!r} has the bound {text!r}, expected a number, `N%` or `Nshard`")
    number = float(match["number"].replace("_", ""))
    limit = {"%": 100, "shard": len(lengths), None: total}[match["unit"]]
    if abs(number) > limit:
        raise ValueError(f"{part!r} has the bound {text!r}, which exceeds {limit}")
    if match["unit"] == "%":
        number = round(number * total / 100)
        return int(number + total if match["number"].startswith("-") else number)
    if number != int(number):
        raise ValueError(f"{part!r} has the bound {text!r}, expected an integer")
    number = int(number) + (limit if match["number"].startswith("-") else 0)
    return sum(lengths[:number]) if match["unit"] == "shard" else number
