"""`grainmill.experimental` under its older place."""

from grainmill import experimental as _experimental

__all__ = _experimental.__all__


def __getattr__(name: str) -> object:
    return getattr(_experimental, name)
