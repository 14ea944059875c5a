"""The stores of caches, each in memory or in files, and those for the arguments of `cache`.

Those in memory, `MemoryStore` and `SequenceMemory`, say what the methods of both do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from grainmill._cache.disk import DiskStore
from grainmill._cache.files import CacheDirectory
from grainmill._cache.memory import MemoryStore
from grainmill._cache.sequence import (
    FinishedFiles,
    SequenceFiles,
    SequenceMemory,
    SequencePass,
)
from grainmill._memory import default_budget_bytes
from grainmill._plan.arguments import checked_integer, wrong_type
from grainmill._url import is_url, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._plan.node import MapNode, Node

ElementStore: TypeAlias = MemoryStore | DiskStore
SequenceStore: TypeAlias = SequenceMemory | SequenceFiles
StoredSequence: TypeAlias = SequenceMemory | FinishedFiles
"""The first elements of a sequence, or all."""
Pass: TypeAlias = SequenceMemory | SequencePass
"""What takes the elements of one pass over a sequence."""


def element_store(
    path: str | os.PathLike[str] | None, ram_budget_bytes: int | None
) -> Callable[[MapNode], ElementStore]:
    """What makes the store of `MapDataset.cache`, with its arguments checked."""
    where, budget_bytes = _checked(path, ram_budget_bytes)
    if where is None:
        return lambda parent: MemoryStore(budget_bytes, parent.length)
    kind = "random access"
    return lambda parent: DiskStore(CacheDirectory(where, kind, parent), parent.length)


def sequence_store(
    path: str | os.PathLike[str] | None, ram_budget_bytes: int | None
) -> Callable[[Node], SequenceStore]:
    """What makes the store of `IterDataset.cache`, with its arguments checked."""
    where, budget_bytes = _checked(path, ram_budget_bytes)
    if where is None:
        return lambda _: SequenceMemory(budget_bytes)
    return lambda parent: SequenceFiles(CacheDirectory(where, "sequence", parent))


def _text(path: object) -> str:
    return repr(shown(path) if isinstance(path, str) else path)


def _checked(
    path: str | os.PathLike[str] | None, ram_budget_bytes: int | None
) -> tuple[str | None, int]:
    """The path, if any, and otherwise the limit: a quarter of the memory unless one is given."""
    if ram_budget_bytes is not None:
        if path is not None:
            raise ValueError(
                "`ram_budget_bytes` bounds a cache in memory and has no effect on one in files; "
                f"leave it out, or leave out `path`, got {_text(path)}"
            )
        ram_budget_bytes = checked_integer(ram_budget_bytes, "ram_budget_bytes", minimum=1)
    if path is None:
        return None, default_budget_bytes() if ram_budget_bytes is None else ram_budget_bytes
    if not isinstance(path, str | os.PathLike):
        raise wrong_type("`path` must be a path or `None`", path)
    where = os.fspath(path)
    if not isinstance(where, str) or is_url(where):
        raise ValueError(f"`path` must be a directory of the local file system, got {_text(path)}")
    if not where:
        raise ValueError("`path` must not be empty")
    return where, 0
