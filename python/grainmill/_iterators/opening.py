"""Parts of an interleave opened ahead by threads, so that slow files are not waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from grainmill._plan.closing import closed_error
from grainmill._threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._iterators.stage import Stage


# Threads open the next parts where opening one took longer; they take about a tenth of it to start.
_SLOW_S = 0.001


class ConcurrentOpener:
    """Opens parts by index, and a few of the next ones ahead of their turn."""

    def __init__(
        self, open_part: Callable[[int], Stage], num_parts: int, *, num_threads: int, ahead: int
    ) -> None:
        self._open_part = open_part
        self._num_parts = num_parts
        self._num_threads = num_threads
        self._ahead = ahead
        self._begun: dict[int, _Opening] = {}
        self._slowest_s = 0.0
        self._cancelled = False

    def look_ahead(self, first: int) -> None:
        """Begins to open the parts from `first` on, as many as are allowed at once."""
        if not self._num_threads:
            return
        for index in range(first, min(first + self._ahead, self._num_parts)):
            if index not in self._begun:
                under_way = sum(not opening.done.is_set() for opening in self._begun.values())
                if under_way >= self._num_threads:
                    break
                opening = _Opening(self._open, index)
                if self._slowest_s > _SLOW_S:
                    self._begun[index] = opening
                    opening.start()
                else:
                    opening.run()
                    self._begun[index] = opening

    def _open(self, index: int) -> Stage:
        began = time.monotonic()
        try:
            return self._open_part(index)
        finally:
            self._slowest_s = max(self._slowest_s, time.monotonic() - began)

    def take(self, index: int) -> Stage:
        """The part `index`, from its start; raises what opening it raised.

        Raises:
            ValueError: `cancel` was called, maybe while this waited.
        """
        opening = self._begun.get(index)
        if opening is None:
            self._check_open()
            return self._open(index)
        opening.done.wait()
        self._check_open()
        del self._begun[index]
        return opening.result()

    def cancel(self) -> None:
        """Has who waits for a part that is being opened raise `ValueError`; see `Stage.cancel`."""
        self._cancelled = True
        for opening in list(self._begun.values()):
            opening.cancel()

    def _check_open(self) -> None:
        if self._cancelled:
            raise closed_error()

    def close(self) -> None:
        """Closes the parts that nobody took, now or when they are open."""
        begun, self._begun = self._begun, {}
        for opening in begun.values():
            opening.abandon()


class _Opening:
    """One part being opened, by a thread of its own where that takes long.

    Attributes:
        done: Set when it is open or failed to open.
    """

    def __init__(self, open_part: Callable[[int], Stage], index: int) -> None:
        self.done = threading.Event()
        self._open_part = open_part
        self._index = index
        self._stage: Stage | None = None
        self._failure: BaseException | None = None
        self._abandoned = False
        self._lock = threading.RLock()

    def start(self) -> None:
        """Has a thread open it."""
        start_thread(self._run, name=f"grain-interleave-open_{self._index}", stop=self.abandon)

    def run(self) -> None:
        """Opens it, and has it make elements ahead; an interrupt is for the caller."""
        self._run()
        if self._failure is not None and not isinstance(self._failure, Exception):
            raise self._failure

    def _run(self) -> None:
        try:
            stage = self._open_part(self._index)
            stage.start_prefetch()
        except BaseException as failure:
            self._failure = failure
        else:
            with self._lock:
                abandoned = self._abandoned
                if not abandoned:
                    self._stage = stage
            if abandoned:
                _close(stage)
        self.done.set()

    def result(self) -> Stage:
        """Waits for the part; raises what opening it raised."""
        self.done.wait()
        if self._stage is None:
            failure, self._failure = self._failure, None
            raise failure or RuntimeError(f"part {self._index} was not opened")
        return self._stage

    def cancel(self) -> None:
        """Has nobody wait for it any more."""
        with self._lock:
            stage = self._stage
            self._abandoned = stage is None
        if stage is not None:
            stage.cancel()
        self.done.set()

    def abandon(self) -> None:
        """Closes the part as soon as it is open."""
        with self._lock:
            self._abandoned = True
            stage = self._stage
        if stage is not None:
            _close(stage)


def _close(stage: Stage) -> None:
    with contextlib.suppress(Exception):  # nobody used it, so nobody cares how it ends
        stage.close()
