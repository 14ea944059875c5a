"""A user's own `DatasetIterator` as a stage."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from grainmill._evaluate.prefetch import tuning
from grainmill._interrupts import next_of, raise_interrupt, suppressed
from grainmill._iterators.base.cursor import END
from grainmill._iterators.base.node import Origin, SequentialNode
from grainmill._iterators.base.position import copy_state, end_at
from grainmill._iterators.base.stage import Block, Stage, State
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.node import Share, defines
from grainmill._plan.notes import add_note, located
from grainmill._stats.opened_iterators import OpenedIterators
from grainmill._stats.users_iterators import parents_of
from grainmill._threads import not_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from grainmill._evaluate.context import Context
    from grainmill._plan.node import Node


@lazy_dataclass
class UserDefined(SequentialNode):
    """A user's own `IterDataset` subclass, with or without parents.

    `with_parents` returns a copy of it over other plans.
    """

    dataset: Any
    with_parents: Callable[[Any, Sequence[Node]], Any]
    runs_users_code: ClassVar[bool] = True
    saves: ClassVar[str] = "what `get_state` returns"
    keeps_length: ClassVar[bool] = False

    def share(self, share: Share) -> Node:
        """See `Node.share`; a dataset with the method `set_slice` slices a copy of itself."""
        if hasattr(self.dataset, "set_slice"):
            node: Node = share.of_users_dataset(self.dataset)._plan_node()  # noqa: SLF001 - opaque
            return node
        return super().share(share)

    def over(self, parents: tuple[Any, ...]) -> Self:
        """See `Node.over`."""
        dataset = self.with_parents(self.dataset, parents)
        return dataclasses.replace(self, parents=parents, dataset=dataset)

    def _source_type(self) -> type:
        return type(self.dataset)

    def __str__(self) -> str:
        return type(self.dataset).__name__

    def open(self, context: Context) -> Stage:
        """See `SequentialNode.open`."""
        # What one without parents opens is its own affair: no stage here stands for that.
        opened = OpenedIterators() if self.parents else None
        iterator = opened.during(iter, self.dataset) if opened else iter(self.dataset)
        stage = UserDefinedStage(iterator, self, opened)
        context.recorder.watch_user(stage)
        return stage

    @property
    def users_dataset(self) -> Any:
        """See `Node.users_dataset`."""
        return self.dataset

    @property
    def is_native(self) -> bool:  # type: ignore[override]
        """See `SequentialNode`."""
        return defines(type(self.dataset), "_is_native", "__iter__")

    def starts(self, state: State) -> list[Origin]:
        """See `SequentialNode.starts`."""
        return []

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`."""
        return []


