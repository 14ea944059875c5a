"""Names of public modules that are imported when they are used."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(module: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A `__getattr__` of `module` for names whose modules take long to import, or need packages.

    Args:
        module: The `__name__` of the public module.
        homes: The module of each name.
    """

    def import_name(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return import_name
