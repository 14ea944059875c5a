"""The same plan with other options for its readers, for runs that only look at elements."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from grainmill._plan import sequential
from grainmill._plan.node import MapNode, Node

if TYPE_CHECKING:
    from grainmill._plan.options import ReadOptions


def with_read_options(node: Node, options: ReadOptions, *, in_caller: bool = False) -> Node:
    """The plan that ends in `node`, all of whose readers have `options`.

    Args:
        node: A sequential plan.
        options: The options.
        in_caller: Whether to leave out the stages that start threads or processes.
    """
    replaced = _Replaced(options, in_caller=in_caller)
    pending = [(node, False)]
    while pending:  # parents first, as there may be thousands in a row
        step, parents_done = pending.pop()
        if parents_done:
            replaced.of(step)
        elif not isinstance(step, MapNode):
            pending.append((step, True))
            pending += [(parent, False) for parent in step.parents]
    return replaced.of(node)


class _Replaced:
    """The nodes of the new plan; a `Share` of one worker, which gets all."""

    worker, count, inline_size = 0, 1, None

    def __init__(self, options: ReadOptions, *, in_caller: bool) -> None:
        self._options = options
        left_out: Any = (sequential.MultiprocessPrefetch, sequential.MultithreadPrefetch)
        self._left_out = (*left_out, sequential.ThreadPrefetch) if in_caller else ()
        self._replaced: dict[int, Node] = {}

    def of(self, node: Node) -> Node:
        """See `Share.of`."""
        if id(node) not in self._replaced:
            if isinstance(node, sequential.Read):
                replaced: Node = dataclasses.replace(node, options=self._options)
            elif isinstance(node, self._left_out):
                replaced = self.of(node.parent)
            else:
                replaced = node.share(self) if node.parents else node  # type: ignore[arg-type]
            self._replaced[id(node)] = replaced
        return self._replaced[id(node)]

    def of_users_dataset(self, dataset: Any) -> Any:
        """See `Share.of_users_dataset`; one worker has all of it, with its own readers."""
        return dataset
