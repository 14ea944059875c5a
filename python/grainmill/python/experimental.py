"""`grainmill.experimental` under its older place."""

from typing import TYPE_CHECKING

from grainmill import experimental as _experimental

if TYPE_CHECKING:
    from grainmill.experimental import *  # noqa: F403 - at run time a star would import JAX
else:

    def __getattr__(name: str) -> object:
        return getattr(_experimental, name)


__all__: list[str] = []
__all__ += _experimental.__all__
