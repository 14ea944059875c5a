"""What the functions of one element, of both kinds of plan, have in common."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Self

from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan import transforms
from grainmill._plan.node import Node, function_of, transform_name
from grainmill._plan.seeds import checked_seed, derived_seed
from grainmill._plan.spec import map_spec

if TYPE_CHECKING:
    from collections.abc import Callable


@lazy_dataclass
class Applying(Node):
    """A function of each element.

    Attributes:
        transform_kind: The transforms whose method it may be.
    """

    transform: Any
    function: Callable[..., Any]
    transform_kind: ClassVar[type] = transforms.Map
    runs_users_code: ClassVar[bool] = True
    keeps_positions: ClassVar[bool] = True

    @classmethod
    def of(cls, parent: Node, transform: Any) -> Self:
        """A node that calls `transform` for elements of `parent`."""
        return cls.after(parent, transform, function_of(transform, cls.transform_kind))

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return map_spec(self.transform, lambda: spec_of(self.parent))

    def _arguments(self) -> str:
        return f"(transform={transform_name(self.transform)})"


@lazy_dataclass
class Filtering(Applying):
    """A predicate of each element."""

    transform_kind: ClassVar[type] = transforms.Filter

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`."""
        return spec_of(self.parent)


@lazy_dataclass
class RandomApplying(Applying):
    """A function of each element and a generator keyed by `seed`."""

    seed: int
    transform_kind: ClassVar[type] = transforms.RandomMap

    @classmethod
    def of(cls, parent: Node, transform: Any, seed: int | None) -> Self:  # type: ignore[override]
        """A node that maps elements of `parent` with random numbers."""
        node = cls.after(parent, transform, function_of(transform, cls.transform_kind), -1)
        if seed is None:
            seed = derived_seed(node)
        if seed is None:
            raise ValueError(
                "`random_map` requires a seed. Please either provide it with `ds.seed(seed)` "
                "before any random transformations or pass it directly with "
                "`ds.random_map(transform, seed=seed)`."
            )
        return dataclasses.replace(node, seed=checked_seed(seed))
