"""Settings for other stages, which do nothing when run."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from grainmill._iterators.base.node import OneToOne
from grainmill._iterators.read import Read
from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.options import DatasetOptions
from grainmill._plan.seeds import checked_seed

if TYPE_CHECKING:
    from grainmill._plan.node import Node


class Setting(OneToOne):
    """A step that does nothing when run."""

    saves = ""
    is_native = True  # it costs nothing
    is_setting = True
    passes_on = True
    keeps_spec = True


@lazy_dataclass
class Seed(Setting):
    """Sets the seed that random stages downstream derive theirs from."""

    own_seed: int | None = None
    dataset_name: ClassVar[str] = "WithOptionsIterDataset"

    @classmethod
    def of(cls, parent: Node, seed: int | None) -> Self:
        """A node that sets `seed`, any non-negative integer; with `None`, it sets none."""
        return cls((parent,), None if seed is None else checked_seed(seed))


@lazy_dataclass
class WithOptions(Setting):
    """Options for the whole pipeline."""

    options: DatasetOptions
    dataset_name: ClassVar[str] = "WithOptionsIterDataset"

    def _arguments(self) -> str:
        return f"(options={self.options})"


def options_of(node: Node) -> DatasetOptions:
    """The options of a whole plan; the one nearest to the consumer overrides the others."""
    options = DatasetOptions()
    for upstream in node.walk(until=Read):
        if isinstance(upstream, WithOptions):
            options = options.merge(upstream.options)
    return options
