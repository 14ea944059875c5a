"""Tracebacks that show the user's code, not the layers between."""

from __future__ import annotations

import os
import pathlib
import sys
from types import CodeType, FrameType, TracebackType
from typing import Final

from grainmill._plan.settings import config

_PACKAGE: Final = str(pathlib.Path(__file__).parent.parent) + os.sep
_FUSED: Final = "<grainmill"


def line_of_user() -> str | None:
    """The file and line that called this package, if any did: `train.py:12`."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - a whole stack would cost 20 times more
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def drop_inner_frames(failure: BaseException) -> None:
    """Takes the frames of this package out of the traceback of `failure`, but for the first.

    What raised it inside this package stays in sight where no frame of the user's follows. The
    setting `py_traceback_filtering="off"` keeps everything.
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
    BaseException.with_traceback(failure, chain)  # also where a class lets nothing be assigned
    for frame in frames:
        _forget_variables(frame.tb_frame)


def first_users_code(failure: BaseException) -> CodeType | None:
    """The code of the user's outermost function that `failure` has left, if one was in Python."""
    traceback = failure.__traceback__
    while traceback is not None:
        if not _is_inner(traceback.tb_frame):
            return traceback.tb_frame.f_code
        traceback = traceback.tb_next
    return None


def _forget_variables(frame: FrameType | None) -> None:
    """Empties the frames of this package that have ended, from `frame` outwards.

    A frame is kept by those it called. One that held the failure, as every layer does on its way,
    would be held by it in turn, and the whole pipeline with it until the collector comes by.
    """
    while frame is not None:
        if _is_inner(frame):
            try:
                frame.clear()
            except RuntimeError:  # it is running, so what called it is as well
                return
        frame = frame.f_back


def _is_inner(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_PACKAGE, _FUSED))
