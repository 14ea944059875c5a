"""Iterators over datasets: the base class for users, and the one that runs plans."""

from __future__ import annotations

import abc
import functools
import os
import threading
from collections.abc import Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Self, SupportsIndex, TypeVar

from grainmill._dataset import views
from grainmill._dataset.views.running_reprs import ShownRunning
from grainmill._dataset.views.user_stats import STATS
from grainmill._evaluate.evaluated import SKIPPED
from grainmill._evaluate.prefetch import tuning
from grainmill._interrupts import (
    came_after_call,
    is_interrupt,
    raise_interrupt,
    stopped_error,
    suppressed,
)
from grainmill._iterators.base.position import Position, copy_state, of_state, state_at
from grainmill._iterators.base.stage import NO_BLOCK, num_after
from grainmill._iterators.metering import PullMeter
from grainmill._iterators.open import open_stage
from grainmill._iterators.settings import options_of
from grainmill._iterators.thread_prefetch import ThreadPrefetchStage
from grainmill._plan.arguments import checked_integer
from grainmill._plan.closing import closed_error
from grainmill._plan.tracebacks import drop_inner_frames
from grainmill._stats import timeline
from grainmill._stats.jax_trace import trace_annotation
from grainmill._stats.meters import Activity, Recorder, clock_s
from grainmill._stats.opened_iterators import opens
from grainmill._stats.prometheus import export
from grainmill._stats.tracking import new_recorder
from grainmill._threads import not_waiting, stay_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._checkpoint import pipeline
    from grainmill._iterators.base.stage import Block, Stage, State
    from grainmill._plan.node import Node

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Savable(abc.ABC):
    """An iterator that is closed at the end of its `with` block, and that Orbax can save."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases threads, worker processes and memory; safe to call again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def save(self, directory: Any) -> Awaitable[None]:
        """Saves the state as a part of a checkpoint of Orbax' newer interface.

        The state is taken during this call, before it returns, so elements may be taken while it is
        written.

        Args:
            directory: Where to write the files of `grain.checkpoint.CheckpointHandler`: a path, or
                an object whose `await_creation` returns one.

        Returns:
            A coroutine that writes the files when it is awaited.

        Raises:
            TypeError: JSON cannot represent the state.
        """
        from grainmill._checkpoint import states  # noqa: PLC0415

        return await states.save(self, directory)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Restores the state that `save` wrote.

        Args:
            directory: A path.

        Returns:
            A coroutine that reads the files and restores the state when it is awaited; it raises
            `ValueError` if there is no state, or one of another pipeline or loader.
        """
        from grainmill._checkpoint import states  # noqa: PLC0415

        return await states.load(self, directory)


