"""Iterators over datasets: the class users derive from, and the one that runs plans."""

from __future__ import annotations

import abc
import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, SupportsIndex, TypeVar

from grainmill._evaluate import tuning
from grainmill._evaluate.fuse import SKIPPED
from grainmill._iterators.cursor import copied, fixed
from grainmill._iterators.stage import Block
from grainmill._iterators.table import open_stage
from grainmill._iterators.thread_prefetch import ThreadPrefetchStage
from grainmill._plan.arguments import checked_integer
from grainmill._plan.closing import closed_error
from grainmill._plan.tracebacks import drop_inner_frames
from grainmill._threads import not_waiting

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from grainmill._iterators.cursor import ResumePoint
    from grainmill._iterators.stage import Stage, State
    from grainmill._plan.node import Node

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _NoStats:
    """Where derived iterators may report their timing; nothing is recorded."""

    def record_self_time(self, *_: Any, **__: Any) -> contextlib.nullcontext[None]:
        """A context whose time would be this iterator's own."""
        return contextlib.nullcontext()

    def record_output_spec(self, element: T) -> T:
        """Returns `element`."""
        return element

    def record_bytes_produced(self, element: T) -> T:
        """Returns `element`."""
        return element


class Closeable(abc.ABC):
    """What is closed at the end of its `with` block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases threads, worker processes and memory; safe to call again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class DatasetIterator(Closeable, Iterator[T_co], Generic[T_co]):
    """An iterator over a dataset whose place can be saved and restored.

    One comes from `iter(dataset)`. Threads may share it: each element goes to one of them. It
    cannot be copied or pickled; keep its dataset and its state. `close`, or the end of its `with`
    block, releases what it holds, and so does dropping it.

    Derive from it to write a stage of your own: call `super().__init__(parent_iterator)`, take
    elements with `next(self._parent)`, and define `__next__`, `get_state` and `set_state`.

    Args:
        parents: The iterator, or iterators, that elements are taken from.

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

    def __init__(self, parents: DatasetIterator[Any] | Sequence[DatasetIterator[Any]] = ()) -> None:
        self._parents = tuple(parents) if isinstance(parents, Sequence) else (parents,)
        self._closed = False

    @property
    def _parent(self) -> DatasetIterator[Any]:
        (parent,) = self._parents
        return parent

    @property
    def _stats(self) -> _NoStats:
        return _NoStats()

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __next__(self) -> T_co:
        """Returns the next element.

        Raises:
            StopIteration: There is none; a call after that raises it again.
            ValueError: The iterator is closed.
        """

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Returns what `set_state` needs to continue after the element last returned.

        It is a dict of what JSON can hold.
        """

    @abc.abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the element that was returned last when `state` was taken.

        Args:
            state: From `get_state` of an iterator over the same pipeline, in any process; it is not
                changed.
        """

    def start_prefetch(self) -> None:
        """Starts to compute elements before the first is asked for, where the pipeline does so."""
        for parent in self.__dict__.get("_parents", ()):
            parent.start_prefetch()

    def _cancel_waiting(self) -> None:
        """Has who waits for an element of a parent get an error; see `Stage.cancel`."""
        for parent in self.__dict__.get("_parents", ()):
            cancel = getattr(parent, "_cancel_waiting", None)
            if cancel is not None:
                cancel()
        if type(self).close is not DatasetIterator.close:  # which may end what it waits for
            with contextlib.suppress(Exception), not_waiting():
                self.close()

    def close(self) -> None:
        """Releases threads, worker processes and memory, here and upstream; safe to call again."""
        self._closed = True
        for parent in self.__dict__.get("_parents", ()):
            parent.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception), not_waiting():
            self.close()


