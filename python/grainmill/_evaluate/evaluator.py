"""Interfaces of `Program` for the modules that it imports itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from grainmill._evaluate.evaluated import Evaluated
    from grainmill._native import Layout, Rows


class IncrementalEvaluator(Protocol):
    """See `IncrementalRun` of a program."""

    def run(self, at: int, count: int) -> Evaluated:
        """The elements at `at, ..., at + count - 1`."""

    def fill(
        self, targets: Rows, at: int, stop: int, part_len: int
    ) -> tuple[int, Evaluated | None]:
        """Writes the elements from `at` to `stop` to their rows of `targets`."""


class PendingElements(Protocol):
    """See `PendingElements` of a program."""

    def wait(self) -> None:
        """Waits for the records."""

    def batches(self, batch_size: int = 0) -> list[Any] | None:
        """The elements as `BatchBlock`s, if some of them are rows of columns."""

    def __call__(self) -> Evaluated:
        """Computes the elements, once, on any thread."""


class Evaluator(Protocol):
    """See `Program`."""

    runs_user_code: bool
    mean_byte_len: float
    num_records: int
    row_byte_len: float
    can_fill: bool
    writes_rows: bool
    layout: Layout | None
    batches_small: bool | None
    element_s: float
    may_be_slow: Sequence[Any]

    @property
    def reads_lists(self) -> bool:
        """Whether longer blocks are worth trying, as the cost of a call may not depend on them."""

    @property
    def waits_for_storage(self) -> bool:
        """Whether the storage of any source is slow, by its recent reads."""

    def run(self, start: int, count: int) -> Evaluated:
        """The elements at `start, ..., start + count - 1`."""

    def start_reads(self, start: int, count: int) -> PendingElements:
        """Starts reading the records of these elements."""

    @property
    def reads_beyond(self) -> bool:
        """Whether `start_beyond` may start reads."""

    @property
    def has_room(self) -> bool:
        """Whether there is memory to start further reads on slow storage."""

    def start_beyond(self, start: int, count: int) -> Any:
        """Starts reads that help to read these elements later, if there is memory for them."""

    def start_reads_at(self, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> PendingElements:
        """Starts reading the records of the elements at `index`."""

    def run_incrementally(self, start: int, count: int) -> IncrementalEvaluator:
        """The elements of `run`, computed in parts on request."""

    def run_at(self, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Evaluated:
        """The elements at `index`."""

    def batch_of_columns(self, start: int, count: int, part_len: int) -> Any:
        """The elements as a `BatchBlock`, if the engine has the columns of some as arrays."""

    @property
    def computes_column_parts(self) -> bool:
        """Whether functions or objects of the user are called for parts of those batches."""

    def numbers(self, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """The elements as an array if the plan only rearranges ranges, otherwise `None`."""
