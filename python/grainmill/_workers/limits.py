"""Limits on workers, and whether workers are processes; without what starts them."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, NamedTuple

from grainmill._memory import default_budget_bytes

if TYPE_CHECKING:
    from grainmill._plan.multiprocessing_options import MultiprocessingOptions
    from grainmill._plan.options import ReadOptions


class Limits(NamedTuple):
    """Limits on waiting time and shared memory.

    Attributes:
        stall_warning_s: Seconds without a result until a warning names the worker and the element;
            `None` or 0 for no warning.
        timeout_s: Seconds without a result until an error is raised; `None` or 0 for no limit.
        budget_bytes: Shared memory that results may hold before they are taken.
    """

    stall_warning_s: float | None
    timeout_s: float | None
    budget_bytes: int

    def share(self, num_tasks: int) -> int:
        """Bytes that each of `num_tasks` tasks may take; half the budget is for results in use."""
        return self.budget_bytes // (2 * num_tasks)

    @classmethod
    def of(cls, options: ReadOptions | MultiprocessingOptions) -> Limits:
        """The limits in `options`; without a budget, a quarter of the usable memory."""
        budget_bytes = options.ram_budget_bytes
        if budget_bytes is None:
            budget_bytes = default_budget_bytes()
        return cls(options.stall_warning_s, options.timeout_s, budget_bytes)


def workers_are_processes() -> bool:
    """Whether workers are processes; otherwise they are threads of this process.

    They are threads where the interpreter has no GIL, so that threads run Python code in parallel,
    and, with a warning, on systems other than Linux.
    """
    enabled = getattr(sys, "_is_gil_enabled", None)
    if enabled is not None and not enabled():
        return False
    if sys.platform == "linux" and _has_required_calls():
        return True
    _warn_of_threads()
    return False


def _has_required_calls() -> bool:
    """Whether the system, and the Python built for it, have what workers need."""
    import select  # noqa: PLC0415 - not needed where nothing uses workers
    import socket  # noqa: PLC0415

    required = [(socket, "SOCK_SEQPACKET"), (socket, "MSG_CMSG_CLOEXEC"), (select, "poll")]
    return all(hasattr(module, name) for module, name in required)


@functools.cache  # one warning for each process, whatever the filters
def _warn_of_threads() -> None:
    warnings.warn(
        f"worker processes need Linux, this is {sys.platform!r}: workers are threads here, so that "
        "functions that hold the interpreter lock do not run in parallel. Elements, order and "
        "states are the same",
        RuntimeWarning,
        stacklevel=2,
    )
