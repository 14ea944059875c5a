"""Reports of waits that last: what is awaited, for which element, and where the user's code is.

A thread that waits calls `Stall.check` whenever it wakes without a result, about every `CHECK_S`:
elements that come sooner cost nothing. The engine does so for a thread that waits for storage.
"""

from __future__ import annotations

import linecache
import logging
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from grainmill._interrupts import suppressed
from grainmill._native import pending_requests, report_waits_to
from grainmill._plan.settings import config
from grainmill._plan.tracebacks import CodePlace, calls_of, users_calls
from grainmill._threads import is_own_thread, own_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Owner = TypeVar("_Owner")

_LOGGER = logging.getLogger("grainmill")

CHECK_S: Final = 1.0
"""How often a wait looks at the clock, unless a limit is shorter."""

# The outermost and innermost of a user's calls that are shown.
_MAX_CALLS: Final = 5
_MAX_THREADS: Final = 4
# The objects that are named as being waited for.
_MAX_OBJECTS: Final = 4
# How much longer a wait may take than its limit, while it is for a thread that waits itself.
_GRACE_S: Final = 10.0
# Where a thread waits for others that make some of its calls (`thread_pool`).
_SHARES_TASKS: Final = "results"


class WaitLimits(Protocol):
    """Options with limits on a wait; `None` and 0 mean no limit.

    Attributes:
        stall_warning_s: Seconds after which to log a warning; later ones come after twice the time
            each.
        timeout_s: Seconds after which to raise an error.
    """

    @property
    def stall_warning_s(self) -> float | None: ...
    @property
    def timeout_s(self) -> float | None: ...


class _ConfigLimits:
    """The limits for stages without options of their own."""

    @property
    def stall_warning_s(self) -> float:
        return float(config.stall_warning_s)

    @property
    def timeout_s(self) -> float:
        return float(config.stall_timeout_s)


CONFIG_LIMITS: Final = _ConfigLimits()
"""The settings `stall_warning_s` and `stall_timeout_s`, as they are now."""


def thread_name_of(thread: int | None) -> str:
    """How reports name a thread of this process, if it is known."""
    names = [each.name for each in threading.enumerate() if each.ident == thread]
    return f"thread {names[0]}" if names else "a thread"


class Awaited(NamedTuple):
    """What a thread waits for.

    Attributes:
        who: The thread or worker, as in "thread grain-prefetch_0".
        doing: What it does, as in "while computing element 7 of `...` at train.py:12".
        lines: Where that element comes from.
        thread: The identifier of the thread, in this process.
        stacks: Returns the calls of each thread of a worker, the innermost one last.
        requests: Returns what a worker may wait for, as `pending_requests` does in this process.
    """

    who: str
    doing: str
    lines: Sequence[str] = ()
    thread: int | None = None
    stacks: Callable[[], list[list[CodePlace]]] | None = None
    requests: Callable[[], list[tuple[str, float, int]]] | None = None

    def text(self, waited: str, waited_s: float, more: str = "") -> str:
        """A report that it `waited`, with the places of the user's code, of several lines."""
        lines = [f"{self.who} {waited} {self.doing}{more}", *self.lines]
        with suppressed():  # the report matters more than the places
            requests = self.requests() if self.requests else pending_requests(waited_s)
            lines += _requests_shown(requests, waited_s)
        with suppressed():
            lines += _shown(self.stacks() if self.stacks else _stacks(self.thread))
        return "\n  ".join(lines)


