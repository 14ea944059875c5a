"""Options of worker processes."""

from __future__ import annotations

import dataclasses
from typing import Final

from grainmill._plan.options import (
    check_worker_limits,
    default_timeout_s,
    default_warning_s,
    shown,
)

DEFAULT_WORKER_BUDGET: Final = 64 << 20


@dataclasses.dataclass(slots=True, repr=False)
class MultiprocessingOptions:
    """How worker processes of `mp_prefetch` prefetch elements.

    Parts of a mixture or a zip whose options and `worker_init_fn` are the same, except for
    `per_worker_buffer_size`, share workers once 32 run, or as many as there are cores if these are
    more: limits are those of all parts that share them.

    Attributes:
        num_workers: Number of worker processes; with 0, all work is done in this process. On
            free-threaded Python and, with a warning, on systems other than Linux, they are threads.
        per_worker_buffer_size: Maximum number of elements that each worker prefetches, at least 1;
            checked where the options are used.
        enable_profiling: Accepted for programs that set it; nothing is recorded.
        stall_warning_s: Seconds without an element, 20 by default (`config.stall_warning_s`), after
            which a warning is logged that names the worker, the element, and the line of your code;
            again after twice the time, and so on. `None` and 0 never warn.
        timeout_s: Seconds without an element after which a `WorkerError` is raised; `None`, the
            default, and 0 wait without limit.
        ram_budget_bytes: Maximum memory for undelivered elements of all workers together, in bytes;
            `None` for a quarter of the memory that this process may use: the machine's, or the
            limit of its control group.
        per_worker_budget_bytes: Maximum memory for undelivered elements of each worker, in bytes,
            64 MiB by default; `None` for no limit but `ram_budget_bytes`. Workers compute fewer
            elements ahead, and send fewer at a time, where these are large; one that exceeds the
            budget comes by itself.

    Raises:
        ValueError: A time is negative, or a budget not positive.
        TypeError: A time or a budget is not a number.

    Example:
        >>> options = grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=4)
        >>> list(grain.MapDataset.range(4).to_iter_dataset().mp_prefetch(options))
        [0, 1, 2, 3]
    """

    num_workers: int = 0
    per_worker_buffer_size: int = 1
    enable_profiling: bool = False
    _: dataclasses.KW_ONLY
    stall_warning_s: float | None = dataclasses.field(default_factory=default_warning_s)
    timeout_s: float | None = dataclasses.field(default_factory=default_timeout_s)
    ram_budget_bytes: int | None = None
    per_worker_budget_bytes: int | None = DEFAULT_WORKER_BUDGET

    def __post_init__(self) -> None:
        check_worker_limits(self, "per_worker_budget_bytes")

    def __repr__(self) -> str:
        """Shows Grain's options always, the others where they differ from the default."""
        return shown(self, always=3)
