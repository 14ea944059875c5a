"""Tasks that run ahead of the consumer, in the order of their elements."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Started(Protocol):
    """A task that was started, wherever it runs."""

    @property
    def count(self) -> int:
        """Its number of elements."""

    @property
    def is_done(self) -> bool:
        """Whether nothing needs to be waited for."""


class Planned(NamedTuple):
    """A task that may start next.

    Attributes:
        num_elements: How many elements it computes.
        bound: How many elements may be ahead with it.
        start: Starts it, and calls `Ahead.add`.
    """

    num_elements: int
    bound: int
    start: Callable[[], object]


AnyTask = TypeVar("AnyTask", bound=Started)


class Ahead(Generic[AnyTask]):
    """The tasks that were started and whose results the consumer has not taken.

    How far they may be ahead is said at each start, so limits may change at any time.

    Attributes:
        tasks: The tasks, in order.
        until: The position of the next task: after their elements.
    """

    def __init__(self) -> None:
        self.tasks: deque[AnyTask] = deque()
        self.until = 0

    def start_all(self, planned: Iterable[Planned], position: int) -> None:
        """Starts tasks until there are no more, or too many elements would be ahead of `position`.

        The first task always starts. The next one is asked for once another has been started.
        """
        for count, bound, start in planned:
            if count <= 0 or not self.may_add(count, bound, position):
                return
            start()

    def may_add(self, count: int, bound: int, position: int) -> bool:
        """Whether at most `bound` elements would be ahead of `position` with `count` more."""
        return not self.tasks or self.until + count - position <= bound

    def add(self, task: AnyTask) -> None:
        """Adds a task that was started at `until`."""
        self.tasks.append(task)
        self.until += task.count

    @property
    def num_done(self) -> int:
        """How many of their elements are computed; on any thread."""
        return sum(task.count for task in list(self.tasks) if task.is_done)

    def drop(self, position: int) -> None:
        """Forgets all tasks; the next one starts at `position`."""
        self.tasks.clear()
        self.until = position
