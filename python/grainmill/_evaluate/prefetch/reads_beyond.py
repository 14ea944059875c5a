"""Reads beyond the elements in flight, of sources whose reads serve many elements each."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from grainmill._evaluate.batches.batch_blocks import block_len
from grainmill._evaluate.prefetch import tuning
from grainmill._evaluate.program import PendingElements
from grainmill._interrupts import raise_interrupt

if TYPE_CHECKING:
    from grainmill._evaluate.program import Program


class ReadsBeyond:
    """Starts such reads up to a distance ahead, while the sources have memory for them.

    Rows in order need a page for a thousand of them: blocks of a few hundred would have one request
    in flight.

    Args:
        program: Whose sources read.

    Attributes:
        cpu_left_s: How long it may still compute before the blocks that start now are waited for.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        # What holds the reads of the elements before a position.
        self._held: deque[tuple[int, Any]] = deque()
        self._until = 0
        self.cpu_left_s = 0.0

    def advance(self, position: int, length: int) -> None:
        """Starts reads of elements from `position` on, where the next block begins.

        Args:
            position: The first element whose own reads are not started.
            length: The number of elements.
        """
        while self._held and self._held[0][0] <= position:
            self._held.popleft()
        self._until = max(self._until, position)
        program = self._program
        if not program.waits_for_storage:
            return
        mean = program.mean_byte_len
        step = block_len(mean, tuning.BEYOND_STEP_LEN, tuning.BEYOND_STEP_BYTES)
        max_steps = tuning.BEYOND_BYTES // tuning.BEYOND_STEP_BYTES
        stop = min(length, position + max_steps * step)
        while self.cpu_left_s > 0:
            count = min(step, stop - self._until)
            if count <= 0 or (self._held and count < step and self._until + count < length):
                return
            began_s = time.thread_time()
            try:
                positions = range(self._until, self._until + count)
                started = PendingElements(program, positions).start_beyond()
            except Exception as failure:
                raise_interrupt(failure)
                return  # raised where the elements are read
            if started is None:
                return
            self.cpu_left_s -= time.thread_time() - began_s
            self._until += count
            self._held.append((self._until, started))

    def clear(self) -> None:
        """Gives up these reads."""
        self._held.clear()
        self._until = 0
