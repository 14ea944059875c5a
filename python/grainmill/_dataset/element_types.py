"""Types of elements that the signatures of datasets and stages are written with."""

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

# Of classes that strict programs may name without `[...]`. Python has defaults from 3.13 on.
if TYPE_CHECKING:
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

# What stacking makes arrays of. The aliases are of use to type checkers only, which take `Any`
# within an element for `Never` as well: overloads that say so catch elements of unknown make-up.
Leaf: TypeAlias = complex | str | bytes | np.generic | NDArray[Any]
D = TypeVar("D", bound=np.generic)
D2 = TypeVar("D2", bound=np.generic)


class Indexed(Protocol[T_co]):
    """Anything with indexing by position."""

    def __getitem__(self, index: int, /) -> T_co:
        """The element at a position."""


class SourceLike(Indexed[T_co], Protocol[T_co]):
    """Anything with `len` and indexing by position."""

    def __len__(self) -> int:
        """How many elements there are."""
