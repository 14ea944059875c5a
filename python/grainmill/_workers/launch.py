"""Starts the zygote, without importing the package's public modules, which workers rarely need.

This file is loaded by its path, before the package, so it imports nothing from it.
"""

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType

_ROOT = pathlib.Path(__file__).parent.parent
_NAME = "grainmill"
_PUBLIC = {"__all__", "__version__", "__version_info__"}


class _LazyPackage(ModuleType):
    """The package; its `__init__.py` runs when the first of its names is accessed."""

    def __getattr__(self, name: str) -> object:
        spec = self.__spec__
        is_special = name.startswith("__") and name not in _PUBLIC
        if is_special or type(self) is ModuleType or spec is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        object.__setattr__(self, "__class__", ModuleType)
        if spec.loader is not None:
            spec.loader.exec_module(self)
        return getattr(self, name)


def main(control_file: int, parent: int, modules: Sequence[str], *, fork: bool) -> None:
    """Imports `modules` of the package, then runs the zygote; see `zygote.main`."""
    init = _ROOT / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        _NAME, init, submodule_search_locations=[str(_ROOT)]
    )
    if spec is None:
        raise ImportError(f"{init} cannot be loaded")
    package = _LazyPackage(_NAME)
    package.__spec__ = spec
    package.__path__ = [str(_ROOT)]
    package.__file__ = str(init)
    sys.modules[_NAME] = package
    for module in modules:
        importlib.import_module(module)
    importlib.import_module(f"{_NAME}._workers.zygote").main(control_file, parent, fork=fork)
