"""What the batches of both kinds of plan have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from grainmill._lazy_dataclass import lazy_dataclass
from grainmill._plan.arguments import checked_callable, checked_integer
from grainmill._plan.node import Node
from grainmill._plan.spec import in_rows

if TYPE_CHECKING:
    from collections.abc import Callable


@lazy_dataclass
class Batching(Node):
    """Consecutive elements stacked along a new leading axis."""

    batch_size: int
    drop_remainder: bool
    batch_fn: Callable[[list[Any]], Any] | None = None
    stacks: ClassVar[bool] = True
    completes_last: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._set(batch_size=checked_batch_size(self.batch_size))
        checked_callable(self.batch_fn, "batch_fn", "a function of a list of elements")

    @property
    def runs_users_code(self) -> bool:  # type: ignore[override]
        """See `Node`."""
        return self.batch_fn is not None

    def spec(self, spec_of: Callable[[Node], Any]) -> Any:
        """See `Node.spec`.

        Raises:
            ValueError: `batch_fn` has no `output_spec`.
        """
        spec = spec_of(self.parent)
        if self.batch_fn is None:
            return in_rows(self.batch_size if self.drop_remainder else None, spec, 0)
        output_spec = getattr(self.batch_fn, "output_spec", None)
        if output_spec is None:
            raise ValueError(
                f"Cannot infer element spec for batch function {self.batch_fn} because it does "
                "not implement `output_spec` method."
            )
        return output_spec(spec, batch_size=self.batch_size, drop_remainder=self.drop_remainder)

    def _arguments(self) -> str:
        return f"(batch_size={self.batch_size}, drop_remainder={self.drop_remainder})"


def checked_batch_size(batch_size: int) -> int:
    """Returns `batch_size` as an `int`.

    Raises:
        TypeError: The argument is not an integer.
        ValueError: The argument is not positive.
    """
    batch_size = checked_integer(batch_size, "batch_size")
    if batch_size <= 0:
        raise ValueError(f"batch_size must be positive. Got {batch_size}.")
    return batch_size


def num_batches(num_elements: int, batch_size: int, *, drop_remainder: bool) -> int:
    """How many batches `num_elements` form."""
    return num_elements // batch_size if drop_remainder else -(-num_elements // batch_size)
