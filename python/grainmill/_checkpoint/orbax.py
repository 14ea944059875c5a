"""Arguments for Orbax; importing this module imports Orbax."""

from __future__ import annotations

import dataclasses
from typing import Any

import orbax.checkpoint as ocp

from grainmill._checkpoint.items import check_has_state


@dataclasses.dataclass
class CheckpointSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What `CheckpointManager.save` of Orbax takes to save the state of an iterator.

    It exists where Orbax is installed, and accessing it imports Orbax.

    Attributes:
        item: The iterator of a dataset or of a `DataLoader`.
    """

    item: Any

    def __post_init__(self) -> None:
        _refuse_dataset(self.item)


@dataclasses.dataclass
class CheckpointRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What `CheckpointManager.restore` of Orbax takes to restore the state of an iterator.

    It exists where Orbax is installed, and accessing it imports Orbax.

    Attributes:
        item: An iterator over the pipeline that saved the state; it is changed and returned.
    """

    item: Any

    def __post_init__(self) -> None:
        _refuse_dataset(self.item)


def _refuse_dataset(item: Any) -> None:
    """A handler of the user may save something else, but no dataset or loader has a state."""
    is_loader = type(item).__module__.startswith("grainmill._loader")
    if hasattr(item, "_plan_node") or is_loader:
        check_has_state(item)


def register(handler: type[Any]) -> None:
    """Registers the handler of these arguments with Orbax."""
    ocp.args.register_with_handler(handler, for_save=True)(CheckpointSave)
    ocp.args.register_with_handler(handler, for_restore=True)(CheckpointRestore)
