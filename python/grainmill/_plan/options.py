"""Options of reading and of whole pipelines."""

from __future__ import annotations

import dataclasses
import enum
import logging
from typing import TYPE_CHECKING, Any

from grainmill._plan.arguments import checked_callable, checked_integer, checked_number

if TYPE_CHECKING:
    from collections.abc import Callable


WORKER_INIT = "a function of a worker's number and the number of workers"
"""What `worker_init_fn` is to be, in messages."""

MAX_READS_IN_FLIGHT = 128
"""Enough for 640 records a second where each takes 100 ms, and for twice as many."""


@dataclasses.dataclass(slots=True, repr=False)
class ReadOptions:
    """How `to_iter_dataset` reads ahead.

    Elements, their order and saved states are the same whatever is chosen here. A warning is logged
    where `prefetch_buffer_size` is positive and smaller than `num_threads`.

    Attributes:
        num_threads: The most threads that run user functions; 0 runs them in the caller. One thread
            is used while more would not help.
        prefetch_buffer_size: The most elements that are computed ahead, those in progress included;
            0 computes each element when it is asked for.
        num_workers: Processes that run user functions, in place of threads; 0 for none. Functions
            that hold the interpreter lock run side by side only so.
        worker_init_fn: Called in each worker with its number and `num_workers`, before anything
            else; what it raises is raised where the first element is asked for. Where Python has
            no interpreter lock, workers are threads, each of which calls it.
        stall_warning_s: Seconds without a result from the workers, 15 by default, after which a
            logged warning names the worker and the element; `None` for no warning.
        timeout_s: Seconds without a result from the workers after which a `WorkerError` is raised;
            `None` for no limit.
        ram_budget_bytes: The most memory that elements of all workers take together before they are
            delivered, in bytes; `None` for a quarter of the memory that this process may use, which
            is the machine's or its control group's limit.
        max_reads_in_flight: The most reads under way at once where records have to be waited for,
            as on a bucket or a network disk, whatever the number of threads and cores; `None` for
            128. Reads that the page cache answers are done one after another.

    Raises:
        ValueError: A number is negative, or `max_reads_in_flight`, a time or the budget is not
            positive.
        TypeError: A number is not an integer, or a time not a number.

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
    stall_warning_s: float | None = dataclasses.field(default=15.0, kw_only=True)
    timeout_s: float | None = dataclasses.field(default=None, kw_only=True)
    ram_budget_bytes: int | None = dataclasses.field(default=None, kw_only=True)
    max_reads_in_flight: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("num_workers", "num_threads", "prefetch_buffer_size"):
            setattr(self, name, checked_integer(getattr(self, name), name))
        checked_callable(self.worker_init_fn, "worker_init_fn", WORKER_INIT)
        if self.num_workers < 0:
            raise ValueError(f"num_workers must be non-negative, got {self.num_workers}")
        check_worker_limits(self)
        if self.max_reads_in_flight is not None:
            reads = checked_integer(self.max_reads_in_flight, "max_reads_in_flight")
            if reads < 1:
                raise ValueError(f"`max_reads_in_flight` must be at least 1 or None, got {reads}")
            self.max_reads_in_flight = reads
        if self.num_threads < 0:
            raise ValueError(f"num_threads must be non-negative, got {self.num_threads}")
        if self.prefetch_buffer_size < 0:
            raise ValueError(
                f"prefetch_buffer_size must be non-negative, got {self.prefetch_buffer_size}"
            )
        if 0 < self.prefetch_buffer_size < self.num_threads:
            logging.getLogger("grainmill").warning(
                "prefetch_buffer_size=%d is smaller than num_threads=%d: some threads stay idle",
                self.prefetch_buffer_size,
                self.num_threads,
            )

    def __repr__(self) -> str:
        """What Grain has is always shown, the rest where it was chosen: messages hold this."""
        return shown(self, always=2)


def check_worker_limits(options: Any) -> None:
    """Raises an error where a time or the budget of worker processes is no positive number."""
    for name in ("stall_warning_s", "timeout_s", "ram_budget_bytes"):
        value = getattr(options, name)
        if value is not None and not checked_number(value, name) > 0:
            raise ValueError(f"`{name}` must be positive or None, got {value}")


def shown(options: Any, *, always: int) -> str:
    """Options as text: the first `always` of them, of the others those that are not the default."""
    fields = [
        f"{field.name}={getattr(options, field.name)!r}"
        for place, field in enumerate(dataclasses.fields(options))
        if place < always or getattr(options, field.name) != field.default
    ]
    return f"{type(options).__name__}({', '.join(fields)})"


class ExecutionTrackingMode(enum.Flag):
    """What to record about each stage while a pipeline runs; nothing is recorded yet.

    Attributes:
        DISABLED: Nothing.
        STAGE_TIMING: Times of each stage; accepted, without effect.
    """

    DISABLED = enum.auto()
    STAGE_TIMING = enum.auto()


class _Default:
    """Marks an option that the user left alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def _default(value: Any) -> Any:
    return dataclasses.field(default_factory=lambda: _Default(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Options that hold for a whole pipeline, wherever in it they are given.

    `experimental.WithOptionsIterDataset` sets them. Two are equal if the same fields were given the
    same values: a default that was written out differs from one that was not.

    Attributes:
        filter_warn_threshold_ratio: From 0 to 1: the share of dropped elements, out of each 1000 in
            a row, from which a filter logs a warning, at most once a minute; `None` or 0 never
            warns.
        filter_raise_threshold_ratio: The share from which it raises a `ValueError` instead; `None`
            or 0 never raises.
        execution_tracking_mode: Accepted; nothing is recorded yet.
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
        given = set()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, _Default):
                object.__setattr__(self, field.name, value.value)
            elif field.name != "_set":
                given.add(field.name)
        object.__setattr__(self, "_set", frozenset(given))

    def merge(self, other: DatasetOptions | None) -> DatasetOptions:
        """Returns these options, completed by those that only `other` sets.

        Args:
            other: Options whose fields count where they were given and these were not; `None` for
                none.
        """
        if other is None:
            return self
        chosen = {name: getattr(other, name) for name in other._set}  # noqa: SLF001 - of its own class
        chosen |= {name: getattr(self, name) for name in self._set}
        return DatasetOptions(**chosen)
