"""Options of reading and of whole pipelines."""

from __future__ import annotations

import dataclasses
import enum
import logging
from typing import TYPE_CHECKING, Any

from grainmill._plan.arguments import checked_callable, checked_integer, checked_number
from grainmill._plan.settings import config

if TYPE_CHECKING:
    from collections.abc import Callable


WORKER_INIT = "a function of a worker's number and the number of workers"
"""The expected type of `worker_init_fn`, in messages."""

MAX_READS_IN_FLIGHT = 128
"""Enough for 1,280 records a second at 100 ms per read."""


def default_warning_s() -> float | None:
    """The default of `stall_warning_s`."""
    return float(config.stall_warning_s)


def default_timeout_s() -> float | None:
    """The default of `timeout_s`."""
    return float(config.stall_timeout_s) or None


@dataclasses.dataclass(slots=True, repr=False)
class ReadOptions:
    """How `to_iter_dataset` reads and prefetches.

    These options change neither elements nor their order nor saved states. A warning is logged if
    `prefetch_buffer_size` is positive and smaller than `num_threads`.

    Attributes:
        num_threads: Maximum number of threads that run user functions; 0 runs them in the calling
            thread. Only one thread is used while more would not help.
        prefetch_buffer_size: Maximum number of prefetched elements, those in progress included;
            0 computes each element when it is requested.
        num_workers: Number of processes that run user functions, in place of threads; 0 for none.
            Functions that hold the interpreter lock (GIL) run in parallel only in processes. Parts
            of a pipeline, as of a mixture, whose options differ in `prefetch_buffer_size` at most
            share workers once 32 run, or as many as there are cores if these are more.
        worker_init_fn: Called in each worker with its number and `num_workers`, before anything
            else; its exceptions are raised when the first element is requested. JAX uses the CPU in
            workers; to use other devices, set `os.environ["JAX_PLATFORMS"]` here, or for all
            workers the environment variable `GRAINMILL_WORKER_JAX_PLATFORMS`. On free-threaded
            Python, workers are threads, each of which calls it; so they are, with a warning, on
            systems other than Linux.
        stall_warning_s: Seconds without a result from the threads or workers, 20 by default
            (`config.stall_warning_s`), after which a warning is logged that names the thread or
            worker, the element, and the line of your code; again after twice the time, and so on.
            `None` and 0 never warn.
        timeout_s: Seconds without a result after which an error is raised, a `WorkerError` for
            workers, a `TimeoutError` for threads; `None`, the default, and 0 wait without limit.
        ram_budget_bytes: Maximum memory for undelivered elements of all workers together, in bytes;
            `None` for a quarter of the memory that this process may use: the machine's, or the
            limit of its control group.
        max_reads_in_flight: Maximum number of concurrent reads from slow storage, such as a bucket
            or a network disk, whatever the number of threads and cores, of all workers together;
            `None` for 128 in each process, and 512 in more than four workers together. Reads that
            the page cache answers are done sequentially.

    Raises:
        ValueError: A number is negative, or `max_reads_in_flight` or the budget is not positive.
        TypeError: A number is not an integer, or a time is not a number.

    Example:
        >>> ds = grain.MapDataset.range(8).map(lambda x: x * x).batch(4)
        >>> options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
        >>> [batch.tolist() for batch in ds.to_iter_dataset(options)]
        [[0, 1, 4, 9], [16, 25, 36, 49]]
        >>> in_workers = ds.to_iter_dataset(grain.ReadOptions(num_workers=2))
        >>> [batch.tolist() for batch in in_workers]
        [[0, 1, 4, 9], [16, 25, 36, 49]]
    """

    num_threads: int = 16
    prefetch_buffer_size: int = 500
    num_workers: int = 0
    worker_init_fn: Callable[[int, int], None] | None = dataclasses.field(
        default=None, kw_only=True
    )
    stall_warning_s: float | None = dataclasses.field(
        default_factory=default_warning_s, kw_only=True
    )
    timeout_s: float | None = dataclasses.field(default_factory=default_timeout_s, kw_only=True)
    ram_budget_bytes: int | None = dataclasses.field(default=None, kw_only=True)
    max_reads_in_flight: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_threads", "prefetch_buffer_size"):
            value = checked_integer(getattr(self, name), name)
            if value < 0:
                raise ValueError(f"{name} must be non-negative, got {value}")
            setattr(self, name, value)
        checked_callable(self.worker_init_fn, "worker_init_fn", WORKER_INIT)
        check_worker_limits(self)
        if self.max_reads_in_flight is not None:
            reads = checked_integer(self.max_reads_in_flight, "max_reads_in_flight")
            if reads < 1:
                raise ValueError(f"`max_reads_in_flight` must be at least 1 or None, got {reads}")
            self.max_reads_in_flight = reads
        if 0 < self.prefetch_buffer_size < self.num_threads:
            logging.getLogger("grainmill").warning(
                "prefetch_buffer_size=%d is smaller than num_threads=%d: some threads stay idle",
                self.prefetch_buffer_size,
                self.num_threads,
            )

    def __repr__(self) -> str:
        """Shows Grain's options always, as messages contain this, the others where they are set."""
        return shown(self, always=2)


