"""`grainmill.experimental` under its older name."""

from typing import TYPE_CHECKING

from grainmill import experimental as _experimental

if TYPE_CHECKING:  # at run time a star import would import JAX
    from grainmill._stages import *  # noqa: F403 - mypy does not follow two star imports in a row
    from grainmill.experimental import *  # noqa: F403
else:
    __all__ = _experimental.__all__

    def __getattr__(name: str) -> object:
        return getattr(_experimental, name)

    def __dir__() -> list[str]:
        return sorted(__all__)
