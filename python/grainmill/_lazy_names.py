"""Names of public modules that are imported when they are used."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    module: str, names_of: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `module` for names whose modules take long to import.

    Args:
        module: The `__name__` of the public module, which has `__all__`.
        names_of: The names that each module has.
    """
    homes = {name: home for home, names in names_of.items() for name in names}

    def import_name(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return import_name, lambda: sorted(sys.modules[module].__all__)
