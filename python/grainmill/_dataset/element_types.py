"""Type variables and protocols for elements in the signatures of datasets and stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
S = TypeVar("S")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
K = TypeVar("K")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")

# For classes that can be used without `[...]` in strict mode. At run time, type variables have
# defaults only from Python 3.13 on.
if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import TypeVar as TypeVarWithDefault

    Element = TypeVarWithDefault("Element", default=Any)
    In = TypeVarWithDefault("In", default=Any)
    Out = TypeVarWithDefault("Out", default=Any)
    Loaded_co = TypeVarWithDefault("Loaded_co", covariant=True, default=Any)
else:
    Element = TypeVar("Element")
    In = TypeVar("In")
    Out = TypeVar("Out")
    Loaded_co = TypeVar("Loaded_co", covariant=True)

# Leaves that stacking turns into arrays. Type checkers match `Any` within an element with `Never`,
# so overloads for `Never` match elements whose structure is unknown.
Leaf: TypeAlias = complex | str | bytes | np.generic | NDArray[Any]
D = TypeVar("D", bound=np.generic)
D2 = TypeVar("D2", bound=np.generic)


class AnyDataset(Protocol[T_co]):
    """What stages take: an `IterDataset`, or a `MapDataset`, read as by `to_iter_dataset()`."""

    def __iter__(self) -> Iterator[T_co]:
        """Reads the elements in order."""

    def _plan_node(self) -> Any:
        """The plan."""


class Indexed(Protocol[T_co]):
    """Anything with indexing by position."""

    def __getitem__(self, index: int, /) -> T_co:
        """The element at a position."""


class SourceLike(Indexed[T_co], Protocol[T_co]):
    """Anything with `len` and indexing by position."""

    def __len__(self) -> int:
        """The number of elements."""
