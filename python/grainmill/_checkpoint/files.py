"""Names of checkpoint files, and writing them such that each is complete or absent."""

from __future__ import annotations

import hashlib
import os
import pathlib
import sys
from typing import Any

from grainmill import _atomic_file
from grainmill._url import is_url


def process_index_and_count() -> tuple[int, int]:
    """The index of this JAX process and their number; 0 and 1 in a program without JAX.

    JAX is not imported for it: a program that has not imported JAX has started no other process.
    """
    jax = sys.modules.get("jax")
    if jax is None or not hasattr(jax, "process_count"):
        return 0, 1
    return int(jax.process_index()), int(jax.process_count())


def state_file(index: int, count: int) -> str:
    """The file with the state of process `index` of `count`."""
    return f"process_{index}-of-{count}.json"


def shard_file(shard: int) -> str:
    """The file with the state of one dataset of an elastic iterator."""
    return f"shard_state_{shard}.json"


def record_file(index: int, count: int) -> str:
    """The file that describes the pipeline; Grain and other programs do not look for this name."""
    return f"pipeline_{index}-of-{count}.grainmill"


def digest(text: str) -> str:
    """A short text that differs between different texts."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Any, text: str) -> None:
    """Writes a file that is either complete under its name, or not there at all.

    Args:
        path: A path of the local file system, or an object with `write_text` whose store replaces
            objects as a whole, as buckets do.
        text: What the file contains.

    Raises:
        FileNotFoundError: There is no such directory.
    """
    if hasattr(path, "__fspath__") and not is_url(os.fspath(path)):
        _atomic_file.write(pathlib.Path(path), text.encode())
    else:
        path.write_text(text)
