"""Saving the states of iterators in checkpoints, with Orbax or without."""

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grainmill._checkpoint.handler import CheckpointHandler
    from grainmill._checkpoint.orbax import CheckpointRestore, CheckpointSave
else:

    def __getattr__(name: str) -> object:
        if name == "CheckpointHandler":  # what it needs takes long to import
            from grainmill._checkpoint.handler import CheckpointHandler  # noqa: PLC0415

            return CheckpointHandler
        if name in {"CheckpointRestore", "CheckpointSave"}:
            if name not in __all__:
                raise AttributeError(f"`{name}` needs Orbax: `pip install orbax-checkpoint`")
            from grainmill._checkpoint.handler import arguments_of_orbax  # noqa: PLC0415

            return getattr(arguments_of_orbax(), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["CheckpointHandler"]
if importlib.util.find_spec("orbax") is not None:  # Orbax is optional and slow to import
    __all__ += ["CheckpointRestore", "CheckpointSave"]


def __dir__() -> list[str]:
    return sorted(__all__)