class PlannedIterator(DatasetIterator[T_co]):
    """Runs a plan, element by element; threads may share one, each element goes to one of them.

    Stages are moved and closed by the thread that has the lock. Who closes the iterator while
    another thread has it, which may be for ever, says so in `_closed`, cancels what that thread
    waits for, and leaves: whoever gives the lock back looks at `_closed` then, and closes the
    stages.

    An interrupt may come anywhere: what is ready to be delivered takes its place together with
    the state before it in one assignment, and stages that were left while they moved are restored
    before they are used again.
    """

    def __init__(self, node: Node | None, stage: Stage, name: str | None = None) -> None:
        super().__init__()
        self._node = node
        self._stage = stage
        self._name = name
        self._fresh = node is not None  # whether opening the plan again gives the same place
        # Elements that are ready, the next one last, and the place after them; the place before
        # them where they are one that was finished alone.
        self._waiting: list[T_co] = []
        self._place: ResumePoint | None = None  # `None` where the stages stand, or at the start
        self._before: ResumePoint | None = None
        self._alone = False
        self._block = Block([], _no_state)  # whose elements are finished one by one
        self._at = 0
        self._moving = False  # whether the stages are being moved, or were left so
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stages_closed = False

    @classmethod
    def over(cls, node: Node) -> Self:
        """Returns an iterator over the elements of a plan.

        Args:
            node: The plan's last node.
        """
        return cls(node, open_stage(node))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise TypeError(
            "an iterator cannot be copied or pickled; take its dataset, and `get_state()`"
        )

    def __str__(self) -> str:
        if self._name is not None:
            return self._name
        return str(self._node).replace("IterDataset", "DatasetIterator", 1)

    def __next__(self) -> T_co:
        while True:
            waiting = self._waiting
            if waiting:
                try:
                    return waiting.pop()
                except IndexError:
                    pass  # another thread was faster
            lock = self._lock
            if not lock.acquire(blocking=False):
                lock = self._locked()
            try:
                if not self._waiting:
                    self._advance()
            finally:
                lock.release()
                if self._closed:
                    with not_waiting():  # there is an error to raise
                        self._close_stages()

    def _advance(self) -> None:
        """Has an element wait to be delivered, or several that are made already."""
        if self._moving:  # an interrupt came
            self._settle()
        try:
            while True:
                block, at = self._block, self._at
                if at >= len(block.elements):
                    self._leave()
                    if self._pull():
                        return
                    continue
                self._moving = True
                finish = block.finish
                element = block.elements[at] if finish is None else finish(block.elements[at], at)
                at += 1
                if element is not SKIPPED:
                    self._before, self._alone, place = self._place, True, (block.state_after, at)
                    self._at, self._waiting, self._place, self._moving = at, [element], place, False
                    return
                self._at = at
        except Exception as failure:
            self._moving = False
            if self._closed:  # whatever came of that
                raise closed_error(self._closed_message()) from None
            if self._at < len(self._block.elements):
                self._block.note(failure, self._at)
            drop_inner_frames(failure)
            raise

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """Has the lock in the `with` block."""
        lock = self._locked()
        try:
            yield
        except Exception:
            if self._closed:
                raise closed_error(self._closed_message()) from None
            raise
        finally:
            lock.release()
            if self._closed:
                with not_waiting():
                    self._close_stages()

    def _locked(self) -> threading.RLock:
        """Waits for other threads that move this iterator; returns what is to be released.

        Raises:
            ValueError: The iterator was closed while another thread has the lock.
        """
        while (lock := self._free_lock()) is None:
            if self._closed:  # the thread that has it may be left in a user's function
                raise closed_error(self._closed_message())
            lock = self._lock
            if lock.acquire(timeout=tuning.LOOK_S):
                break
        return lock

    def _free_lock(self) -> threading.RLock | None:
        """What is to be released, or `None` if another thread moves this iterator."""
        lock = self._lock
        if lock.acquire(blocking=False):
            return lock
        if self._pid == os.getpid():
            return None
        self._pid = os.getpid()  # the thread that holds it was left behind by a fork
        lock = self._lock = threading.RLock()
        lock.acquire()
        return lock

    def _pull(self) -> bool:
        """Goes on to the next block; whether its elements wait to be delivered now."""
        if self._closed:
            raise closed_error(self._closed_message())
        self._moving = True
        block = self._stage.pull(self._stage.pull_size)
        elements = block.elements
        if elements and block.finish is not None:
            if block.columns is None:
                self._block, self._at, self._moving = block, 0, False
                return False
            elements = block.finished(0, len(elements)).elements  # rows: no user's function
        place, waiting = (block.state_after, len(elements)), elements[::-1]
        self._waiting, self._place, self._alone, self._moving = waiting, place, False, False
        if not elements:
            raise StopIteration
        return True

    def _leave(self) -> None:
        """Takes note of where the stages stand before they move, if that is not known."""
        if self._place is None and not self._fresh:
            with contextlib.suppress(Exception):  # a user's iterator may have no state
                self._place = (fixed(self._stage.state()), 0)

    def _reached(self) -> State | None:
        """The state after the element delivered last; `None` where the stages stand, or stood."""
        place = self._place_reached()
        return None if place is None else place[0](place[1])

    def _place_reached(self) -> ResumePoint | None:
        place, num_waiting = self._place, len(self._waiting)
        if num_waiting and self._alone:
            place, num_waiting = self._before, 0
        return None if place is None else (place[0], place[1] - num_waiting)

    def _closed_message(self) -> str:
        if type(self._stage) is ThreadPrefetchStage:
            return "Attempting to use a closed iterator."
        return f"Trying to advance a closed iterator: '{self}'."

    def get_state(self) -> dict[str, Any]:
        """Returns the state after the element last returned, as a JSON-able dict of its own.

        Elements computed ahead of it are not part of the state. Neither threads nor workers start.
        """
        with self._holding():
            return self._current()

    def _current(self) -> State:
        state = self._reached()
        if state is not None:
            return state
        if self._is_ahead() and (self._fresh or self._moving):
            self._settle()
        return self._stage.state()

    def _is_ahead(self) -> bool:
        """Whether the stages stand elsewhere than after the element delivered last."""
        return self._moving or bool(self._waiting) or self._at < len(self._block.elements)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the element that was returned last when `state` was taken.

        It may be called at any time, also at the end. Where it raises, the iterator stays where it
        was.

        Args:
            state: From `get_state` of an iterator over the same pipeline, in any process; it is not
                changed.

        Raises:
            ValueError: `state` was taken from a pipeline with other stages.
            IndexError: `state` lies outside the data.
        """
        try:
            self._move(lambda: self._stage.restore(copied(state)))
        except (KeyError, TypeError) as mismatch:
            raise ValueError(
                f"state does not fit the pipeline that ends in {self}: {mismatch!r} on {state!r}"
            ) from mismatch

    def _move(self, move: Callable[[], None]) -> None:
        """Changes the place of the stages; where that is refused, they stay where they were."""
        with self._holding():
            if self._place is None and self._is_ahead():
                self._settle()
            self._leave()
            self._moving = True
            try:
                move()
            except Exception:
                with contextlib.suppress(Exception):
                    self._settle()
                raise
            self._fresh = False
            self._forget()

    def _forget(self) -> None:
        nothing: list[T_co] = []
        none = Block([], _no_state)
        self._waiting, self._place, self._before = nothing, None, None
        self._block, self._at, self._moving = none, 0, False

    def _settle(self) -> None:
        """Takes the stages to the element that comes next."""
        self._moving = True
        state = self._reached()
        if state is not None:
            self._stage.restore(state)
            self._fresh = False
        elif self._fresh and self._node is not None:
            with contextlib.suppress(Exception):
                self._stage.close()
            self._stage = open_stage(self._node)
            if self._closed:  # by who knew only the stages before
                raise closed_error(self._closed_message())
        self._forget()

    def _get_next_index(self) -> int:
        with self._holding():
            if self._is_ahead():
                self._settle()
            return self._stage.next_index()

    def _set_next_index(self, index: int) -> None:
        self._move(lambda: self._stage.seek(index))

    def start_prefetch(self) -> None:
        """Starts to compute elements before the first is asked for, where the pipeline does so.

        Raises:
            ValueError: The iterator is closed.
        """
        with self._holding():
            if self._closed:
                raise closed_error(self._closed_message())
            self._stage.start_prefetch()

    def _cancel_waiting(self) -> None:
        """See `DatasetIterator._cancel_waiting`."""
        self._closed = True
        self._stage.cancel()

    def close(self) -> None:
        """Releases threads, worker processes and memory; safe to call again.

        A thread that waits for an element meanwhile, or for its turn, gets a `ValueError`; one that
        runs a user's function itself does so when that returns. This waits for neither.
        """
        if self.__dict__.get("_stages_closed", True):
            return
        self._closed = True
        if not self._close_stages():
            self._stage.cancel()
            self._close_stages()  # the lock may be free by now

    def _close_stages(self) -> bool:
        """Closes the stages unless another thread moves them, which does so then."""
        lock = self._free_lock()
        if lock is None:
            return False
        try:
            if not self._stages_closed:
                self._stages_closed = True
                place = self._place_reached()
                self._forget()
                self._place = place  # the state is that of the element delivered last, as before
                self._stage.close()
        finally:
            lock.release()
        return True


class ThreadPrefetchDatasetIterator(PlannedIterator[T_co]):
    """Computes the elements of any iterator ahead of use, on one thread.

    Args:
        parent: Any object with `__next__`; with `get_state` and `set_state` it can be saved.
        prefetch_buffer_size: The most elements computed ahead; 0 computes each when it is asked
            for.

    Raises:
        ValueError: `prefetch_buffer_size` is negative.

    Example:
        >>> batches = (np.full(2, number) for number in range(3))
        >>> prefetched = grain.experimental.ThreadPrefetchDatasetIterator(batches, 2)
        >>> [batch.tolist() for batch in prefetched]
        [[0, 0], [1, 1], [2, 2]]
    """

    def __init__(self, parent: Iterator[T_co], prefetch_buffer_size: int) -> None:
        stage = ThreadPrefetchStage.around(parent, prefetch_buffer_size)
        name = f"ThreadPrefetchDatasetIterator(prefetch_buffer_size={prefetch_buffer_size})"
        super().__init__(None, stage, name)


def _no_state(_: int) -> State:
    raise AssertionError("no element was pulled")


def get_next_index(ds_iter: DatasetIterator[Any]) -> int:
    """Returns the index of the element that `next(ds_iter)` will return.

    Args:
        ds_iter: An iterator whose elements have an index: over reads of a `MapDataset`, maps,
            batches, limits, prefetching, or workers of which there is one.

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
        index: From 0 to the number of elements, which is the end.

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
