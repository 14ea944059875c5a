"""Elements in order, up to a failure; and which exceptions are failures of an element."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grainmill._interrupts import raise_interrupt
from grainmill._plan.tracebacks import first_users_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SKIPPED: Final = object()
"""The placeholder of an element that a predicate rejected."""


class Evaluated(NamedTuple):
    """Elements in order, up to the one that raised `failure`, if any."""

    elements: list[Any]
    failure: BaseException | None

    def before(self, failure: BaseException | None) -> Evaluated:
        """The same where `failure`, if any, comes after the elements."""
        if failure is None or self.failure is not None:
            return self
        return Evaluated(self.elements, failure)


def evaluated(
    loop: Callable[..., None], elements: Iterable[Any], given: Any, output: list[Any] | None = None
) -> Evaluated:
    """Calls `loop(elements, given, output.append)`; returns the elements up to a failure."""
    output = [] if output is None else output
    try:
        loop(elements, given, output.append)
    except BaseException as failure:
        return until_failure(output, failure)
    return Evaluated(output, None)


def until_failure(elements: list[Any], failure: BaseException) -> Evaluated:
    """The elements before `failure`, which is being handled; raises it if it is an interrupt."""
    if _raises_interrupts and threading.current_thread() is threading.main_thread():
        raise_interrupt(failure)  # it is not delayed until its element is delivered
    if isinstance(failure, StopIteration):
        error = stop_iteration_error(failure)
        error.__cause__ = failure
        return Evaluated(elements, error)
    return Evaluated(elements, failure)


_STOPPED: Final = "raised StopIteration, which does not end the data"


def stop_iteration_error(stop: StopIteration) -> RuntimeError:
    """The exception for a user's function that raised `stop`, which would end the data."""
    code = first_users_code(stop)
    named = ""
    if code is not None:
        named = f" (`{code.co_qualname}`, defined at {code.co_filename}:{code.co_firstlineno})"
    return RuntimeError(
        f"a user function{named} {_STOPPED}; catch it there, or give `next` a default, and leave "
        "elements out with `filter`"
    )


def stopped_by(failure: BaseException) -> StopIteration | None:
    """The `StopIteration` that `failure` was made from by `stop_iteration_error`, if any."""
    stop = failure.__cause__
    return stop if isinstance(stop, StopIteration) and _STOPPED in str(failure) else None


_raises_interrupts = True


def defer_interrupts() -> None:
    """Delivers interrupts and the like in the order of elements, in the main thread, too.

    For processes that Ctrl-C is not meant for.
    """
    global _raises_interrupts  # noqa: PLW0603 - a property of the process
    _raises_interrupts = False
