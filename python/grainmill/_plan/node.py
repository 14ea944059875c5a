"""What every node of a plan has in common."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._plan import transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Node:
    """One step of a plan.

    Attributes:
        parents: The steps it takes elements from.
        dataset_name: What it is called in texts.
        passes_seeds: Whether random steps below it may draw from seeds above it.
    """

    parents: tuple[Node, ...]

    dataset_name: ClassVar[str] = ""
    passes_seeds: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.dataset_name}{self._arguments()}"

    def _arguments(self) -> str:
        return ""

    @property
    def own_seed(self) -> int | None:
        """The seed it gives to random stages below it, if any."""
        return None

    @property
    def parent(self) -> Node:
        """The only parent."""
        (parent,) = self.parents
        return parent

    def walk_up(self) -> Iterator[Node]:
        """Yields all nodes above this one and then itself, each after its parents."""
        for parent in self.parents:
            yield from parent.walk_up()
        yield self

    def walk(self) -> Iterator[Node]:
        """Yields this node and all above it, each once."""
        seen = {id(self)}
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            for parent in node.parents:
                if id(parent) not in seen:
                    seen.add(id(parent))
                    waiting.append(parent)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MapNode(Node):
    """A step whose element `i` is a function of `i`.

    Attributes:
        length: Elements in one epoch.
    """

    length: int


def function_of(transform: Any, kind: type, method: str) -> Callable[..., Any]:
    """The callable behind `transform`: a method of a transform class, or itself."""
    if isinstance(transform, kind):
        return getattr(transform, method)  # type: ignore[no-any-return]
    if not callable(transform):
        raise TypeError(f"expected a callable or a {kind.__name__}, got {transform!r}")
    return transform  # type: ignore[no-any-return]


def transform_name(transform: Any) -> str:
    """How a transform is called in messages: its name and the place it is written at."""
    if isinstance(transform, _TRANSFORM_CLASSES):
        return type(transform).__name__
    function = inspect.unwrap(transform)
    name = getattr(function, "__name__", None) or type(transform).__name__
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    path = pathlib.PurePath(code.co_filename)
    where = pathlib.PurePath("...", *path.parts[-_SHOWN_PARTS:]) if path.is_absolute() else path
    return f"{name} @ {where}:{code.co_firstlineno}"


_SHOWN_PARTS = 3
_TRANSFORM_CLASSES = (
    transforms.Map,
    transforms.RandomMap,
    transforms.MapWithIndex,
    transforms.Filter,
    transforms.FlatMap,
)
