"""Notes on exceptions: which element of which stage it was, and what that is made of."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.node import Node

_NUMBER: Final = re.compile(r"element \d+|dataset \d+")


def add_note(failure: BaseException, lines: Sequence[str]) -> None:
    """Adds one note of several lines to `failure`; where that is impossible, it stays as it is.

    It replaces one on another element of the same stage: the same object may be raised again.
    """
    with contextlib.suppress(Exception):
        first = _without_number(lines[0])
        notes = [note for note in notes_of(failure) if _without_number(note) != first]
        notes.append("\n  ".join(lines))
        set_notes(failure, notes)


def notes_of(failure: BaseException) -> list[Any]:
    """The notes that `failure` has."""
    notes = getattr(failure, "__notes__", None)
    return list(notes) if isinstance(notes, list | tuple) else []


def set_notes(failure: BaseException, notes: list[Any]) -> None:
    """Has `failure` have `notes`, even where its class lets nothing be assigned."""
    BaseException.__setattr__(failure, "__notes__", notes)


def _without_number(note: Any) -> Any:
    if not isinstance(note, str):
        return note
    return _NUMBER.sub("element", note.partition("\n")[0])


def located(node: Node) -> str:
    """What `node` is called in notes: its text, and the line of the user's code that added it."""
    at = node.added_at or _defined_at(node)
    return f"`{node}` at {at}" if at else f"`{node}`"


def _defined_at(node: Node) -> str | None:
    """Where a user's own dataset class says what its elements are."""
    dataset = getattr(node, "dataset", None)
    for name in ("__getitem__", "__iter__"):
        code = getattr(getattr(type(dataset), name, None), "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return None
