"""Which paths are URLs, and what of them may be shown; those of local files, from the root."""

from __future__ import annotations

import os
import re
from typing import Final

from grainmill import _native

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # two letters: `c:` is a drive


def is_url(path: str) -> bool:
    """Whether a path is a URL, of whatever service, instead of the name of a local file."""
    return _URL.match(path) is not None


def shown(path: str) -> str:
    """The path for messages: a URL without user, password and query, which may be secrets."""
    return _native.shown_path(path) if is_url(path) else path


def identified(path: str) -> str:
    """The path for what is kept in files: a URL that was signed again is of the same file."""
    return shown(path).removesuffix("?...") if is_url(path) else path


def absolute(path: str) -> str:
    """The path from the root; URLs stay as they are."""
    if is_url(path) or os.path.isabs(path):  # noqa: PTH117 - a `Path` costs far more
        return path
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - a `Path` would normalize it
