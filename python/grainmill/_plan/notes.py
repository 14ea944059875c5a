"""Notes on exceptions, which name the element, its stage and its record."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from grainmill._interrupts import suppressed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._plan.node import Node

_NUMBER: Final = re.compile(r"element \d+|dataset \d+")


def add_note(failure: BaseException, lines: Sequence[str]) -> None:
    """Adds a note of several lines to `failure`, unless its class makes that impossible.

    It replaces a note on another element of the same stage, as the same exception object may be
    raised again.
    """
    with suppressed():
        first = _without_number(lines[0])
        notes = [note for note in notes_of(failure) if _without_number(note) != first]
        notes.append("\n  ".join(lines))
        set_notes(failure, notes)


def note_part(failure: BaseException, node: Node, number: int) -> None:
    """Adds to `failure` that it concerns element `number` of a batch of `node`."""
    with suppressed():
        add_note(failure, [f"which is element {number} of a batch of {located(node)}"])


def notes_of(failure: BaseException) -> list[Any]:
    """The notes of `failure`."""
    notes = getattr(failure, "__notes__", None)
    return list(notes) if isinstance(notes, list | tuple) else []


def set_notes(failure: BaseException, notes: list[Any]) -> None:
    """Replaces the notes of `failure`, even if its class forbids assignment."""
    BaseException.__setattr__(failure, "__notes__", notes)


def _without_number(note: Any) -> Any:
    if not isinstance(note, str):
        return note
    return _NUMBER.sub("element", note.partition("\n")[0])


def located(node: Node) -> str:
    """How notes refer to `node`: its text, and the line of the user's code that added it."""
    at = node.added_at or _defined_at(node)
    return f"`{node}` at {at}" if at else f"`{node}`"


def _defined_at(node: Node) -> str | None:
    """Where a user's own dataset class defines how its elements are computed."""
    dataset = getattr(node, "dataset", None)
    for name in ("__getitem__", "__iter__"):
        code = getattr(getattr(type(dataset), name, None), "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return None
