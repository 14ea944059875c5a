"""What this process may use: the machine's memory, or less if a control group limits it."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING

from grainmill._interrupts import suppressed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

# A quarter leaves memory for the model, the page cache and another pipeline.
_BUDGET_SHARE = 4
_ASSUMED_BYTES = 4 << 30  # where the system does not say
_LIMIT_FILES = {"cgroup2": ["memory.max"], "cgroup": ["memory.limit_in_bytes"]}


@functools.cache  # it takes half a millisecond, and a pipeline may read a thousand datasets
def default_budget_bytes() -> int:
    """The default limit on the memory of prefetched elements."""
    return usable_bytes() // _BUDGET_SHARE


def usable_bytes(root: str | Path = "") -> int:
    """The machine's memory, or the lowest limit of this process's control group and its ancestors.

    Args:
        root: The directory with `proc` and the mounted control group hierarchies.
    """
    limits = group_limits("memory", _LIMIT_FILES, root)
    return min([machine_bytes(), *(int(text) for text in limits if text.isdecimal())])


def machine_bytes() -> int:
    """The memory of the machine."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Windows: a struct of eight words, its length first; the second word is the physical memory.
    words = (ctypes.c_uint64 * 8)(64)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(words))  # type: ignore[attr-defined]
    return words[1] or _ASSUMED_BYTES


def group_limits(
    controller: str, files: Mapping[str, Sequence[str]], root: str | Path = ""
) -> Iterator[str]:
    """What all control groups of this process state in some files; nothing without control groups.

    Args:
        controller: Such as "memory".
        files: The names of its files, by the kind of hierarchy ("cgroup2" or "cgroup"); what
            several of them state is joined by a space.
        root: The directory with `proc` and the mounted control group hierarchies.
    """
    paths: dict[str, str] = {}
    path: str | None
    for line in lines_of(f"{root}/proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        paths[controllers] = group
    for line in lines_of(f"{root}/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mount_root, mount_point = before.split(" ")[3:5]
        if kind == "cgroup2":
            path = paths.get("")
        elif kind == "cgroup" and controller in options.split(","):
            found = (group for names, group in paths.items() if controller in names.split(","))
            path = next(found, None)
        else:
            continue
        if path is not None:
            yield from _ancestor_limits(f"{root}{mount_point}", mount_root, path, files[kind])


def _ancestor_limits(mount: str, mount_root: str, path: str, names: Sequence[str]) -> Iterator[str]:
    """The limits of the group `path` and of its ancestors that are mounted."""
    group, outside = _parts(path), _parts(mount_root)
    # In a container only a subtree may be mounted, or `path` may be a path of the host.
    if group[: len(outside)] == outside:
        group = group[len(outside) :]
    inside = [part for part in group if part != ".."]
    for depth in range(len(inside), -1, -1):
        texts = [
            line for name in names for line in lines_of("/".join([mount, *inside[:depth], name]))
        ]
        if texts:
            yield " ".join(texts)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in {"", "."}]


def lines_of(file: str) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    with suppressed(OSError, UnicodeDecodeError), open(file, encoding="utf-8") as lines:  # noqa: PTH123 - `pathlib` takes 4 ms to import
        return lines.read().splitlines()
    return []
