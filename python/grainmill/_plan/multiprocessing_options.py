"""Options of worker processes."""

from __future__ import annotations

import dataclasses

from grainmill._plan.options import check_worker_limits, shown


@dataclasses.dataclass(slots=True, repr=False)
class MultiprocessingOptions:
    """How worker processes of `mp_prefetch` compute elements ahead.

    Attributes:
        num_workers: Worker processes; 0 does all the work in this one.
        per_worker_buffer_size: The most elements each worker holds ready, at least 1; checked where
            the options are used.
        enable_profiling: Accepted for programs that set it; nothing is recorded.
        stall_warning_s: Seconds without an element, 15 by default, after which a logged warning
            names the worker that is waited for; `None` never warns.
        timeout_s: Seconds without an element after which a `WorkerError` is raised; `None` waits
            without limit.
        ram_budget_bytes: The most memory that elements of all workers take together before they are
            delivered, in bytes; `None` for a quarter of what this process may use: the machine's,
            or its control group's limit.

    Raises:
        ValueError: A time or the budget is not positive.
        TypeError: A number is not an integer, or a time not a number.

    Example:
        >>> options = grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=4)
        >>> list(grain.MapDataset.range(4).to_iter_dataset().mp_prefetch(options))
        [0, 1, 2, 3]
    """

    num_workers: int = 0
    per_worker_buffer_size: int = 1
    enable_profiling: bool = False
    _: dataclasses.KW_ONLY
    stall_warning_s: float | None = 15.0
    timeout_s: float | None = None
    ram_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        check_worker_limits(self)

    def __repr__(self) -> str:
        """The options that Grain has, and of the others those that differ from the default."""
        return shown(self, always=3)
