"""Path arguments of all sources: globs, numbered shards, directories, and ranges of records."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grainmill import _native
from grainmill._sources import other_kinds
from grainmill._url import absolute, is_url
from grainmill._url import shown as shown_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_RANGE: Final = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)
_SHARDS: Final = re.compile(r"(.*[^/\\@])@(\d+|\*)((?:\.[^/\\@]*)?)", re.DOTALL)
_MAGIC: Final = re.compile(r"[*?[]")
_SHARD_SUFFIX: Final = re.compile(r"-\d+-of-\d+(?=\.|$)")
# Names that tools give to files beside the data.
_HIDDEN: Final = (".", "_")
_MAX_SHOWN: Final = 4
# The names of more shards are not made up: they must be there.
_MAX_UNSEEN_SHARDS: Final = 100_000


class FileRange(NamedTuple):
    """A file, and which of its records are meant.

    Attributes:
        path: The path.
        skip: Number of records to skip at its start.
        take: Number of records to read after that; `None` for all.
        is_trusted: Whether the file has these records for sure, as a `FileInstruction` was made by
            what knows it.
    """

    path: str
    skip: int
    take: int | None
    is_trusted: bool = False


def file_range(path: object) -> FileRange:
    """The file and the records that one element of a path argument stands for.

    Raises:
        ValueError: It has an unsupported type, or the range is reversed.
    """
    if isinstance(path, str):
        if match := _RANGE.fullmatch(path):
            start, stop = int(match[2]), int(match[3])
            return FileRange(match[1], start, _take(path, stop - start))
        return FileRange(path, 0, None)
    if isinstance(path, os.PathLike):
        return FileRange(os.fspath(path), 0, None)
    if is_file_instruction(path):
        given: Any = path
        take = _take(path, given.take)
        return FileRange(os.fspath(given.filename), given.skip, take, is_trusted=True)
    raise ValueError(
        "All elements in a path sequence must be of type: String, pathlib.Path, or "
        f"FileInstruction, got {type(path).__name__}"
    )


def _take(path: object, count: int) -> int:
    if count < 0:
        raise ValueError(f"a range of records must not end before it starts, got {_text(path)}")
    return count


def is_file_instruction(path: object) -> bool:
    """Whether `path` has the attributes of a `FileInstruction`."""
    names = ("filename", "skip", "take", "examples_in_shard")
    return all(hasattr(path, name) for name in names)


def listed(paths: object) -> Sequence[object]:
    """The elements of a path argument, which may be a single one.

    Raises:
        ValueError: It is empty, or of an unsupported type.
    """
    if isinstance(paths, str | os.PathLike) or is_file_instruction(paths):
        return [paths]
    if not isinstance(paths, Sequence):
        # The message of the `array_record` package, with the type that was passed.
        raise ValueError(
            "Unsupported path format was used. Path format must be a Sequence, String, "
            f"pathlib.Path or FileInstruction, got {type(paths).__name__}"
        )
    if not paths:
        raise ValueError("Paths sequence can not be of 0 length")
    return paths


def expand(paths: Any, *, suffixes: Sequence[str] = (), looks_up: bool = True) -> list[str]:
    """The files that a path argument stands for; ranges stay in the form `path[a:b]`.

    Args:
        paths: A path, a `FileInstruction`, or a sequence of them.
        suffixes: If given, only files with one of these suffixes, in lower case here, are taken
            from a directory; a shard, as `-00000-of-00010`, may stand before or after any of it.
        looks_up: Whether each plain path of several is looked up, as it may be a directory. A
            single one, or one that ends with a separator, always is.

    Raises:
        ValueError: The argument, or an element, has an unsupported type; there is none; a range is
            reversed, or is one of several files; a directory is of a kind that is not read, such as
            a table of Delta Lake.
        FileNotFoundError: No file matches a pattern, or is in a directory.
    """
    found = []
    for path, skip, take, _ in expand_ranges(paths, suffixes=suffixes, looks_up=looks_up):
        found.append(path if take is None else f"{path}[{skip}:{skip + take}]")
    return found


def expand_ranges(
    paths: Any, *, suffixes: Sequence[str] = (), looks_up: bool = True
) -> list[FileRange]:
    """As `expand`, with each file's range."""
    several = listed(paths)
    looks_up = looks_up or len(several) == 1
    found: list[FileRange] = []
    for path in several:
        one = file_range(path)
        if is_file_instruction(path):
            found.append(one)
            continue
        files = _files(one.path, suffixes, looks_up=looks_up and one.take is None)
        if one.take is not None and len(files) != 1:
            raise ValueError(
                f"a range of records must be one of a single file, but {_text(path)} matches "
                f"{len(files)} files"
            )
        found += [one._replace(path=file) for file in files]
    return found


