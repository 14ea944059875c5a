"""Which exceptions are interrupts: raised by a signal handler, not by what was being computed.

An interrupt may occur between any two instructions, so it says nothing about the element in flight,
and what it interrupts may be half done: it is neither delayed nor suppressed, no stage is named in
a note on it, and stages return to the last element delivered before they are used again.

It may be of any class, also of one by which Python or this package know that data end. So whoever
catches such a class on the way of an element must ask whether it is an interrupt. A `StopIteration`
is replaced as soon as it is caught, as Python does in generators: on its way it would end a loop.
"""

from __future__ import annotations

import functools
import signal
from _signal import getsignal  # type: ignore[import-not-found]
from opcode import opname
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FrameType, TracebackType


_HAS_VARARGS: Final = 0x04  # `inspect.CO_VARARGS`
_STOPS: Final = (StopIteration, StopAsyncIteration)
_SIGNALS: Final = [int(number) for number in signal.valid_signals()]  # listing them takes long


def is_interrupt(failure: BaseException) -> bool:
    """Whether `failure` is no `Exception`, or was raised by a signal handler (or by a tracer).

    The interpreter passes the frame that it interrupts to those, as no other caller does. What
    generators, and `raise_interrupt`, raise in place of a `StopIteration` counts as that.
    """
    if not isinstance(failure, Exception):
        return True
    if isinstance(failure, RuntimeError) and isinstance(failure.__cause__, _STOPS):
        return is_interrupt(failure.__cause__)
    traceback = failure.__traceback__
    if traceback is None or traceback.tb_next is None:
        return False  # the frame that caught it called no other; looking for handlers takes long
    handlers = _handlers()
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in handlers or _takes_interrupted_frame(frame):
            return True
        traceback = traceback.tb_next
    return False


def _handlers() -> set[CodeType]:
    """The code of the signal handlers, which may assign another value to their argument."""
    codes = set()
    for number in _SIGNALS:
        # `signal.getsignal` takes ten times as long: it looks for each result in an `Enum`.
        handler: Any = getsignal(number)
        if not callable(handler):
            continue
        while isinstance(handler, functools.partial):
            handler = handler.func
        if not hasattr(handler, "__code__"):
            handler = handler.__call__
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if code is not None:
            codes.add(code)
    return codes


def _takes_interrupted_frame(frame: FrameType) -> bool:
    """Whether an argument of the function that `frame` runs is the frame that called it."""
    caller, code = frame.f_back, frame.f_code
    takes_any = bool(code.co_flags & _HAS_VARARGS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + takes_any]
    if caller is None or not names:
        return False
    variables = frame.f_locals
    passed: list[Any] = [variables.get(name) for name in names]
    if type(variables) is dict:  # a copy, which would keep elements alive
        variables.clear()
    if takes_any and isinstance(passed[-1], tuple):
        passed.extend(passed.pop())
    return any(argument is caller for argument in passed)


class suppressed:  # noqa: N801 - used as `contextlib.suppress` is
    """`contextlib.suppress`, of any `Exception` by default, that lets interrupts pass."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds or (Exception,)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return isinstance(failure, self._kinds) and not is_interrupt(failure)


def raise_interrupt(failure: BaseException) -> None:
    """Raises `failure` again if it is an interrupt; for handlers that go on with something else."""
    if is_interrupt(failure):
        if isinstance(failure, StopIteration):
            raise stopped_error() from failure
        raise failure


def stopped_error() -> RuntimeError:
    """What is raised in place of the `StopIteration` of a signal handler."""
    return RuntimeError("a signal handler raised StopIteration")


def next_of(iterator: Iterator[Any], end: object) -> Any:
    """`next(iterator, end)` for an iterator of a user, which a signal handler does not end."""
    try:
        return next(iterator)
    except StopIteration as stop:
        raise_interrupt(stop)
        return end


def listed(values: Iterable[Any]) -> list[Any]:
    """`list(values)` for values of a user, which a signal handler does not end."""
    iterator = iter(values)
    if not isinstance(type(iterator).__next__, FunctionType):  # no handler runs in it
        return list(iterator)
    found: list[Any] = []
    end = object()
    while (value := next_of(iterator, end)) is not end:
        found.append(value)
    return found


def came_after_call(failure: BaseException) -> bool:
    """Whether the interrupt `failure`, just caught, came after the call that it replaces returned.

    The interpreter runs signal handlers when a call has returned, before it uses the result.
    """
    traceback = failure.__traceback__
    if traceback is None:
        return False
    name = opname[traceback.tb_frame.f_code.co_code[traceback.tb_lasti]]
    return name.startswith(("CALL", "PRECALL"))  # CPython 3.11 makes most calls of C in `PRECALL`
