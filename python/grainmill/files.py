r"""Whole files of records: what they contain, whether they are intact, copies in other formats.

Functions take one file or many, of any format of `FORMATS`, local or by URL. The commands of
`grainmill` are these functions and what they print.

Attributes:
    FORMATS: The formats of files, by name; each is a `Format`.

Example:
    >>> from grainmill import files
    >>> with open("words.jsonl", "w") as file:
    ...     _ = file.write('{"word": "one"}\n{"word": "two"}')
    >>> files.convert("words.jsonl", "words.array_record", read_back=True)["records"]
    2
    >>> files.verify("words.array_record")["problems"]
    []
    >>> list(files.read_records("words.array_record", start=1))
    [b'{"word": "two"}']
"""

from typing import TYPE_CHECKING

from grainmill._lazy_names import lazy_names
from grainmill._native import redacted as _redacted
from grainmill._url import is_url as _is_url

if TYPE_CHECKING:
    from grainmill._files.conversion import ConversionProgress
    from grainmill._files.convert import convert
    from grainmill._files.describe import describe
    from grainmill._files.formats import FORMATS, Format, detect_format, find_files
    from grainmill._files.index import write_index
    from grainmill._files.manifest import Manifest
    from grainmill._files.messages import message_of
    from grainmill._files.reading import as_json, read_at, read_records
    from grainmill._files.tf_example import example_as_json
    from grainmill._files.verify import verify
else:
    # Imported when they are used: together they take as long as the package.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grainmill._files.conversion": ["ConversionProgress"],
            "grainmill._files.convert": ["convert"],
            "grainmill._files.describe": ["describe"],
            "grainmill._files.formats": ["FORMATS", "Format", "detect_format", "find_files"],
            "grainmill._files.index": ["write_index"],
            "grainmill._files.manifest": ["Manifest"],
            "grainmill._files.messages": ["message_of"],
            "grainmill._files.reading": ["as_json", "read_at", "read_records"],
            "grainmill._files.tf_example": ["example_as_json"],
            "grainmill._files.verify": ["verify"],
        },
    )


__all__ = [
    "FORMATS",
    "ConversionProgress",
    "Format",
    "Manifest",
    "as_json",
    "convert",
    "describe",
    "detect_format",
    "example_as_json",
    "find_files",
    "is_url",
    "message_of",
    "read_at",
    "read_records",
    "redacted",
    "verify",
    "write_index",
]


def is_url(path: str) -> bool:
    """Returns whether a path is a URL, of whatever service, instead of the name of a local file.

    Args:
        path: The path.

    Example:
        >>> from grainmill import files
        >>> files.is_url("s3://bucket/name"), files.is_url("c:/name")
        (True, False)
    """
    return _is_url(path)


def redacted(text: str) -> str:
    """Returns a text without what may be secret of the URLs in it: users, passwords, queries.

    Messages of this package, and paths in its reports, are such texts already.

    Args:
        text: The text, or a single path.

    Example:
        >>> from grainmill import files
        >>> files.redacted("reading https://user:password@host/a.jsonl?signature=abc")
        'reading https://host/a.jsonl?...'
    """
    return _redacted(text)
