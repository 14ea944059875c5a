"""Classes of the main script, which the processes of a pool send by name, not by value."""

from __future__ import annotations

MAIN = "__main__"
# The name of the main script's module in processes that `multiprocessing` spawns.
MAIN_OF_CHILD = "__mp_main__"

receiver_classes: dict[str, bool] = {}
"""The names of those of the receiver, and whether each is registered as a pytree node."""


def set_receiver_classes(names: dict[str, bool]) -> None:
    """Makes `messages.dumps` send classes of the main script with one of these names by name."""
    receiver_classes.update(names)


def is_receivers_container(kind: type) -> bool:
    """Whether the receiver's main script has registered this class as a pytree node."""
    return is_of_main(kind) and receiver_classes.get(kind.__qualname__, False)


def is_of_main(kind: type) -> bool:
    """Whether a class was defined in the main script."""
    return kind.__module__ in (MAIN, MAIN_OF_CHILD)
