"""What nodes have in common that workers run, each a share of the plan upstream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._iterators.base.node import UNKNOWN, Length, Origin, SequentialNode, origins
from grainmill._iterators.interleave import in_turn
from grainmill._plan.slicing import sliced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grainmill._iterators.base.stage import State
    from grainmill._plan.node import Node


class WorkersNode(SequentialNode):
    """Elements of workers in turn, each of which runs its share of the plan upstream."""

    keeps_spec: ClassVar[bool] = True
    passes_seeds: ClassVar[bool] = False
    keeps_length: ClassVar[bool] = False
    prefetches: ClassVar[bool] = True
    has_shares: ClassVar[bool] = True
    completes_last: ClassVar[bool] = True  # each worker has a last one, after which others go on

    num_workers: Any
    buffer_size: Any
    sequential_slice: bool
    options: Any
    worker_init_fn: Any

    @property
    def num_readers(self) -> int:
        """See `SequentialNode.num_readers`."""
        return 1

    def num_elements(self, parents: Sequence[Length]) -> Length:
        """See `SequentialNode.num_elements`.

        Each worker's share goes through the stages by itself, so most change the number.
        """
        upstream = [node for node in self.parent.walk() if isinstance(node, SequentialNode)]
        if self.num_workers == 1 or all(node.keeps_length for node in upstream):
            return parents[0]
        return UNKNOWN

    def starts(self, state: State) -> list[Origin]:
        """See `SequentialNode.starts`."""
        return []

    def origins(self, before: State, after: State) -> list[Origin]:
        """See `SequentialNode.origins`."""
        number, *states = in_turn(before, after)
        return origins(self.shard(number), *states)

    def shard(self, number: int) -> Node:
        """The share of worker `number`."""
        return sliced(self.parent, number, self.num_workers, sequential=self.sequential_slice)
