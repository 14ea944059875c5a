"""What datasets of both kinds have in common."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Self

from grainmill._dataset.views.reprs import Shown

if TYPE_CHECKING:
    from grainmill._dataset.element_types import P, S
    from grainmill._plan.node import Node


class Factories(abc.ABCMeta):
    """A class whose methods are factories of datasets: methods of the class, not of datasets."""

    def __dir__(cls) -> list[str]:
        """Lists them, too, which `type` leaves out: for completion and `help`."""
        kinds = [kind for kind in inspect.getmro(type(cls)) if issubclass(kind, Factories)]
        names = {name for kind in kinds for name in vars(kind) if name[0] != "_"}
        return sorted({*super().__dir__(), *names})


class Dataset(Shown):
    """A dataset with its parents."""

    _shown_kind: ClassVar[str]
    _MUTATES_ELEMENT_SPEC = True

    def __init__(self, parents: Any = ()) -> None:
        if not isinstance(parents, tuple):
            parents = tuple(parents) if isinstance(parents, Sequence) else (parents,)
        self._parents = parents

    @property
    def parents(self) -> tuple[Any, ...]:
        """The datasets that it reads elements from; empty for a source."""
        return tuple(self.__dict__.get("_parents", ()))

    @property
    def _parent(self) -> Any:
        (parent,) = self.parents
        return parent

    def pipe(
        self, func: Callable[Concatenate[Self, P], S], /, *args: P.args, **kwargs: P.kwargs
    ) -> S:
        """Returns `func(self, *args, **kwargs)`, so that functions of datasets can be chained.

        Args:
            func: A function whose first argument is a dataset.
            *args: Its other positional arguments.
            **kwargs: Its keyword arguments.

        Example:
            >>> def first_half(ds):
            ...     return ds[: len(ds) // 2]
            >>> list(grain.MapDataset.range(6).pipe(first_half).map(str))
            ['0', '1', '2']
        """
        return func(self, *args, **kwargs)

    def _plan_node(self) -> Node:
        """The last node of its plan."""
        raise NotImplementedError

    def _shown_plan(self) -> tuple[Node, str]:
        return self._plan_node(), self._shown_kind

    def __str__(self) -> str:
        return str(self._plan_node())
