"""Tracebacks sent between processes: where each frame is, from which equal-looking ones are made.

The frames that a receiver makes have no variables. Whatever prints tracebacks, and debuggers, take
files, lines, columns and names of functions from their code objects, and the source from the file.
"""

from __future__ import annotations

import ast
import itertools
from types import TracebackType
from typing import NamedTuple

_MAX_FRAMES = 100


class Frame(NamedTuple):
    """Where a frame of a traceback is; without columns these are -1."""

    file: str
    function: str
    qualified_name: str
    module: str
    line: int
    end_line: int
    column: int
    end_column: int


def frames_of(traceback: TracebackType | None) -> list[tuple[object, ...]]:
    """The frames of `traceback` as plain tuples, without the middle of a long one."""
    frames = []
    while traceback is not None:
        frames.append(tuple(_frame(traceback)))
        traceback = traceback.tb_next
    if len(frames) > _MAX_FRAMES:
        frames[_MAX_FRAMES // 2 : -_MAX_FRAMES // 2] = []
    return frames


def _frame(traceback: TracebackType) -> Frame:
    code = traceback.tb_frame.f_code
    module = traceback.tb_frame.f_globals.get("__name__")
    place = code.co_filename, code.co_name, code.co_qualname, str(module)
    positions = itertools.islice(code.co_positions(), traceback.tb_lasti // 2, None)
    line, end_line, column, end_column = next(positions, (None,) * 4)
    if None in {line, end_line, column, end_column}:
        return Frame(*place, traceback.tb_lineno, traceback.tb_lineno, -1, -1)
    return Frame(*place, line, end_line, column, end_column)  # type: ignore[arg-type]


def traceback_of(frames: list[tuple[object, ...]]) -> TracebackType | None:
    """A traceback with those frames."""
    chain: TracebackType | None = None
    for frame in reversed(frames):
        raised = _raised_in(Frame(*frame))  # type: ignore[arg-type]
        chain = TracebackType(chain, raised.tb_frame, raised.tb_lasti, raised.tb_lineno)
    return chain


class _MarkerError(Exception):
    """Raised to get a frame."""


def _raised_in(frame: Frame) -> TracebackType:
    """The traceback of an exception that was raised in such a frame."""
    place = {
        "lineno": frame.line,
        "end_lineno": frame.end_line,
        "col_offset": frame.column,
        "end_col_offset": frame.end_column,
    }
    raising = ast.Raise(exc=ast.Name(id="_marker", ctx=ast.Load(), **place), cause=None, **place)
    code = compile(ast.Module(body=[raising], type_ignores=[]), frame.file, "exec")
    code = code.replace(co_name=frame.function, co_qualname=frame.qualified_name)
    marker = _MarkerError()
    try:
        exec(code, {"__name__": frame.module, "_marker": marker}, {})
    except _MarkerError as raised:
        if raised.__traceback__ is not None and raised.__traceback__.tb_next is not None:
            found = raised.__traceback__.tb_next
            found.tb_frame.f_globals.pop("_marker")  # it would keep the frame alive
            return found
    raise AssertionError("the code raises the marker")