def below(path: str) -> tuple[str, list[str]] | None:
    """A directory, or a URL that ends with `/`, and the files at any depth below it, from there.

    They are in sorted order; hidden ones, and those in hidden directories, are left out. `None` if
    `path` is neither.

    Raises:
        FileNotFoundError: There are no files.
    """
    if not (path.endswith("/") if is_url(path) else os.path.isdir(path)):  # noqa: PTH112 - as above
        return None
    if is_url(path):
        root, split = path, "/"
        found = [url.removeprefix(path) for url in list_objects(path) if not url.endswith("/")]
    else:
        root, split = os.path.join(path, ""), os.sep  # noqa: PTH118 - as above
        found = glob.glob("**/*", root_dir=path, recursive=True)  # noqa: PTH207 - as above
        found = [name for name in found if not os.path.isdir(root + name)]  # noqa: PTH112 - as above
    names = (name for name in found if not any(_is_hidden(part) for part in name.split(split)))
    return root, _not_empty(sorted(names), path, "there are no files below")


def _is_hidden(name: str) -> bool:
    return name.startswith(_HIDDEN)


def shown(paths: Sequence[str]) -> str:
    """The argument `paths` for the text of a dataset; of many, the first ones."""
    more = f", ... {len(paths):,} in all" if len(paths) > _MAX_SHOWN else ""
    return f"paths=[{', '.join([_text(path) for path in paths[:_MAX_SHOWN]])}{more}]"


def _text(path: object) -> str:
    return repr(shown_path(path) if isinstance(path, str) else path)


def _files(path: str, suffixes: Sequence[str], *, looks_up: bool) -> list[str]:
    """The files that one path without a range stands for."""
    if is_url(path):
        return _objects(path, suffixes)
    has_separator = path.endswith(("/", os.sep)) and len(path) > 1
    if (looks_up or has_separator) and os.path.isdir(path):  # noqa: PTH112 - it may be bytes
        return _in_directory(path, suffixes)
    shards = _SHARDS.fullmatch(path)
    if not (shards or _MAGIC.search(path)) or os.path.lexists(path):
        return [path]
    if shards and not _MAGIC.search(shards[1]):
        return _shards(path, shards, glob.glob)
    found = glob.glob(path, recursive=True)  # noqa: PTH207 - the text stays as it was given
    matched = sorted(file for file in found if not os.path.isdir(file))  # noqa: PTH112
    return _not_empty(matched, path, "no file matches the pattern")


def _in_directory(path: str, suffixes: Sequence[str]) -> list[str]:
    entries = other_kinds.entries(path)
    _check_kind(other_kinds.of_directory(path, entries), path)
    names = sorted(name for name in entries if not name.endswith("/"))
    files = [os.path.join(path, name) for name in _data_files(names, suffixes)]  # noqa: PTH118
    return _not_empty(files, path, f"the directory has no {_kind(suffixes)}")


def _check_kind(kind: other_kinds.Kind | None, path: str) -> None:
    if kind is not None and not kind.has_own_reader:
        raise ValueError(kind.message(shown_path(path)))


def _data_files(names: Iterable[str], suffixes: Sequence[str]) -> list[str]:
    return [
        name
        for name in names
        if not _is_hidden(name)
        and (not suffixes or _SHARD_SUFFIX.sub("", name.lower()).endswith(tuple(suffixes)))
    ]


def _kind(suffixes: Sequence[str]) -> str:
    plain = [suffix for suffix in suffixes if suffix.count(".") == 1]  # not of compressed files
    return f"file that ends with {' or '.join(plain)}" if suffixes else "files"


def _not_empty(files: list[str], path: str, problem: str) -> list[str]:
    if not files:
        where = "" if absolute(path) == path else f", relative to {os.getcwd()}"  # noqa: PTH109
        raise FileNotFoundError(f"{problem}: {_text(path)}{where}")
    return files


