"""The base classes of plan nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, SupportsIndex, TypeAlias

from grainmill._plan import transforms
from grainmill._plan.arguments import wrong_type
from grainmill._plan.deep_pickling import each_once, in_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Tree: TypeAlias = tuple[Any, ...]
"""How elements are rearranged, for the engine: a name, numbers, and the trees upstream."""

StepKind: TypeAlias = Literal["read", "map", "filter", "indexed", "random"]


class Share(Protocol):
    """Restricts a plan to the share of one worker out of `count`.

    If `inline_size` is given, its stages run in the thread that takes their elements, and at most
    so many are read together.
    """

    worker: int
    count: int
    inline_size: int | None

    def of(self, node: Node) -> Node:
        """The worker's share of a sequential plan."""

    def of_random_access(self, node: Node) -> MapNode:
        """The worker's share of a random-access plan that is read in order."""

    def of_datasets(self, datasets: Any) -> Any:
        """The worker's share of a sequence of datasets."""

    def of_users_dataset(self, dataset: Any) -> Any:
        """A copy of a user's own dataset, restricted to the worker's share by its `set_slice`."""

    def range_of(self, node: MapNode) -> MapNode:
        """The worker's range of consecutive elements of each epoch of `node`."""

    def consecutive(self, node: MapNode) -> MapNode:
        """The plan over the worker's range of consecutive elements of each source."""

    def bounds(self, length: int) -> tuple[int, int]:
        """Start and end (exclusive) of the worker's range of `length` elements."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Node:
    """One step of a plan.

    Attributes:
        parents: The steps whose elements it consumes.
        dataset_name: Its name in messages.
        passes_seeds: Whether random steps downstream of it may derive seeds from those upstream.
        keeps_spec: Whether its elements have the structure, shapes and dtypes of its first
            parent's.
        drops_elements: Whether it may drop elements.
        runs_users_code: Whether it calls functions or objects of the user.
        is_elementwise: Whether elements go through it one by one, on the thread that asks for each.
        reads: Whether it reads a plan with random access in order.
        prefetches: Whether threads or processes of its own may compute its elements ahead.
        has_shares: Whether each of several workers runs its share of the plan upstream.
        stacks: Whether it stacks elements into batches.
        passes_on: Whether it hands on elements and states of its parent as they are.
        is_setting: Whether it only sets something for other stages, and does nothing when run.
        parent_key: The key of the parent's state in a state of it; `None` if that is the parent's.
        restart_key: The key, in a state of it, of how many were delivered of the elements that are
            computed again after a restore; `None` if none are.
        keeps_positions: Whether its states stay valid if other elements follow from the position
            of its parent: they are the parent's and at most a number of elements.
        completes_last: Whether its last element is another one if its parent has more.
        grows_by: The field of which a higher value only adds elements after the last one, if any.
        users_dataset: The user's own dataset that it runs; `None` if it is a stage of the package.
        opens: The sequence of datasets that it opens while it runs; `None` if it opens none.
        opened_plan: The last node of the first of these, if known without computing it.
        added_at: The file and line of the user's code that added it, for messages only; empty
            if the package added it, `None` if unknown.
    """

    parents: tuple[Node, ...]
    added_at: str | None = dataclasses.field(default=None, kw_only=True, repr=False, compare=False)

    dataset_name: ClassVar[str] = ""
    passes_seeds: ClassVar[bool] = True
    keeps_spec: ClassVar[bool] = False
    drops_elements: ClassVar[bool] = False
    runs_users_code: ClassVar[bool] = False
    is_elementwise: ClassVar[bool] = False
    reads: ClassVar[bool] = False
    prefetches: ClassVar[bool] = False
    has_shares: ClassVar[bool] = False
    stacks: ClassVar[bool] = False
    passes_on: ClassVar[bool] = False
    is_setting: ClassVar[bool] = False
    parent_key: ClassVar[str | None] = None
    restart_key: ClassVar[str | None] = None
    keeps_positions: ClassVar[bool] = False
    completes_last: ClassVar[bool] = False
    grows_by: ClassVar[str | None] = None
    users_dataset: ClassVar[Any] = None
    opens: ClassVar[Any] = None
    opened_plan: ClassVar[Any] = None

    @classmethod
    def after(cls, parent: Node, *fields: Any, **named: Any) -> Self:
        """A node with these fields that consumes the elements of `parent`."""
        return cls((parent,), *fields, **named)

    def __str__(self) -> str:
        return f"{self.dataset_name}{self._arguments()}"

    def _arguments(self) -> str:
        return ""

    def set_added_at(self, at: str | None) -> None:
        """Sets `added_at` unless it is known already."""
        if self.added_at is None:
            object.__setattr__(self, "added_at", at)

    def _set(self, **fields: Any) -> None:
        """Replaces fields of this node itself, as checks of what was given do."""
        self.__dict__.update(fields)

    @property
    def own_seed(self) -> int | None:
        """The seed it sets for random stages downstream, if any."""
        return None

    def described(self, max_listed: int) -> dict[str, Any]:
        """What a checkpoint's description of the plan says of it besides its fields.

        Args:
            max_listed: Of fields with more values than this, the description has a digest.
        """
        return {}

    @property
    def parent(self) -> Node:
        """The only parent."""
        (parent,) = self.parents
        return parent

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """The shapes and dtypes of its elements.

        Args:
            spec_of: Returns those of a parent.

        Raises:
            NotImplementedError: They cannot be inferred from the plan.
        """
        if self.keeps_spec:
            return spec_of(self.parents[0])
        raise NotImplementedError(f"the element spec of {self} cannot be inferred from the plan")

    def share(self, share: Share) -> Node:
        """The node that one of several workers runs in place of this sequential one.

        Raises:
            ValueError: It cannot be split among workers.
        """
        if not self.parents:
            raise ValueError(f"Cannot slice `IterDataset` source. {self._source_type()}")
        return self.over(tuple([share.of(parent) for parent in self.parents]))

    def over(self, parents: tuple[Any, ...]) -> Self:
        """The same stage on other parents."""
        return dataclasses.replace(self, parents=parents)

    def _source_type(self) -> type:
        """The type named in the message that this source cannot be split among workers."""
        return type(self)

    def walk_up(self) -> Iterator[Node]:
        """Yields all upstream nodes and then this one, each once and after its parents."""
        yield from each_once(self, _parents_of)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return in_pieces(self, super().__reduce_ex__(protocol), _parents_of, depth_of)

    def walk(self, until: type[Node] | None = None) -> Iterator[Node]:
        """Yields this node and all upstream of it, each once, not going beyond `until` nodes."""
        seen = {id(self)}
        pending: list[Node] = [self]
        while pending:
            node = pending.pop()
            yield node
            if until is not None and isinstance(node, until):
                continue
            for parent in node.parents:
                if id(parent) not in seen:
                    seen.add(id(parent))
                    pending.append(parent)


def _parents_of(node: Node) -> tuple[Node, ...]:
    return node.parents


def depth_of(end: Node) -> int:
    """How many steps there are above a node, on the longest way to a source."""
    if _DEPTH not in end.__dict__:
        for node in each_once(end, _parents_of, lambda node: _DEPTH in node.__dict__):
            above = [parent.__dict__[_DEPTH] for parent in node.parents]
            node.__dict__[_DEPTH] = 1 + max(above, default=-1)
    depth: int = end.__dict__[_DEPTH]
    return depth


_DEPTH = "_depth"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MapNode(Node):
    """A step whose element `i` is a function of `i`.

    Attributes:
        length: Elements in one epoch.
        step_kind: How its function of one element is called; `None` if it has none.
        rearranges: Whether it only rearranges the elements of its one parent, as `tree` says.
        joins: Whether each of its elements is one of a parent's, of several, as `tree` says.
        computed_by: The class that computes its elements, made with it and what computes those of
            its parents; `None` if they follow from the above, or the node is a source.
        slices_itself: Whether it is a user's own dataset that has the method `set_slice`.
        slices_own_epoch: Whether workers split this node's epoch rather than its parents': so where
            its indices refer to whole parents, and would be wrong in a slice of them.
    """

    length: int
    step_kind: ClassVar[StepKind | None] = None
    rearranges: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    computed_by: ClassVar[type[Any] | None] = None
    slices_itself: ClassVar[bool] = False
    slices_own_epoch: ClassVar[bool] = False

    def tree(self, *upstream: Tree) -> Tree:
        """How the engine sees it, if it rearranges or joins.

        Args:
            *upstream: The trees of its parents.
        """
        raise NotImplementedError(f"{self} makes new elements")

    def inputs(self, index: int) -> list[tuple[int, int | range]]:
        """What element `index` is made of, if it makes new elements of its parents'.

        Messages name these. Many that follow on each other are a range.

        Returns:
            Pairs of the number of a parent and an index, or several, in it.
        """
        return []

    @classmethod
    def after(cls, parent: Node, *fields: Any, **named: Any) -> Self:
        """See `Node.after`; as long as `parent`, which must have random access."""
        return cls((parent,), random_access(parent).length, *fields, **named)

    def over(self, parents: tuple[Any, ...]) -> Self:
        """See `Node.over`; with the length of the parents."""
        return dataclasses.replace(self, parents=parents, length=parents[0].length)

    def share(self, share: Share) -> Node:
        """See `Node.share`; it is read in order, as by `to_iter_dataset`."""
        if any(isinstance(node, MapNode) and node.slices_itself for node in self.walk()):
            return share.consecutive(self)
        return share.of_random_access(self)

    def consecutive(self, share: Share) -> MapNode:
        """What one of several workers reads if each source is split into consecutive ranges.

        Raises:
            ValueError: A source cannot be sliced.
        """
        if self.slices_own_epoch:
            return share.range_of(self)
        if not self.parents:
            raise ValueError(f"Cannot slice `MapDataset` source. {self._source_type()}")
        node = self.over(tuple(share.consecutive(random_access(p)) for p in self.parents))
        node.set_added_at(self.added_at)
        return node


def random_access(node: Node) -> MapNode:
    """Returns `node` if it has random access, else raises `TypeError`."""
    if not isinstance(node, MapNode):
        raise TypeError(f"expected a `MapDataset`, got {node}, which has no random access")
    return node


def function_of(transform: Any, kind: type) -> Callable[..., Any]:
    """`transform` as a callable: its method if it is a transform object, else itself."""
    if type(transform) is FunctionType:  # most are, and need not be compared with all classes
        return transform
    if isinstance(transform, kind):
        return getattr(transform, _METHODS[kind])  # type: ignore[no-any-return]
    if isinstance(transform, type):
        check_not_class(transform)
    elif isinstance(transform, _TRANSFORM_CLASSES):
        (other,) = (each for each in _TRANSFORM_CLASSES if isinstance(transform, each))
        raise TypeError(
            f"`transform` must be callable or a `transforms.{kind.__name__}`, got {transform!r}, "
            f"a `transforms.{other.__name__}`: use `ds.{_METHODS.get(other, 'apply')}(transform)`"
        )
    if not callable(transform):
        expected = f"`transform` must be callable or a `transforms.{kind.__name__}`"
        raise wrong_type(expected, transform)
    return transform  # type: ignore[no-any-return]


def check_not_class(transform: type) -> None:
    """Raises `TypeError` for a class in place of a transform, if it cannot be meant.

    Classes such as `str` may be called with an element.
    """
    why = ""
    if issubclass(transform, _TRANSFORM_CLASSES):
        why = "is a class of transforms"
    else:
        with contextlib.suppress(ValueError):  # the class has no signature
            try:
                inspect.signature(transform).bind(None)
            except TypeError:
                why = "is a class that cannot be called with an element"
    if why:
        name = transform.__name__
        raise TypeError(
            f"`transform` must be a function or a transform object, but `{name}` {why}: did you "
            f"mean `{name}(...)`?"
        )


def block_function(transform: Any) -> Callable[..., Any] | None:
    """The function of a whole block that `transform` offers beside that of one element, if any."""
    # Not what objects have that answer to any name.
    if not defines(type(transform), "map_block", "map", "__call__"):
        return None
    block = getattr(transform, "map_block", None)
    return block if callable(block) else None


def defines(kind: type, name: str, *others: str) -> bool:
    """Whether a class has a method `name` that goes with its methods `others`.

    Not if a class that is derived from where `name` is defined replaces one of these.
    """
    for owner in kind.__mro__:
        if name in owner.__dict__:
            return True
        if any(other in owner.__dict__ for other in others):
            return False
    return False


def transform_name(transform: Any) -> str:
    """The name of a transform in messages, with the file and line where it is defined."""
    if isinstance(transform, _TRANSFORM_CLASSES):
        return type(transform).__name__
    function = inspect.unwrap(transform)
    if isinstance(function, functools.partial):
        return f"partial({transform_name(function.func)}, ...)"
    name = getattr(function, "__name__", None) or type(function).__name__
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    where = code.co_filename
    separator = os.sep
    first, *parts = where.split(separator)
    if not first or first.endswith(":"):  # the path is absolute
        where = separator.join(["...", *parts[-_SHOWN_PARTS:]])
    return f"{name} @ {where}:{code.co_firstlineno}"


_SHOWN_PARTS = 3
_METHODS: dict[type, str] = {
    transforms.Map: "map",
    transforms.RandomMap: "random_map",
    transforms.MapWithIndex: "map_with_index",
    transforms.Filter: "filter",
}
_TRANSFORM_CLASSES = (*_METHODS, transforms.FlatMap)
