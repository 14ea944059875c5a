"""What every node of a plan has in common."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from grainmill._plan import transforms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Share(Protocol):
    """Which of several workers a plan is cut down for, and how the rest of it is."""

    worker: int
    count: int

    def of(self, node: Node) -> Node:
        """The worker's part of a sequential plan."""

    def of_random_access(self, node: Node) -> MapNode:
        """The worker's part of a plan with random access that is read in order."""

    def of_datasets(self, datasets: Any) -> Any:
        """The worker's part of a sequence of datasets."""

    def run_of(self, node: MapNode) -> MapNode:
        """A run of consecutive elements of each epoch of `node`."""

    def consecutive(self, node: MapNode) -> MapNode:
        """The plan over a run of consecutive elements of each of its sources."""

    def bounds(self, length: int) -> tuple[int, int]:
        """Where the worker's run of so many elements begins and ends."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Node:
    """One step of a plan.

    Attributes:
        parents: The steps it takes elements from.
        dataset_name: What it is called in texts.
        passes_seeds: Whether random steps downstream of it may draw from seeds upstream.
        keeps_spec: Whether its elements look like those of its first parent.
        drops_elements: Whether some elements of its parent may have none here.
        added_at: The file and line of the user's code that added it, for messages alone; empty
            where the package did so by itself, `None` where that is not known.
    """

    parents: tuple[Node, ...]
    added_at: str | None = dataclasses.field(default=None, kw_only=True, repr=False, compare=False)

    dataset_name: ClassVar[str] = ""
    passes_seeds: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = False
    drops_elements: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{self.dataset_name}{self._arguments()}"

    def _arguments(self) -> str:
        return ""

    def note_added(self, at: str | None) -> None:
        """Has `added_at` be `at`, if it is not known yet."""
        if self.added_at is None:
            object.__setattr__(self, "added_at", at)

    @property
    def own_seed(self) -> int | None:
        """The seed it gives to random stages below it, if any."""
        return None

    @property
    def parent(self) -> Node:
        """The only parent."""
        (parent,) = self.parents
        return parent

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """The shapes and dtypes of its elements.

        Args:
            spec_of: Those of a parent.

        Raises:
            NotImplementedError: They cannot be told beforehand.
        """
        if self.keeps_spec:
            return spec_of(self.parents[0])
        raise NotImplementedError(f"the element spec of {self} cannot be told beforehand")

    def share(self, share: Share) -> Node:
        """What one of several workers runs of a sequential stage.

        Raises:
            ValueError: It cannot be shared.
        """
        if not self.parents:
            raise ValueError(f"Cannot slice `IterDataset` source. {self._source_type()}")
        return dataclasses.replace(self, parents=tuple(map(share.of, self.parents)))

    def _source_type(self) -> type:
        """What a node without parents is called where it cannot be shared."""
        return type(self)

    def walk_up(self) -> Iterator[Node]:
        """Yields all nodes above this one and then itself, each after its parents."""
        for parent in self.parents:
            yield from parent.walk_up()
        yield self

    def walk(self, until: type[Node] | None = None) -> Iterator[Node]:
        """Yields this node and all above it, each once; none that only `until` nodes lead to."""
        seen = {id(self)}
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            if until is not None and isinstance(node, until):
                continue
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

    def over(self, parents: tuple[MapNode, ...]) -> Self:
        """The same stage on other parents, its length that of theirs."""
        return dataclasses.replace(self, parents=parents, length=parents[0].length)

    def consecutive(self, share: Share) -> MapNode:
        """What one of several workers reads where each source is cut into consecutive runs.

        Raises:
            ValueError: It cannot be cut.
        """
        if self.is_cut_whole:
            return share.run_of(self)
        if not self.parents:
            raise ValueError(f"Cannot slice `MapDataset` source. {self._source_type()}")
        part = self.over(tuple(share.consecutive(random_access(p)) for p in self.parents))
        part.note_added(self.added_at)
        return part

    @property
    def is_cut_whole(self) -> bool:
        """Whether an epoch of it is to be cut, rather than what it picks its elements from.

        Indices of the whole mean nothing in a piece.
        """
        return False


def random_access(node: Node) -> MapNode:
    """Returns `node` if its elements can be asked for by index, else raises `TypeError`."""
    if not isinstance(node, MapNode):
        raise TypeError(f"{node} has no random access; a `MapDataset` is needed here")
    return node


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
    name = getattr(function, "__name__", None) or type(function).__name__
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