class Stall:
    """The waits of one stage for threads or processes; one thread at a time waits.

    A thread of this package does not report: whoever waits for it reports what it waits for.

    Args:
        owner: What waits; this does not keep it alive.
        awaited: Says what the owner waits for; called on any thread.
        limits: After how long to warn, and to raise an error.
        error: Makes that error from its text.
    """

    def __init__(
        self,
        owner: _Owner,
        awaited: Callable[[_Owner], Awaited],
        limits: WaitLimits,
        error: Callable[[str], BaseException] = TimeoutError,
    ) -> None:
        self._owner = weakref.ref(owner)
        self._awaited: Callable[[Any], Awaited] = awaited
        self.limits = limits
        self._error = error
        self._num_reports = 0
        self._was_inner = False  # whether another wait with a limit was found in this one
        self._next_s = 0.0  # how long a wait lasts when it is looked at next
        self._thread: int | None = None

    @property
    def is_long(self) -> bool:
        """Whether `begin` or `check` was called since the last `end`."""
        return self._thread is not None

    def awaited(self) -> Awaited:
        """What the owner waits for now, as far as that can be told."""
        with suppressed():  # the wait may end meanwhile
            return self._awaited(self._owner())
        return Awaited("a thread", "while computing an element")

    @property
    def check_s(self) -> float:
        """How long to wait until the next call of `check`."""
        limits = self.limits
        return min(CHECK_S, limits.stall_warning_s or CHECK_S, limits.timeout_s or CHECK_S)

    def begin(self) -> None:
        """Tells threads that wait for the calling one that it waits itself."""
        if self._thread is None:
            self._thread = threading.get_ident()
            self._next_s = self.check_s
            _waiting[self._thread] = self

    def check(self, since_s: float) -> None:
        """Reports that the calling thread waits since `since_s`, by `perf_counter`, if it is time.

        Raises:
            BaseException: The wait exceeds its limit.
        """
        self.begin()
        waited_s = time.perf_counter() - since_s
        if waited_s < self._next_s:
            return
        timeout_s = self.limits.timeout_s
        self._next_s = waited_s + self.check_s
        if timeout_s and waited_s < timeout_s:
            self._next_s = min(self._next_s, timeout_s)
        stall = self._innermost()
        # An error of the inner wait, which says more, comes here, once its workers have ended.
        self._was_inner |= stall is not self and bool(stall.limits.timeout_s)
        grace_s = _GRACE_S if self._was_inner else 0.0
        if timeout_s and waited_s >= timeout_s + grace_s:
            name = "stall_timeout_s" if self.limits is CONFIG_LIMITS else "timeout_s"
            waited = f"returned no result for {waited_s:.1f} s"
            text = stall.awaited().text(waited, waited_s, f"; the limit is `{name}={timeout_s:g}`")
            self.end()
            raise self._error(text)
        if is_own_thread():
            return
        due_s = (stall.limits.stall_warning_s or 0) * 2**self._num_reports
        if due_s and waited_s >= due_s:
            self._num_reports += 1
            waited = f"has returned no result for {due_s:g} s"
            _LOGGER.warning("%s", stall.awaited().text(waited, waited_s))

    def end(self) -> None:
        """Ends a wait; does nothing unless `begin` or `check` was called."""
        if self._thread is not None:
            _waiting.pop(self._thread, None)
            self._thread = None
            self._num_reports = 0
            self._was_inner = False

    def _innermost(self) -> Stall:
        """This wait, or that of the thread that it waits for, and so on."""
        stall, seen = self, {id(self)}
        while (thread := stall.awaited().thread) is not None:
            inner = _waiting.get(thread)
            if inner is None or id(inner) in seen:
                break
            stall = inner
            seen.add(id(stall))
        return stall


class _StorageWaits(threading.local):
    """The waits of the calling thread for buckets and servers; the engine calls the methods."""

    def __init__(self) -> None:
        self._stall = Stall(self, _StorageWaits._awaited, CONFIG_LIMITS)

    @staticmethod
    def is_due_here() -> bool:
        """Whether nobody waits for the calling thread, who would report that it waits."""
        return not is_own_thread()

    def check(self, waited_s: float) -> None:
        """Reports that the calling thread has waited so long, if it is time."""
        if not is_own_thread():
            self._stall.check(time.perf_counter() - waited_s)

    def end(self) -> None:
        """Ends a wait."""
        self._stall.end()

    def _awaited(self) -> Awaited:
        thread = threading.get_ident()
        return Awaited("storage", f"while {thread_name_of(thread)} waits for it", (), thread)


report_waits_to(_StorageWaits())


def _requests_shown(requests: list[tuple[str, float, int]], waited_s: float) -> list[str]:
    """The objects of `requests` that somebody may wait for, since so long."""
    lines = []
    recent = [request for request in requests if request[1] <= waited_s]
    for url, since_s, num_retries in (recent or requests)[:_MAX_OBJECTS]:
        if since_s >= CHECK_S:
            retries = "1 retry" if num_retries == 1 else f"{num_retries} retries"
            lines.append(f"waiting for {url} for {since_s:.0f} s, {retries}")
    return lines


_waiting: dict[int, Stall] = {}
"""The waits that last, by the identifier of the thread that waits."""


def _stacks(thread: int | None) -> list[list[CodePlace]]:
    """The calls of a thread of this process; of all of its kind, if it waits for another one."""
    frames = sys._current_frames()  # noqa: SLF001 - there is no other way
    if thread in frames:
        calls = calls_of(frames[thread])
        if users_calls(calls) or calls[-1].function != _SHARES_TASKS:
            return [calls]
    return [calls_of(frames[ident]) for ident in own_threads() if ident in frames]


def _shown(stacks: list[list[CodePlace]]) -> list[str]:
    """The users' calls in `stacks` as lines, like those of a traceback; else why there are none."""
    if not stacks:
        return ["where it is cannot be told: it has just started or gone on, or is stopped"]
    lines = []
    in_users_code = [calls for stack in stacks if (calls := users_calls(stack))]
    for number, calls in enumerate(in_users_code[:_MAX_THREADS]):
        if number:
            lines.append("and, on another thread:")
        left_out = len(calls) - 2 * _MAX_CALLS
        if left_out > 0:
            calls[_MAX_CALLS:-_MAX_CALLS] = [CodePlace("", 0, "")]
        for file, line, function in calls:
            if not line:
                lines.append(f"  ... {left_out} more calls")
                continue
            lines.append(f'  File "{file}", line {line}, in {function}')
            source = linecache.getline(file, line).strip()
            lines += [f"    {source}"] if source else []
    return lines or ["no function of yours is running there: it reads, or waits for storage"]
