"""Opens the datasets of an interleave ahead of use, on threads where opening is slow."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from grainmill._interrupts import raise_interrupt, suppressed
from grainmill._plan.closing import closed_error
from grainmill._threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._iterators.base.stage import Stage


# Threads open the next datasets if opening one took longer; starting one takes about a tenth of it.
_SLOW_S = 0.001


class ConcurrentOpener:
    """Opens datasets by index, and up to `num_ahead` of the next ones before their turn."""

    def __init__(
        self,
        open_dataset: Callable[[int], Stage],
        num_datasets: int,
        *,
        num_threads: int,
        num_ahead: int,
    ) -> None:
        self._open_dataset = open_dataset
        self._num_datasets = num_datasets
        self._num_threads = num_threads
        self._num_ahead = num_ahead
        self._pending: dict[int, _Opening] = {}
        self._slowest_s = 0.0
        self._cancelled = False

    def open_next(self, first: int) -> None:
        """Starts opening the datasets from `first` on, as many as are allowed at once."""
        if not self._num_threads:
            return
        for index in range(first, min(first + self._num_ahead, self._num_datasets)):
            if index not in self._pending:
                in_flight = sum(not opening.done.is_set() for opening in self._pending.values())
                if in_flight >= self._num_threads:
                    break
                opening = _Opening(self._open, index)
                if self._slowest_s > _SLOW_S:
                    self._pending[index] = opening
                    opening.start()
                else:
                    opening.run()
                    self._pending[index] = opening

    def _open(self, index: int) -> Stage:
        started = time.monotonic()
        try:
            return self._open_dataset(index)
        finally:
            self._slowest_s = max(self._slowest_s, time.monotonic() - started)

    def take(self, index: int) -> Stage:
        """The dataset `index` at its start; raises what opening it raised.

        Raises:
            ValueError: `cancel` was called, possibly while this waited.
        """
        opening = self._pending.get(index)
        if opening is None:
            self._check_open()
            return self._open(index)
        opening.done.wait()
        self._check_open()
        del self._pending[index]
        return opening.result()

    def cancel(self) -> None:
        """Makes a thread that waits in `take` raise `ValueError`; see `Stage.cancel`."""
        self._cancelled = True
        for opening in list(self._pending.values()):
            opening.cancel()

    def _check_open(self) -> None:
        if self._cancelled:
            raise closed_error()

    def close(self) -> None:
        """Closes the datasets that were not taken, now or once they are open."""
        pending, self._pending = self._pending, {}
        for opening in pending.values():
            opening.abandon()


class _Opening:
    """One dataset being opened, by `start` on a thread or by `run` on the caller's.

    Attributes:
        done: Set when it is open, or opening failed.
    """

    def __init__(self, open_dataset: Callable[[int], Stage], index: int) -> None:
        self.done = threading.Event()
        self._open_dataset = open_dataset
        self._index = index
        self._stage: Stage | None = None
        self._failure: BaseException | None = None
        self._abandoned = False
        self._lock = threading.RLock()

    def start(self) -> None:
        """Opens it on a new thread."""
        start_thread(self._run, name=f"grain-interleave-open_{self._index}", stop=self.abandon)

    def run(self) -> None:
        """Opens it and starts its prefetching; interrupts are raised."""
        self._run()
        if self._failure is not None:
            raise_interrupt(self._failure)

    def _run(self) -> None:
        try:
            stage = self._open_dataset(self._index)
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
        """Waits for the dataset; raises what opening it raised."""
        self.done.wait()
        if self._stage is None:
            failure, self._failure = self._failure, None
            raise failure or RuntimeError(f"dataset {self._index} was not opened")
        return self._stage

    def cancel(self) -> None:
        """Wakes the threads that wait for it, and cancels or abandons it."""
        with self._lock:
            stage = self._stage
            self._abandoned = stage is None
        if stage is not None:
            stage.cancel()
        self.done.set()

    def abandon(self) -> None:
        """Closes the dataset as soon as it is open."""
        with self._lock:
            self._abandoned = True
            stage = self._stage
        if stage is not None:
            _close(stage)


def _close(stage: Stage) -> None:
    with suppressed():  # it was never used: there is no caller to report to
        stage.close()