def _shards(path: str, match: re.Match[str], matching: Callable[[str], list[str]]) -> list[str]:
    """The shards of `name@N`, or of `name@*` for as many as there are."""
    name, count, suffix = match[1], match[2], match[3]
    of = r"\d{5,}"
    if count != "*":
        digits = max(5, len(count))
        total = int(count)
        if not total:
            raise ValueError(f"the number of shards must be at least 1, got {_text(path)}")
        if total <= _MAX_UNSEEN_SHARDS:
            return [f"{name}-{k:0{digits}}-of-{total:0{digits}}{suffix}" for k in range(total)]
        of = str(total)
    pattern = re.compile(re.escape(name) + rf"-(\d{{5,}})-of-({of})" + re.escape(suffix))
    found = sorted(
        file
        for file in matching(f"{_escaped(name)}-*-of-*{_escaped(suffix)}")
        if pattern.fullmatch(file)
    )
    numbers = [pattern.fullmatch(file) for file in found]
    counts = {number[2] for number in numbers if number}
    _not_empty(found, path, "there are no shards that match")
    if len(counts) != 1:
        raise ValueError(
            f"{_text(path)} matches shards of several sets, of {' and of '.join(sorted(counts))} "
            "shards; give the number in place of `*`"
        )
    (total_text,) = counts
    if len(found) != int(total_text):
        raise FileNotFoundError(
            f"{_text(path)} matches {len(found)} shards out of {int(total_text)}"
        )
    return found


def _escaped(path: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", path)


# --- URLs ---------------------------------------------------------------------------------------


def _objects(url: str, suffixes: Sequence[str]) -> list[str]:
    """The objects that a URL stands for: itself, or what the store lists."""
    if url.lower().startswith(("http://", "https://")):
        return _served(url)
    shards = _SHARDS.fullmatch(url)
    if shards and "/" in url.partition("://")[2].partition("@")[0]:  # else of an account
        return _shards(url, shards, _matching)
    if url.endswith("/"):
        names = {found[len(url) :]: found for found in list_objects(url)}
        _check_kind(other_kinds.of_names(names), url)
        data = _data_files(sorted(name for name in names if name and "/" not in name), suffixes)
        return _not_empty([names[name] for name in data], url, f"there is no {_kind(suffixes)} in")
    if not _MAGIC.search(url):
        return [url]
    matched = _matching(url)
    if not matched and url in list_objects(url):
        return [url]
    return _not_empty(matched, url, "no object matches the pattern")


def _served(url: str) -> list[str]:
    """The files of a web server, which has no lists, that a URL stands for."""
    named, _, query = url.partition("?")
    name = named.partition("://")[2].partition("/")[2]  # an address may be in brackets
    shards = _SHARDS.fullmatch(named)
    if shards and not query and _SHARDS.fullmatch(f"/{name}"):
        return _shards(url, shards, _matching)
    if name.endswith("/") or _MAGIC.search(name):
        list_objects(named)  # says what is wrong
    return [url]


def _matching(pattern: str) -> list[str]:
    fixed = _MAGIC.split(pattern, maxsplit=1)[0]
    matches = re.compile(_regex(pattern), re.DOTALL).fullmatch
    # A name that ends with a slash stands for a directory, and is none of a file.
    found = (url for url in list_objects(fixed) if not url.endswith("/"))
    return sorted(url for url in found if matches(url))


def _regex(pattern: str) -> str:
    """A regular expression with the meaning that `glob` gives to a recursive pattern."""
    translated = ""
    # Two asterisks are special only as a whole name.
    parts = r"((?:(?<=/)|\A)\*\*(?:/|\Z))|\*+|\?|\[!?\]?[^\]]*\]|."
    for match in re.finditer(parts, pattern, re.DOTALL):
        part = match[0]
        if match[1]:
            translated += "(?:[^/]+/)*" if part == "**/" else ".*"
        elif part.startswith("*"):
            translated += "[^/]*"
        elif part == "?":
            translated += "[^/]"
        elif part.startswith("[") and len(part) > 1:
            inner = part[1:-1].replace("\\", "\\\\")
            inner = f"^/{inner[1:]}" if inner.startswith("!") else inner.replace("^", "\\^", 1)
            translated += f"[{inner}]"
        else:
            translated += re.escape(part)
    return translated


def list_objects(prefix: str) -> list[str]:
    """The URLs of the objects whose URL starts with `prefix`.

    Raises:
        ValueError: This build cannot list objects.
        OSError: The store cannot be reached.
    """
    listing: Callable[[str], list[tuple[str, int]]] | None = getattr(_native, "list_objects", None)
    if listing is None:
        raise ValueError(
            f"this build of grainmill cannot list {_text(prefix)}; give the URL of each file"
        )
    return [url for url, _ in listing(prefix)]
