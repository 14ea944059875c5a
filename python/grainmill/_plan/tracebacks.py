"""Tracebacks that show the user's code, without the frames of this package."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType, TracebackType
from typing import Final, NamedTuple

from grainmill._plan.settings import config

_PACKAGE: Final = __file__.rsplit(os.sep, 2)[0] + os.sep
_FUSED: Final = "<grainmill"


def line_of_user() -> str | None:
    """The file and line that called this package, such as `train.py:12`, if any did."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - a whole stack would cost 20 times more
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def drop_inner_frames(failure: BaseException) -> None:
    """Removes the frames of this package from the traceback of `failure`.

    If there are no others, the innermost stays. With `py_traceback_filtering="off"` all stay.
    """
    if config.py_traceback_filtering == "off":
        return
    frames = []
    traceback = failure.__traceback__
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    shown = [frame for frame in frames if not _is_inner(frame.tb_frame)] or frames[-1:]
    chain: TracebackType | None = None
    for frame in reversed(shown):
        chain = TracebackType(chain, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    BaseException.with_traceback(failure, chain)  # works even if its class forbids assignment
    for frame in frames:
        _clear_frames(frame.tb_frame)


def first_users_code(failure: BaseException) -> CodeType | None:
    """The code of the user's outermost function in the traceback of `failure`, if there is one."""
    traceback = failure.__traceback__
    while traceback is not None:
        if not _is_inner(traceback.tb_frame):
            return traceback.tb_frame.f_code
        traceback = traceback.tb_next
    return None


class CodePlace(NamedTuple):
    """Where a function is: its file, the line that it executes, and its name."""

    file: str
    line: int
    function: str


def calls_of(frame: FrameType | None) -> list[CodePlace]:
    """The calls on a stack, the innermost one, `frame`, last."""
    calls = []
    while frame is not None:
        code = frame.f_code
        calls.append(CodePlace(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return calls[::-1]


def users_calls(calls: list[CodePlace]) -> list[CodePlace]:
    """Those of `calls` that this package makes and that are not of this package."""
    inner = [call.file.startswith((_PACKAGE, _FUSED)) for call in calls]
    if True not in inner:
        return []
    start = inner.index(True)
    return [call for call, own in zip(calls[start:], inner[start:], strict=True) if not own]


def _clear_frames(frame: FrameType | None) -> None:
    """Clears the finished frames of this package, from `frame` outwards.

    The frames in a traceback refer to their callers. A caller with the exception in a variable
    would form a reference cycle that keeps the pipeline alive until garbage collection.
    """
    while frame is not None:
        if _is_inner(frame):
            try:
                frame.clear()
            except RuntimeError:  # it is still running, and so are its callers
                return
        frame = frame.f_back


def _is_inner(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_PACKAGE, _FUSED))