def check_worker_limits(options: Any, *more: str) -> None:
    """Raises an error unless times and budgets are `None` or positive; times may be 0."""
    for name in ("stall_warning_s", "timeout_s"):
        value = getattr(options, name)
        if value is not None and not checked_number(value, name) >= 0:
            raise ValueError(f"`{name}` must not be negative, got {value}")
    for name in ("ram_budget_bytes", *more):
        value = getattr(options, name)
        if value is not None and not checked_number(value, name) > 0:
            raise ValueError(f"`{name}` must be positive or None, got {value}")


def shown(options: Any, *, always: int) -> str:
    """Options as text: the first `always` fields, and others that differ from the default."""
    fields = [
        f"{field.name}={getattr(options, field.name)!r}"
        for number, field in enumerate(dataclasses.fields(options))
        if number < always or getattr(options, field.name) != _default_of(field)
    ]
    return f"{type(options).__name__}({', '.join(fields)})"


def _default_of(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


class ExecutionTrackingMode(enum.Flag):
    """What to record about each stage while a pipeline runs.

    Attributes:
        DISABLED: Estimates, which cost nothing; see `DatasetIterator.stats`.
        STAGE_TIMING: Counts and times of all calls, at a cost below 5 %; nothing is logged.
    """

    DISABLED = enum.auto()
    STAGE_TIMING = enum.auto()


class _Default:
    """Marks an option that the user did not set."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def _default(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: _Default(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Options that apply to a whole pipeline, wherever in it they are set.

    `experimental.WithOptionsIterDataset` sets them. Two are equal if the same fields were set to
    the same values; a field explicitly set to its default differs from one that was not set.

    Attributes:
        filter_warn_threshold_ratio: Fraction of dropped elements among 1000 consecutive ones, from
            0 to 1, from which a filter logs a warning, at most once a minute; `None` or 0 never
            warns.
        filter_raise_threshold_ratio: Fraction from which it raises a `ValueError` instead; `None`
            or 0 never raises.
        execution_tracking_mode: What to record for `DatasetIterator.stats`.
        min_shm_size: Accepted, without effect.

    Example:
        >>> strict = grain.experimental.DatasetOptions(filter_raise_threshold_ratio=0.5)
        >>> ds = grain.MapDataset.range(5).filter(lambda x: x % 2).to_iter_dataset()
        >>> list(grain.experimental.WithOptionsIterDataset(ds, strict))
        [1, 3]
    """

    filter_warn_threshold_ratio: float | None = _default(0.9)
    filter_raise_threshold_ratio: float | None = _default(None)
    execution_tracking_mode: ExecutionTrackingMode = _default(ExecutionTrackingMode.DISABLED)  # noqa: RUF009 - it makes a field
    min_shm_size: int = _default(0)
    _set: frozenset[str] = dataclasses.field(init=False, repr=False, default=frozenset())

    def __post_init__(self) -> None:
        set_by_user = set()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, _Default):
                object.__setattr__(self, field.name, value.value)
            elif field.name != "_set":
                set_by_user.add(field.name)
        object.__setattr__(self, "_set", frozenset(set_by_user))

    def merge(self, other: DatasetOptions | None) -> DatasetOptions:
        """Returns these options, completed by those that only `other` sets.

        Args:
            other: Options used for fields that are not set here; `None` for none.
        """
        if other is None:
            return self
        chosen = {name: getattr(other, name) for name in other._set}  # noqa: SLF001 - the same class
        chosen |= {name: getattr(self, name) for name in self._set}
        return DatasetOptions(**chosen)
