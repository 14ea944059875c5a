"""Options of reading and of whole pipelines."""

from __future__ import annotations

import dataclasses
import enum
import logging
from typing import Any


@dataclasses.dataclass(slots=True)
class ReadOptions:
    """How `to_iter_dataset` reads ahead.

    Attributes:
        num_threads: The most threads that run user functions; 0 runs them in the
            caller. One thread is used while more would not help.
        prefetch_buffer_size: The most elements held ready or in the making; 0 makes
            each element when it is asked for.

    Raises:
        ValueError: One of them is negative.
    """

    num_threads: int = 16
    prefetch_buffer_size: int = 500

    def __post_init__(self) -> None:
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


class ExecutionTrackingMode(enum.Flag):
    """What is recorded about each stage while a pipeline runs."""

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

    Attributes:
        filter_warn_threshold_ratio: Share of dropped elements, out of each 1000, from
            which a filter warns; `None` or 0 never warns.
        filter_raise_threshold_ratio: Share from which it raises instead.
        execution_tracking_mode: What is recorded about each stage.
        min_shm_size: Arrays of fewer bytes travel between processes by copy.
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
        """Returns these options, completed by those that only `other` sets."""
        if other is None:
            return self
        chosen = {name: getattr(other, name) for name in other._set}  # noqa: SLF001 - of its own class
        chosen |= {name: getattr(self, name) for name in self._set}
        return DatasetOptions(**chosen)
