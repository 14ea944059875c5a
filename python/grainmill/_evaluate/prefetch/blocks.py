"""Blocks of a program's elements in order, whatever computes them."""

from __future__ import annotations

import abc
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from grainmill._evaluate.evaluated import Evaluated
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.prefetch.ahead import Ahead
from grainmill._plan.closing import closed_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._evaluate.batches.batch_blocks import BatchBlock, BlockResult
    from grainmill._evaluate.prefetch.pace import Pace
    from grainmill._evaluate.program import Program
    from grainmill._stats.stalls import Awaited

T = TypeVar("T")
R = TypeVar("R")


class Blocks(abc.ABC):
    """The elements of `program` from a position on, a block at a time.

    Args:
        program: What computes the elements.
        length: Their number.
        buffer_size: How many of them may be prefetched.

    Attributes:
        position: The first position of the next block.
        batch_size: The size of the batches downstream, counted from the last `restart`; blocks
            are batches where possible. 0 if there are none, or no longer.
        buffer_size: How many elements may be prefetched; may change at any time.
        ready: Batches that the next calls of `take` return without waiting.
        meter: Takes the times of blocks.
    """

    def __init__(self, program: Program, length: int, buffer_size: int) -> None:
        self.meter = program.recorder.read()
        self.position = 0
        self.batch_size = 0
        self.ready: deque[BatchBlock] = deque()
        self._rest: Evaluated | None = None  # the elements after those
        self._cancelled = False
        self._is_computing = False
        self._program = program
        self._length = length
        self.buffer_size = buffer_size
        self._ahead: Ahead[Any] = Ahead()
        self._batch_origin = 0
        self.meter.ahead = weak_call(self, Blocks._num_ahead, (0, 0))

    def take(self, limit: int) -> Evaluated | BatchBlock:
        """Returns the elements from `position` on, and advances it.

        Returns at least one element, unless the first fails or the plan has ended. Prefetched
        blocks may have more than `limit` elements.

        Raises:
            ValueError: `cancel` was called, before or during this call.
        """
        if self._cancelled:
            self.check_open()
        if not self.ready and self._rest is None:
            before = self.position
            self._is_computing = True
            try:
                compute = self._computing()
                compute(limit)
            except BaseException:  # an interrupt can occur anywhere
                self.rewind(before)
                raise
            finally:
                self._is_computing = False
        if self.ready:
            rows = self.ready.popleft()
            self.position += rows.count
            self.meter.elements += rows.count
            return rows
        rest, self._rest = self._rest or Evaluated([], None), None
        self.position += len(rest.elements)
        self.meter.elements += len(rest.elements)
        return rest

    def take_ready(self, batch_size: int, limit: int) -> list[Any]:
        """Takes up to `limit` of the batches that are ready, as long as they have that size."""
        ready = self.ready
        taken: list[Any] = []
        while ready and len(taken) < limit and ready[0].count == batch_size:
            taken.append(ready.popleft().batch)
        self.position += batch_size * len(taken)
        self.meter.elements += batch_size * len(taken)
        return taken

    def _computing(self) -> Callable[[int], None]:
        """`_compute_next`, or what does the same with fewer calls."""
        return self._compute_next

    @abc.abstractmethod
    def _compute_next(self, limit: int) -> None:
        """Computes the elements from `position` on, up to the plan's end, and enqueues them."""

    def _enqueue_block(self, result: BlockResult, count: int) -> bool:
        """Makes the next calls of `take` return the result of a block of `count` elements.

        Returns:
            Whether they are all there; otherwise the blocks after it are dropped.
        """
        num_computed = self._enqueue(result)
        if num_computed < count or (self._rest is not None and self._rest.failure is not None):
            self._drop_ahead(self.position + num_computed)
            return False
        return True

    def _enqueue(self, result: BlockResult) -> int:
        """Makes the next calls of `take` return `result`; returns its number of elements."""
        batches, self._rest = result
        count = 0 if self._rest is None else len(self._rest.elements)
        for batch in batches:
            self.ready += batch.split(self.batch_size)
            count += len(batch)
        return count

    def restart(self, position: int) -> None:
        """Moves to `position`, the start of a batch, and discards prefetched elements."""
        self.rewind(position)
        self._batch_origin = position

    def rewind(self, position: int) -> None:
        """Moves to `position`, within a batch or not, and discards prefetched elements."""
        self.position = position
        self.ready.clear()
        self._rest = None
        self._drop_ahead(position)

    def _drop_ahead(self, position: int) -> None:
        """Discards the blocks from `position` on."""
        self._ahead.drop(position)

    def _num_ahead(self) -> tuple[int, int]:
        """How many elements are computed and not yet taken, and the limit; on any thread."""
        return self._num_ready + self._ahead.num_done, self.buffer_size

    @property
    def _num_ready(self) -> int:
        """Elements that `take` returns before it computes more; on any thread."""
        rest = self._rest
        return sum(map(len, list(self.ready))) + (0 if rest is None else len(rest.elements))

    def _block_len(self, start: int, count: int) -> int:
        """Elements of a block of `count` at `start`, up to the next batch and the plan's end."""
        return min(count, self._len_to_batch_start(start) or count, self._length - start)

    def _len_to_batch_start(self, position: int) -> int:
        """Elements from `position` to the start of the next batch."""
        return (self._batch_origin - position) % self.batch_size if self.batch_size else 0

    def _computes_whole_batches(self, pace: Pace) -> bool:
        """Whether blocks are whole batches: not slow ones, which threads may share."""
        if not self.batch_size or pace.element_s is None:
            return False
        if pace.element_s * self.batch_size > tuning.WHOLE_BATCH_S:
            return False
        return not self._program.waits_for_storage or self._program.has_column_batches

    def awaited(self) -> Awaited | None:
        """What the thread in `take` waits for or computes, if one is there; on any thread."""
        return None

    def start(self) -> None:  # noqa: B027 - nothing to do without prefetching
        """Starts prefetching."""

    def cancel(self) -> None:
        """See `Stage.cancel`."""
        self._cancelled = True

    def check_open(self) -> None:
        """Raises `ValueError` once `cancel` was called."""
        if self._cancelled:
            raise closed_error()

    def close(self) -> None:  # noqa: B027 - nothing to do without threads or processes
        """Stops threads or processes; can be called again."""


def weak_call(owner: T, method: Callable[[T], R], default: R) -> Callable[[], R]:
    """`method` of `owner`, which this does not keep alive; afterwards, its last result.

    Args:
        owner: Whose method it is.
        method: The method.
        default: The result where it was not called before.
    """
    reference = weakref.ref(owner)
    last = default

    def call() -> R:
        nonlocal last
        alive = reference()
        if alive is not None:
            last = method(alive)
        return last

    return call
