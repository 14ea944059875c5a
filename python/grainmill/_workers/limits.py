"""Limits on workers, and whether workers are processes; without what starts them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from grainmill._memory import default_budget_bytes

if TYPE_CHECKING:
    from grainmill._plan.multiprocessing_options import MultiprocessingOptions
    from grainmill._plan.options import ReadOptions


class Limits(NamedTuple):
    """Limits on waiting time and shared memory.

    Attributes:
        stall_warning_s: Seconds without a result until a warning names the worker and the element;
            `None` for no warning.
        timeout_s: Seconds without a result until an error is raised; `None` for no limit.
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


def has_gil() -> bool:
    """Whether this interpreter has the GIL, so that threads do not run Python code in parallel."""
    enabled = getattr(sys, "_is_gil_enabled", None)
    return enabled is None or bool(enabled())