class UserDefinedStage(Stage):
    """Pulls elements one by one from `iterator`, which keeps its own state.

    Such a state can be read now but not later, and reading it may be costly. So it is read only if
    the block that it belongs to is still referenced when the iterator is about to move.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        node: Node | None = None,
        opened: OpenedIterators | None = None,
    ) -> None:
        super().__init__()
        self._iterator = iterator
        self._node = node
        self.opened = opened or OpenedIterators()
        self._next = functools.partial(next_of, iterator, END)
        if opened is not None and not parents_of(self):
            self._next = functools.partial(opened.during, next_of, iterator, END)
        self._closed = False
        self._last: weakref.ref[_ElementState] | None = None
        # An iterator of this package may return several elements at once, unless a user derives
        # another class from its own.
        has_blocks = "_next_block" in type(iterator).__dict__ and not _is_users(node)
        self._next_block = iterator._next_block if has_blocks else None  # type: ignore[attr-defined] # noqa: SLF001
        self.pull_size = tuning.MAX_REQUESTED if has_blocks else 1

    @property
    def iterator(self) -> Iterator[Any]:
        """The user's iterator."""
        return self._iterator

    def pull(self, limit: int) -> Block:
        """See `Stage.pull`; returns single elements, unless the iterator has blocks."""
        if self._next_block is not None:
            return Block(*self._next_block(limit))
        if self._last is None:  # a caller may resume from the start or a restored position
            before: State | Exception | None = _ElementState(self._iterator, None).read()
        else:
            last = self._last()
            before = None if last is None else last.read()
        self._last = None
        try:
            element = self._next()
        except Exception as failure:
            raise_interrupt(failure)
            if self._node is not None and _is_users(self._node):
                add_note(failure, [f"while computing an element of {located(self._node)}"])
            raise
        state_after = _ElementState(self._iterator, before)
        self._last = weakref.ref(state_after)
        if element is END:
            return end_at((state_after, 1))
        return Block([element], state_after)

    def state(self) -> State:
        """See `Stage.state`."""
        return _ElementState(self._iterator, None)(1)

    def restore(self, state: State) -> None:
        """See `Stage.restore`."""
        self._save_last_state()
        self._iterator.set_state(copy_state(state))  # type: ignore[attr-defined]

    def _save_last_state(self) -> None:
        """Reads the current state if it may still be requested."""
        last = self._last() if self._last is not None else None
        if last is not None:
            last.read()
        self._last = None

    @property
    def iterator_name(self) -> str:
        """See `Stage.iterator_name`."""
        return type(self._iterator).__name__

    def next_index(self) -> int:
        """See `Stage.next_index`; supported if `iterator` is one of this package."""
        known = getattr(self._iterator, "_get_next_index", super().next_index)
        index: int = known()
        return index

    def seek(self, index: int) -> None:
        """See `Stage.seek`; as `next_index`."""
        seek = getattr(self._iterator, "_set_next_index", super().seek)
        self._save_last_state()
        seek(index)

    def start_prefetch(self) -> None:
        """See `Stage.start_prefetch`."""
        start = getattr(self._iterator, "start_prefetch", None)
        if start is not None:
            start()

    def cancel(self) -> None:
        """See `Stage.cancel`; a user's iterator without such a method is closed."""
        cancel = getattr(self._iterator, "_cancel_waiting", self.close)
        with suppressed(), not_waiting():  # it may be closed later
            cancel()

    def close(self) -> None:
        """See `Stage.close`."""
        close = getattr(self._iterator, "_release", getattr(self._iterator, "close", None))
        if close is not None and not self._closed:
            close()
            self._closed = True


def _is_users(node: Node | None) -> bool:
    package, _, _ = __name__.partition(".")
    return not type(getattr(node, "dataset", None)).__module__.startswith(f"{package}.")


class _ElementState:
    """The `state_after` of a block with one element of a user's iterator.

    The state is read when it is requested, at the latest before the iterator moves.
    """

    __slots__ = ("__weakref__", "_before", "_iterator", "_state")

    def __init__(self, iterator: Iterator[Any], before: State | Exception | None) -> None:
        self._iterator = iterator
        self._before = before
        self._state: State | Exception | None = None

    def read(self) -> State | Exception:
        """Reads the state now; a failure is stored and raised when the state is requested.

        Two threads may do so at the same time, of which one moves the iterator when it has stored
        the state; what the other one then reads is of no use.
        """
        if self._state is None:
            state: State | Exception
            try:
                state = copy_state(self._iterator.get_state())  # type: ignore[attr-defined]
            except Exception as failure:
                raise_interrupt(failure)
                state = failure
            if self._state is None:
                self._state = state
        return self._state

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as the states before and after the element."""
        states = _picklable(self._before), _picklable(self.read())
        return functools.partial, (_state_of, type(self._iterator).__name__, *states)

    def __call__(self, count: int) -> State:
        state = self.read() if count else self._before
        if state is None or isinstance(state, Exception):
            raise NotImplementedError(
                f"the state of {type(self._iterator).__name__} cannot be saved"
            ) from state
        copy: State = copy_state(state)
        return copy


# A state, or `None` and why it is unavailable.
_PickledState: TypeAlias = "tuple[State | None, str]"


def _picklable(state: State | Exception | None) -> _PickledState:
    if isinstance(state, Exception):
        return None, f" ({type(state).__name__}: {state})"
    return state, ""


def _state_of(name: str, before: _PickledState, after: _PickledState, count: int) -> State:
    """Replaces an unpickled `_ElementState`."""
    state, reason = after if count else before
    if state is None:
        raise NotImplementedError(f"the state of {name} cannot be saved{reason}")
    copy: State = copy_state(state)
    return copy