class DatasetIterator(Savable, Iterator[T_co], Generic[T_co]):
    """An iterator over a dataset whose position can be saved and restored.

    `iter(dataset)` returns one. Threads may share it: each element goes to one of them. It cannot
    be copied or pickled; keep its dataset and its state instead. `close`, the end of its `with`
    block, or dropping it releases its threads, worker processes and memory.

    Derive from it to write a stage of your own: call `super().__init__(parent_iterator)`, read
    elements with `next(self._parent)`, and define `__next__`, `get_state` and `set_state`.

    Args:
        parents: The iterator, or iterators, that it reads elements from.

    Example:
        >>> with iter(grain.MapDataset.range(4).to_iter_dataset()) as iterator:
        ...     first = next(iterator), next(iterator)
        ...     state = iterator.get_state()
        ...     rest = list(iterator)
        ...     iterator.set_state(state)
        ...     first, state, rest, next(iterator)
        ((0, 1), {'next_index': 2}, [2, 3], 2)

        A stage of one's own, with its dataset:

        >>> class Sums(grain.IterDataset):
        ...     def __iter__(self):
        ...         return SumsIterator(self._parent.__iter__())
        >>> class SumsIterator(grain.DatasetIterator):
        ...     def __init__(self, parent):
        ...         super().__init__(parent)
        ...         self._sum = 0
        ...
        ...     def __next__(self):
        ...         self._sum += next(self._parent)
        ...         return self._sum
        ...
        ...     def get_state(self):
        ...         return {"parent": self._parent.get_state(), "sum": self._sum}
        ...
        ...     def set_state(self, state):
        ...         self._parent.set_state(state["parent"])
        ...         self._sum = state["sum"]
        >>> list(Sums(grain.MapDataset.range(5).to_iter_dataset()))
        [0, 1, 3, 6, 10]
    """

    _MUTATES_ELEMENT_SPEC = True
    _STATE_IS_DICT = True  # a loader's is bytes
    _stats = STATS

    def __init__(self, parents: DatasetIterator[Any] | Sequence[DatasetIterator[Any]] = ()) -> None:
        self._parents = tuple(parents) if isinstance(parents, Sequence) else (parents,)
        self._closed = False

    @property
    def _parent(self) -> DatasetIterator[Any]:
        (parent,) = self._parents
        return parent

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __next__(self) -> T_co:
        """Returns the next element.

        Raises:
            StopIteration: There are no more elements; later calls raise it again.
            ValueError: The iterator is closed.
        """

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Returns the state after the element last returned, as a dict that JSON can represent.

        `set_state` continues from it.
        """

    @abc.abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the element that was returned last when `state` was taken.

        Args:
            state: From `get_state` of an iterator over the same pipeline, in any process; it is not
                changed.
        """

    def _describe_pipeline(self) -> pipeline.Stages | None:
        """What a checkpoint says about the pipeline; `None` if it is unknown."""
        from grainmill._checkpoint import pipeline, states  # noqa: PLC0415

        stages: pipeline.Stages = []
        parents = self.__dict__.get("_parents", ())
        described = [states.described(parent) for parent in parents]
        if len(described) == 1 and described[0] is not None:
            stages = described[0]
        own: dict[str, Any] = {"stage": pipeline.function_name(type(self))}
        if len(described) > 1:
            own["of"] = described
        return [*stages, own]

    def stats(self) -> dict[str, Any]:
        """Returns where the time of the pipeline has gone so far.

        It can be called at any time, on any thread, without having switched anything on. Then
        counts and times of stages are estimates from calls that were timed now and then, at a cost
        below one percent; those of the output and of waits are exact. With
        `config.update("py_debug_mode", True)`, or `ExecutionTrackingMode.STAGE_TIMING`, all calls
        are counted. Times of stages are sums over threads and workers. What is inside a user's own
        iterator is known if that calls `self._stats.record_self_time()`.

        Returns:
            A dict that JSON can represent: `elements` delivered; seconds since the first request
            (`elapsed_s`) and those of them that the consumer spent in `next` (`consumer_wait_s`,
            and as `consumer_wait_share`); `storage` with `reads`, `bytes`, `mean_latency_s` and
            `wait_s`, of files that this package reads; `prefetch` with the `elements` that are
            ready and their `limit`; and `stages`, the output first, with `id`, `name`, the ids of
            `inputs`, `elements`, `time_s`, `min_s` and `max_s` of an element, `cpu_share`,
            `wait_share` of the time that the consumer waits, `wait_s` where a stage prefetches,
            `bytes` produced, and the `workers` with their `elements`, `busy_s` and `busy_share`.
            Unknown values are `None`.

        Raises:
            NotImplementedError: It is a user's own iterator over no dataset of this package.

        Example:
            >>> iterator = iter(grain.MapDataset.range(6).map(lambda x: x * x).batch(2))
            >>> _ = list(iterator)
            >>> stats = iterator.stats()
            >>> stats["elements"], [stage["id"] for stage in stats["stages"]]
            (3, [0, 1, 2, 3])
        """
        return self._parent_with("stats").stats()

    def verdict(self, *, has_consumer: bool = True) -> str:
        """Returns one sentence: which stage holds the pipeline back, and what to change.

        It is the storage, a function by its name, the interpreter lock (GIL), the workers, another
        stage, or the consumer itself. Waits for the lock, for a core, or for elements that another
        thread computes are not held against a stage. The more elements were delivered, the surer it
        is: some dozens at least.

        A class of one's own that overrides it may leave the argument out.

        Args:
            has_consumer: Whether it may be the consumer: not where nothing is done with elements.

        Raises:
            NotImplementedError: It is a user's own iterator over no dataset of this package.

        Example:
            >>> iterator = iter(grain.MapDataset.range(100).to_iter_dataset())
            >>> iterator.verdict()
            'no element has been requested yet; ask again later'
        """
        return views.asked_verdict(self._parent_with("verdict"), has_consumer=has_consumer)

    def _parent_with(self, name: str) -> DatasetIterator[Any]:
        for parent in self.__dict__.get("_parents", ()):
            if isinstance(parent, DatasetIterator):
                return parent
        raise NotImplementedError(
            f"`{name}` is not known for {type(self).__name__}, which reads from no iterator of a "
            "dataset"
        )

    def start_prefetch(self) -> None:
        """Starts prefetching before the first element is requested, if the pipeline prefetches."""
        for parent in self.__dict__.get("_parents", ()):
            parent.start_prefetch()

    def _cancel_waiting(self) -> None:
        """Makes threads that wait for an element of a parent raise an error; see `Stage.cancel`."""
        for parent in self.__dict__.get("_parents", ()):
            cancel = getattr(parent, "_cancel_waiting", None)
            if cancel is not None:
                cancel()
        if type(self).close is not DatasetIterator.close:  # it may end the wait
            with suppressed(), not_waiting():
                self.close()

    def close(self) -> None:
        """Releases threads, worker processes and memory, here and upstream; safe to call again."""
        self._closed = True
        for parent in self.__dict__.get("_parents", ()):
            parent.close()

    def __del__(self) -> None:
        try:
            with not_waiting():
                self.close()
        except Exception:
            pass


