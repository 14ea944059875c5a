"""What iterators of users call without a stage between them: its nodes, and its times."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from grainmill._interrupts import suppressed
from grainmill._stats import timeline
from grainmill._stats.meters import both_clocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from grainmill._plan.node import Node
    from grainmill._stats.meters import OpensIterator, StageMeter


def parents_of(stage: OpensIterator) -> tuple[Any, ...]:
    """The iterators that the one of `stage` takes elements from, as far as is known."""
    return _parents(stage.iterator) or stage.opened.living()


def users_behind(stage: OpensIterator) -> list[tuple[Node, Any]]:
    """The iterators of users' datasets that the one of `stage` takes elements from.

    An iterator of this package has a recorder for all that is behind it.

    Returns:
        Nodes with their iterators, the nearest first. Empty if these are not one for one: an
        `__iter__` of a user may return an iterator over others of its own.
    """
    return [] if stage.node is None else _behind(stage.node, parents_of(stage)) or []


def _behind(node: Node, parents: tuple[Any, ...]) -> list[tuple[Node, Any]] | None:
    if len(parents) != len(node.parents):
        return None
    found: list[tuple[Node, Any]] = []
    for node_of_parent, parent in zip(node.parents, parents, strict=True):
        if _is_ours(parent):
            continue
        behind = _behind(node_of_parent, _parents(parent))
        if behind is None or node_of_parent.users_dataset is None:
            return None
        found += [(node_of_parent, parent), *behind]
    return found


def called_by(stage: OpensIterator) -> list[tuple[Node | None, Any]]:
    """The iterators whose time is not that of the one of `stage`, which calls them.

    Returns:
        Those of `users_behind`, and those of this package, which have no node here.
    """
    nodes = {id(user): node for node, user in users_behind(stage)}
    found: list[tuple[Node | None, Any]] = []
    pending = [*parents_of(stage)]
    while pending:
        parent = pending.pop()
        if _is_ours(parent):
            found.append((None, parent))
            continue
        if id(parent) in nodes:
            found.append((nodes[id(parent)], parent))
        pending += _parents(parent)
    return found


def _parents(iterator: Any) -> tuple[Any, ...]:
    parents: tuple[Any, ...] = getattr(iterator, "__dict__", {}).get("_parents", ())
    return parents


def _is_ours(iterator: Any) -> bool:
    return hasattr(iterator, "_recorder")


class TimedCall:
    """A call that is timed.

    Attributes:
        meter: Takes its times, if any does.
        nested: The times of the timed calls within it.
    """

    __slots__ = ("meter", "nested")

    def __init__(self, meter: StageMeter | None) -> None:
        self.meter = meter
        self.nested = 0j


class TimedIterators:
    """Times calls of iterators by the thread that started this, within other timed calls.

    While it is timed, an iterator is of a class derived from its own: who calls `next` with it asks
    its class.

    Args:
        calls: The timed calls that have not returned, the innermost one last.
        add: A method of who owns this, which it does not keep alive. Called with the meter of an
            iterator, the elements that a call of it returned, and the times of that without those
            within: a difference of `both_clocks`.
    """

    def __init__(
        self, calls: list[TimedCall], add: Callable[[StageMeter, list[Any], complex], None]
    ) -> None:
        self._calls = calls
        self._add = weakref.WeakMethod(add)
        self._timed: dict[int, tuple[Any, StageMeter | None]] = {}  # by the `id` of the iterator
        self._kinds: dict[type, type] = {}
        self._thread = 0
        self._num_calls = 0

    def start(self, iterator: Any, meter: StageMeter | None) -> None:
        """Times calls of `iterator` from now on, unless its class cannot be derived from."""
        self._thread = threading.get_ident()
        if id(iterator) in self._timed:
            return
        self._timed[id(iterator)] = iterator, meter
        self._derive(iterator)

    def _derive(self, iterator: Any) -> None:
        """Makes it of the derived class, unless it is, or none can be derived from its own."""
        kind = type(iterator)
        if _timed_class(kind) is not None:
            return
        with suppressed():
            if kind not in self._kinds:
                self._kinds[kind] = self._derived(kind)
            object.__setattr__(iterator, "__class__", self._kinds[kind])

    def stop(self) -> None:
        """Makes calls cost nothing again."""
        for iterator, _ in self._timed.values():
            own = _timed_class(type(iterator))
            if own is not None:
                object.__setattr__(iterator, "__class__", own)
        self._timed.clear()

    def take_calls(self) -> int:
        """How many calls were timed since this was asked."""
        num_calls, self._num_calls = self._num_calls, 0
        return num_calls

    def _derived(self, kind: type) -> type:
        """A class derived from `kind`, whose calls are timed."""

        def timed_next(iterator: Any) -> Any:
            return self._next(iterator, kind.__next__)  # type: ignore[attr-defined]

        attributes = {
            "__slots__": (),
            "__next__": timed_next,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "_timed_class": kind,
        }
        return type(kind)(kind.__name__, (kind,), attributes)

    def _next(self, iterator: Any, advance: Callable[[Any], Any]) -> Any:
        """The next element of `iterator`, by `advance`."""
        if not self._calls or threading.get_ident() != self._thread:
            return advance(iterator)
        caller = self._calls[-1]
        if caller.meter is not None:
            caller.meter.is_own = True
        _, meter = self._timed.get(id(iterator), (None, None))
        call = TimedCall(meter)
        elements: list[Any] = []
        self._calls.append(call)
        started = both_clocks()
        try:
            elements.append(advance(iterator))
            return elements[0]
        finally:
            ended = both_clocks()
            elapsed = ended - started
            if meter is not None and (taken := timeline.current) is not None:
                taken.add(taken.label(meter.node()), "stage", started.real, ended.real)
            self._calls.pop()
            caller.nested += elapsed
            self._num_calls += 1
            self._derive(iterator)  # its first call may have changed its class
            add = self._add()
            if meter is not None and add is not None:
                add(meter, elements, elapsed - call.nested)


def _timed_class(kind: type) -> type | None:
    """The class that `kind` was derived from, if it is one that times calls."""
    own: type | None = kind.__dict__.get("_timed_class")
    return own
