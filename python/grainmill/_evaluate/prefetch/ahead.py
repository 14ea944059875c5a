"""Tasks that run ahead of the consumer, in the order of their elements."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Started(Protocol):
    """A task that was started, wherever it runs."""

    @property
    def count(self) -> int:
        """Its number of elements."""

    @property
    def is_done(self) -> bool:
        """Whether nothing needs to be waited for."""


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

    def fits(self, count: int, position: int, bound: int) -> bool:
        """Whether a task of `count` elements may start: the first one, and up to `bound` elements.

        Those are counted from `position` on, the consumer's.
        """
        return count > 0 and (not self.tasks or self.until + count - position <= bound)

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
