"""How datasets and loaders show themselves, in a terminal and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

from grainmill._plan.deep_pickling import each_once, in_pieces
from grainmill._plan.node import Node, depth_of

if TYPE_CHECKING:
    from grainmill._dataset.views.description import Description


def _parents_of(dataset: Any) -> tuple[Any, ...]:
    parents = vars(dataset).get("_parents", ())
    return tuple(parent for parent in parents if isinstance(parent, Shown))


def _depth_of(dataset: Any) -> int:
    """About how many datasets there are above one."""
    if _has_node(dataset):
        return depth_of(vars(dataset)["_node"])
    depths: dict[int, int] = {}
    for step in each_once(dataset, _parents_of, _has_node):
        if _has_node(step):
            depths[id(step)] = depth_of(vars(step)["_node"])
        else:
            above = [depths[id(parent)] for parent in _parents_of(step)]
            depths[id(step)] = 1 + max(above, default=-1)
    return depths[id(dataset)]


def _has_node(dataset: Any) -> bool:
    return isinstance(vars(dataset).get("_node"), Node)


class Shown:
    """What shows the stages of a pipeline.

    What draws them is imported when it is asked for.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return in_pieces(self, super().__reduce_ex__(protocol), _parents_of, _depth_of)

    def _shown_plan(self) -> tuple[Node, str]:
        """The plan's last node, and what the pipeline is called."""
        raise NotImplementedError

    def describe(self, *, read_elements: bool = False) -> Description:
        """Returns what is known of each stage, as text; in a notebook it is drawn.

        That is: how many elements it has; whether any of them can be computed by its index (random
        access) or only in order; whether Rust or Python computes them, and on which threads or
        worker processes; their structure, shapes and dtypes; and what a saved state holds. Of parts
        with the same stages, one is shown.

        Args:
            read_elements: Whether to compute one element of each stage whose element spec does not
                follow from the plan. This calls users' functions, on the calling thread.

        Returns:
            An object whose `str` is the text.

        Example:
            >>> ds = grain.MapDataset.source(["a", "bc"]).map(len).to_iter_dataset().batch(2)
            >>> text = str(ds.describe(read_elements=True))
            >>> "2 elements, random access; computed in Python, on up to 16 threads" in text
            True
        """
        from grainmill._dataset.views.description import described  # noqa: PLC0415

        node, kind = self._shown_plan()
        return described(node, kind, read_elements=read_elements)

    def _repr_html_(self) -> str:
        """The stages as boxes; notebooks call this."""
        from grainmill._dataset.views.description import drawn  # noqa: PLC0415

        return drawn(*self._shown_plan())

    def _stages_shown(self) -> str:
        """The stages as text, a line each."""
        from grainmill._dataset.views.description import shown  # noqa: PLC0415

        return shown(*self._shown_plan())
