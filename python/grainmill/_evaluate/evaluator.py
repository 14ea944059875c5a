"""What rows and leaves use of a program: they stand below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from grainmill._evaluate.fuse import Evaluated
    from grainmill._evaluate.stack import Layout, Targets


class IncrementalEvaluator(Protocol):
    """See `IncrementalRun` of a program."""

    def run(self, at: int, count: int) -> Evaluated:
        """The elements at `at, ..., at + count - 1`."""

    def fill(
        self, targets: Targets, at: int, stop: int, part_len: int
    ) -> tuple[int, Evaluated | None]:
        """Puts elements from `at` up to `stop` into `targets`."""


class PendingElements(Protocol):
    """See `PendingElements` of a program."""

    def settle(self) -> None:
        """Waits for the records."""

    def __call__(self) -> Evaluated:
        """The elements, once, on any thread."""


class Evaluator(Protocol):
    """See `Program`."""

    runs_user_code: bool
    mean_byte_len: float
    num_records: int
    reads_lists: bool
    row_byte_len: float
    can_fill: bool
    layout: Layout | None
    batches_small: bool | None
    element_s: float

    @property
    def waits_for_storage(self) -> bool:
        """Whether records lately had to be waited for."""

    def run(self, start: int, count: int) -> Evaluated:
        """The elements at `start, ..., start + count - 1`."""

    def begin(self, start: int, count: int) -> PendingElements:
        """Begins to read what these elements are made of."""

    def begin_at(self, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> PendingElements:
        """Begins to read what the elements at `index` are made of."""

    def run_incrementally(self, start: int, count: int) -> IncrementalEvaluator:
        """The elements of `run`, of which each part is made when asked for."""

    def run_at(self, index: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Evaluated:
        """The elements at `index`."""

    def numbers(self, start: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
        """The elements as an array, where the plan only arranges the numbers of ranges."""