# The arguments of `acquire`, for `map`: the interpreter handles no signal between what an iterator
# returns and its assignment, as it does after a call. An exception there would leave a lock held.
_AT_ONCE: Final = (False,)


class PipelineDatasetIterator(ShownRunning, DatasetIterator[T_co]):
    """Runs a plan, element by element; threads may share one, each element goes to one of them.

    Only the thread that holds the lock advances or closes the stages. Another thread that closes
    the iterator does not wait for the lock, which may be held forever: it sets `_closed`, cancels
    what the holder waits for, and returns. A thread that releases the lock checks `_closed`, and
    closes the stages if it is set.

    An interrupt may arrive at any line: ready elements and the position before are replaced in
    one assignment, and stages interrupted while they change position are restored before they are
    used again.
    """

    def __init__(
        self,
        node: Node | None,
        stage: Stage,
        name: str | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__()
        opens(self)
        self._node = node
        self._stage = stage
        self._recorder = recorder or Recorder()
        self._activity = Activity()
        self._trace = trace_annotation()
        self._num_pulled = 0  # elements, without those that lazy blocks before this one dropped
        self._meter = PullMeter(stage, self._recorder, self._activity.start)
        self._name = name
        self._description: pipeline.Stages | None = None
        self._from_start = node is not None  # whether reopening the plan gives the initial position
        # Elements waiting for delivery, the next one last, and the position after them; also
        # the one before if it is a single element.
        self._waiting: list[T_co] = []
        self._after: Position | None = None  # `None`: the stages' position, or the start
        self._before: Position | None = None
        self._single = False
        self._block = NO_BLOCK  # lazy: its elements are finished one at a time
        self._offset = 0
        self._changing = False  # the stages are changing position, or were interrupted in that
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stages_closed = False

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError(
            "an iterator cannot be copied or pickled; use its dataset and `get_state()` instead"
        )

    def __str__(self) -> str:
        if self._name is not None:
            return self._name
        return str(self._node).replace("IterDataset", "DatasetIterator", 1)

    def _shown_iterator(self) -> tuple[Any, str]:
        return self, str(self)

    def __next__(self) -> T_co:  # noqa: PLR0912 - a call for each branch would cost too much
        while True:
            waiting = self._waiting
            if waiting:
                try:
                    return waiting.pop()
                except BaseException as failure:
                    if is_interrupt(failure):
                        if came_after_call(failure):
                            self._take_back()
                        raise_interrupt(failure)
                    # An `IndexError`: another thread took it.
            lock, is_held = self._lock, False
            try:
                for is_held in map(lock.acquire, _AT_ONCE):  # noqa: B007 - see there
                    pass
                if not is_held:
                    lock, is_held = self._acquired(), True
                if not self._waiting:
                    self._advance()
            except Exception as failure:
                if is_held:
                    stay_at_exit(lock.release)
                raise_interrupt(failure)
                raise
            finally:
                if is_held:
                    lock.release()
                if self._closed:
                    with not_waiting():  # the error must not be delayed
                        self._close_stages()

    def _advance(self) -> None:  # noqa: PLR0912 - a call for each branch would cost too much
        """Makes the next element ready, or several that are computed already."""
        if self._changing:  # it was interrupted
            self._restore_stages()
        try:
            while True:
                block, at = self._block, self._offset
                if at >= len(block.elements):
                    self._record_position()
                    if self._closed:
                        raise closed_error(self._closed_message())  # noqa: TRY301
                    self._changing = True
                    timer, trace, taken = self._meter.timer, self._trace, timeline.current
                    started_s = 0.0 if taken is None else clock_s()
                    if timer.countdown > 0 and (trace is None or not trace.is_enabled()):
                        block = self._stage.pull(self._stage.pull_size)
                        timer.countdown -= len(block.elements)
                    else:
                        block = self._pull_recorded()
                    if taken is not None:
                        ended_s = clock_s()
                        taken.nexts_s += ended_s - started_s
                        if taken.nexts_s >= timeline.LEAST_S:
                            self._add_next(taken, len(block.elements), (started_s, ended_s))
                    if self._hold(block):
                        return
                    continue
                self._changing = True
                finish = block.finish
                element = block.elements[at] if finish is None else finish(block.elements[at], at)
                at += 1
                if element is not SKIPPED:
                    self._before, self._single, new = self._after, True, (block.state_after, at)
                    self._offset, self._waiting, self._after, self._changing = (
                        at,
                        [element],
                        new,
                        False,
                    )
                    return
                self._offset = at
        except Exception as failure:
            raise_interrupt(failure)
            self._changing = False
            if self._closed:  # cancelling may raise any error
                raise closed_error(self._closed_message()) from None
            if self._offset < len(self._block.elements):
                self._block.note(failure, self._offset)
            drop_inner_frames(failure)
            raise

    def _take_back(self) -> None:
        """Makes the next call compute the last element again, which has not reached the caller."""
        with self._lock:
            point = self._delivered_point()
            if point is not None:
                before = self._before if self._single else (point[0], point[1] - 1)
                self._reset(self._num_delivered - 1, before, is_changing=True)

    def _locked(self, call: Callable[[], T]) -> T:
        """What `call()` returns, which runs with the lock held."""
        lock = None
        try:
            lock = self._acquired()
            return call()
        except Exception:
            if self._closed:
                raise closed_error(self._closed_message()) from None
            raise
        finally:
            if lock is not None:
                lock.release()
            if self._closed:
                with not_waiting():
                    self._close_stages()

    def _acquired(self) -> threading.RLock:
        """Waits for the lock, and returns it.

        Raises:
            ValueError: The iterator was closed while another thread holds the lock.
        """
        lock, is_held = self._lock, False
        try:
            while not is_held:
                if (free := self._try_acquire()) is not None:
                    return free
                if self._closed:  # the holder may be in a user's function that never returns
                    raise closed_error(self._closed_message())  # noqa: TRY301
                lock = self._lock
                for is_held in map(lock.acquire, (True,), (tuning.POLL_S,)):  # noqa: B007
                    break
                else:  # that of a signal handler has ended the loop
                    raise stopped_error()  # noqa: TRY301
            return lock  # noqa: TRY300 - an interrupt may come here
        except BaseException:
            if is_held:
                lock.release()
            raise

    def _try_acquire(self) -> threading.RLock | None:
        """Returns the lock once acquired, or `None` if another thread holds it."""
        lock, is_held = self._lock, False
        try:
            for is_held in map(lock.acquire, _AT_ONCE):  # noqa: B007 - see there
                pass
            if is_held:
                return lock
        except BaseException:
            if is_held:
                lock.release()
            raise
        if self._pid == os.getpid():
            return None
        self._pid = os.getpid()  # after a fork: the thread that holds it exists in the parent only
        self._lock = threading.RLock()
        return self._try_acquire()

    def _pull_recorded(self) -> Block:
        """Pulls the next block, which is timed, or shown in a trace of JAX."""
        trace = self._trace
        if trace is None or not trace.is_enabled():
            return self._meter.pull()
        with trace(f"grainmill {self}"):
            block = self._stage.pull(self._stage.pull_size)
        self._meter.timer.countdown -= len(block.elements)
        return block

    def _add_next(self, taken: timeline.Timeline, count: int, times_s: tuple[float, float]) -> None:
        """Adds a call of `next` to a trace, and now and then what its counters are."""
        taken.add_next(count, *times_s)
        now_s = times_s[1]
        if not taken.counters_are_due(now_s):
            return
        taken.add_engines()
        num_reads, num_bytes, *_ = self._recorder.all_files()
        ahead = sum(read.ahead()[0] for read in self._recorder.all_reads())
        taken.count("ready elements", now_s, ahead)
        taken.count("reads", now_s, num_reads)
        taken.count("bytes read", now_s, num_bytes)

    def _hold(self, block: Block) -> bool:
        """Makes the elements of a block the next ones; returns whether they are ready now."""
        elements = block.elements
        num_pulled = self._num_pulled + len(elements)
        if elements and block.finish is not None:
            if block.columns is None:
                num_pulled -= len(self._block.dropped or ())
                self._num_pulled, self._block, self._offset, self._changing = (
                    num_pulled,
                    block,
                    0,
                    False,
                )
                return False
            elements = block.finished(0, len(elements)).elements  # rows: no user function is called
        point, waiting = (block.state_after, len(elements)), elements[::-1]
        self._num_pulled, self._waiting, self._after, self._single, self._changing = (
            num_pulled,
            waiting,
            point,
            False,
            False,
        )
        if not elements:
            self._activity.end()
            raise StopIteration
        return True

    @property
    def _num_delivered(self) -> int:
        """Elements delivered since the start, whatever states were restored."""
        block, at = self._block, self._offset
        not_finished = len(block.elements) - num_after(0, block.dropped, at)
        return max(0, self._num_pulled - not_finished - len(self._waiting))

    @property
    def _consumer_away_s(self) -> float:
        """See `PullMeter.away_s`."""
        block, at = self._block, self._offset
        return self._meter.away_s(len(self._waiting) + max(0, len(block.elements) - at))

    def stats(self) -> dict[str, Any]:
        """Returns where the time has gone so far; see `DatasetIterator.stats`."""
        return views.stats_of(self)

    def verdict(self, *, has_consumer: bool = True) -> str:
        """Returns one sentence on what holds it back; see `DatasetIterator.verdict`.

        Args:
            has_consumer: See there.
        """
        return views.verdict_of(self, has_consumer=has_consumer)

    def _record_position(self) -> None:
        """Records the position of the stages before it changes, unless it is known."""
        if self._after is None and not self._from_start:
            with suppressed():  # a user's iterator may have no state
                self._after = of_state(self._stage.state())

    def _delivered_state(self) -> State | None:
        """The state after the element delivered last; `None` if not recorded."""
        point = self._delivered_point()
        return None if point is None else state_at(point)

    def _delivered_point(self) -> Position | None:
        point, num_waiting = self._after, len(self._waiting)
        if num_waiting and self._single:
            point, num_waiting = self._before, 0
        return None if point is None else (point[0], point[1] - num_waiting)

    def _closed_message(self) -> str:
        if type(self._stage) is ThreadPrefetchStage:
            return "Attempting to use a closed iterator."
        return f"Trying to advance a closed iterator: '{self}'."

    def get_state(self) -> dict[str, Any]:
        """Returns the state after the element last returned, as a new dict that JSON can represent.

        Prefetched elements are not part of it. This starts neither threads nor workers.
        """
        return self._locked(self._current)

    def _describe_pipeline(self) -> pipeline.Stages | None:
        """See `DatasetIterator._describe_pipeline`."""
        if self._description is None and self._node is not None:
            from grainmill._checkpoint import pipeline  # noqa: PLC0415

            self._description = pipeline.described(self._node)
        return self._description

    def _current(self) -> State:
        state = self._delivered_state()
        if state is not None:
            return state
        if self._has_undelivered() and (self._from_start or self._changing):
            self._restore_stages()
        return self._stage.state()

    def _has_undelivered(self) -> bool:
        """Whether the stages are not positioned just after the element delivered last."""
        return self._changing or bool(self._waiting) or self._offset < len(self._block.elements)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the element that had been returned last when `state` was saved.

        It may be called at any time, also after the last element. If it raises an error, the
        iterator keeps its position.

        Args:
            state: From `get_state` of an iterator over the same pipeline, in any process; it is not
                changed.

        Raises:
            ValueError: `state` was saved from a pipeline with other stages.
            IndexError: `state` lies outside the data.
        """
        try:
            self._move(lambda: self._stage.restore(copy_state(state)))
        except (KeyError, TypeError) as mismatch:
            raise ValueError(
                f"state does not fit the pipeline that ends in {self}: {mismatch!r} on {state!r}"
            ) from mismatch

    def _move(self, move: Callable[[], None]) -> None:
        """Changes the position of the stages; restores it if that fails."""

        def move_or_restore() -> None:
            if self._after is None and self._has_undelivered():
                self._restore_stages()
            self._record_position()
            self._changing = True
            try:
                move()
            except Exception as failure:
                raise_interrupt(failure)
                with suppressed():
                    self._restore_stages()
                raise
            self._from_start = False
            self._reset(self._num_delivered)

        self._locked(move_or_restore)

    def _reset(
        self, num_delivered: int, after: Position | None = None, *, is_changing: bool = False
    ) -> None:
        """Forgets what was pulled and not delivered; `after` is the position from then on."""
        waiting: list[T_co] = []
        (
            (self._num_pulled, self._waiting, self._block, self._offset),
            (self._after, self._before, self._single, self._changing),
        ) = (num_delivered, waiting, NO_BLOCK, 0), (after, None, False, is_changing)

    def _restore_stages(self) -> None:
        """Restores the stages to just after the element delivered last."""
        self._changing = True
        state = self._delivered_state()
        if state is not None:
            self._stage.restore(state)
            self._from_start = False
        elif self._from_start and self._node is not None:
            with suppressed():
                self._stage.close()
            self._stage = open_stage(self._node, self._recorder)
            self._meter = PullMeter(self._stage, self._recorder, self._activity.start)
            if self._closed:  # meanwhile, by a thread that cancelled only the previous stages
                raise closed_error(self._closed_message())
        self._reset(self._num_delivered)

    def _get_next_index(self) -> int:
        return self._locked(self._current_index)

    def _current_index(self) -> int:
        if self._has_undelivered():
            self._restore_stages()
        return self._stage.next_index()

    def _set_next_index(self, index: int) -> None:
        self._move(lambda: self._stage.seek(index))

    def start_prefetch(self) -> None:
        """Starts prefetching before the first element is requested, if the pipeline prefetches.

        Raises:
            ValueError: The iterator is closed.
        """
        self._locked(self._start_prefetch)

    def _start_prefetch(self) -> None:
        if self._closed:
            raise closed_error(self._closed_message())
        self._stage.start_prefetch()

    def _cancel_waiting(self) -> None:
        """See `DatasetIterator._cancel_waiting`."""
        self._closed = True
        self._stage.cancel()

    def close(self) -> None:
        """Releases threads, worker processes and memory; safe to call again.

        Threads that wait for an element get a `ValueError`; a thread that runs a user function gets
        it when that function returns. This call does not wait for them.
        """
        if self.__dict__.get("_stages_closed", True):
            return
        self._closed = True
        if not self._close_stages():
            self._stage.cancel()
            self._close_stages()  # the other thread may have released the lock since

    def _close_stages(self) -> bool:
        """Closes the stages; if another thread holds the lock, that thread does so on release."""
        lock = None
        try:
            lock = self._try_acquire()
            if lock is None:
                return False
            if not self._stages_closed:
                self._stages_closed = True
                # `get_state` still returns the state after the last delivery.
                self._reset(self._num_delivered, self._delivered_point())
                self._stage.close()
        finally:
            if lock is not None:
                lock.release()
        return True


def iterator_over(
    node: Node, kind: type[PipelineDatasetIterator[Any]] = PipelineDatasetIterator
) -> PipelineDatasetIterator[Any]:
    """An iterator of type `kind` over the elements of the plan that ends in `node`."""
    recorder = new_recorder(options_of(node))
    if recorder.spec_of:
        kind = _observed(kind)
    iterator = kind(node, open_stage(node, recorder), recorder=recorder)
    export(iterator, recorder)
    return iterator


class ObservedIterator(PipelineDatasetIterator[T_co]):
    """Draws its pipeline, or logs its times once a minute, as the settings of the process say."""

    _kind: type[PipelineDatasetIterator[Any]]

    def __next__(self) -> T_co:
        element = super().__next__()
        if element is not None:
            try:
                self._observe()
            except BaseException:
                self._take_back()
                raise
        return element

    def _observe(self) -> None:
        self.__class__ = self._kind  # type: ignore[assignment]  # later elements cost no more
        views.observe(self)
        if not self._recorder.tracks:
            self._recorder.spec_of = None  # from now on, pulls are timed now and then only
            self._meter.stop()


@functools.cache
def _observed(kind: type[PipelineDatasetIterator[Any]]) -> type[PipelineDatasetIterator[Any]]:
    return type(kind.__name__, (ObservedIterator, kind), {"_kind": kind})


class ThreadPrefetchDatasetIterator(PipelineDatasetIterator[T_co]):
    """Prefetches the elements of any iterator on one thread.

    Args:
        parent: Any object with `__next__`; if it has `get_state` and `set_state`, this iterator can
            be saved and restored, too.
        prefetch_buffer_size: Maximum number of prefetched elements; 0 computes each when it is
            requested.

    Raises:
        ValueError: `prefetch_buffer_size` is negative.
        TypeError: `prefetch_buffer_size` is not an integer.

    Example:
        >>> batches = (np.full(2, number) for number in range(3))
        >>> prefetched = grain.experimental.ThreadPrefetchDatasetIterator(batches, 2)
        >>> [batch.tolist() for batch in prefetched]
        [[0, 0], [1, 1], [2, 2]]
    """

    def __init__(self, parent: Iterator[T_co], prefetch_buffer_size: int) -> None:
        recorder = Recorder()
        stage = ThreadPrefetchStage.around(parent, prefetch_buffer_size, recorder)
        name = f"ThreadPrefetchDatasetIterator(prefetch_buffer_size={prefetch_buffer_size})"
        super().__init__(None, stage, name, recorder)
        self._iterated = parent

    def stats(self) -> dict[str, Any]:
        """Returns where the time of `parent` has gone so far; see `DatasetIterator.stats`."""
        return self._parent_with("stats").stats()

    def verdict(self, *, has_consumer: bool = True) -> str:
        """Returns one sentence on what holds `parent` back; see `DatasetIterator.verdict`.

        Args:
            has_consumer: See there.
        """
        return DatasetIterator.verdict(self, has_consumer=has_consumer)

    def _parent_with(self, name: str) -> DatasetIterator[Any]:
        parent = self._iterated
        return parent if isinstance(parent, DatasetIterator) else super()._parent_with(name)


def get_next_index(ds_iter: DatasetIterator[Any]) -> int:
    """Returns the index of the element that `next(ds_iter)` will return.

    Args:
        ds_iter: An iterator whose elements have an index: its pipeline reads a `MapDataset` and has
            only maps, batches, limits, prefetching, or a single worker.

    Raises:
        NotImplementedError: Elements of this pipeline have no index, as after a filter.

    Example:
        >>> iterator = iter(grain.MapDataset.range(10).batch(2).to_iter_dataset())
        >>> next(iterator).tolist(), grain.experimental.get_next_index(iterator)
        ([0, 1], 1)
    """
    index: int = _method(ds_iter, "get_next_index")()
    return index


def set_next_index(ds_iter: DatasetIterator[Any], index: int) -> None:
    """Makes `index` the element that `next(ds_iter)` will return.

    Args:
        ds_iter: An iterator whose elements have an index; see `get_next_index`.
        index: From 0 to the number of elements; the latter is the end.

    Raises:
        NotImplementedError: Elements of this pipeline have no index, as after a filter.
        IndexError: `index` lies outside the data.
        TypeError: `index` is not an integer.
        ValueError: `index` is negative.

    Example:
        >>> iterator = iter(grain.MapDataset.range(10).batch(2).to_iter_dataset())
        >>> grain.experimental.set_next_index(iterator, 3)
        >>> next(iterator).tolist()
        [6, 7]
    """
    _method(ds_iter, "set_next_index")(checked_integer(index, "index"))


def _method(iterator: Any, name: str) -> Callable[..., Any]:
    method: Callable[..., Any] | None = getattr(iterator, f"_{name}", None)
    if method is None:
        raise NotImplementedError(f"{name} is not supported for {type(iterator).__name__}.")
    return method
