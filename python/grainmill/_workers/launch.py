"""Starts the starter, without importing the package's public modules, which workers rarely need.

This file is loaded by its path, before the package, so it imports nothing from it.
"""

import gc
import importlib
import importlib.util
import pathlib
import sys
import threading
from types import ModuleType

_ROOT = pathlib.Path(__file__).parent.parent
_NAME = "grainmill"
_PUBLIC = {"__all__", "__version__", "__version_info__"}
_LOCK = threading.RLock()


class _LazyPackage(ModuleType):
    """The package; its `__init__.py` runs when the first of its names is accessed."""

    def __getattr__(self, name: str) -> object:
        spec = self.__spec__
        # Modules of the package ask for such, whose locks `__init__.py` may wait for.
        is_private = name.startswith("_") and name not in _PUBLIC
        if is_private or spec is None or spec.loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with _LOCK:  # other threads wait until all names are there
            if type(self) is _LazyPackage:
                if spec.loader_state:  # asked for by `__init__.py` itself
                    raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
                spec.loader_state = "running"
                try:
                    spec.loader.exec_module(self)
                finally:
                    spec.loader_state = None
                object.__setattr__(self, "__class__", ModuleType)
        return getattr(self, name)


def lazy_package() -> ModuleType:
    """Lets the package be imported, and returns it."""
    init = _ROOT / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        _NAME, init, submodule_search_locations=[str(_ROOT)]
    )
    if spec is None:
        raise ImportError(f"{init} cannot be loaded")
    package = sys.modules[_NAME] = _LazyPackage(_NAME)
    package.__spec__ = spec
    package.__path__ = [str(_ROOT)]
    package.__file__ = str(init)
    return package


def main(control_file: int, parent: int, *, fork: bool, idle_s: float) -> None:
    """Runs the starter; see `zygote.main`."""
    gc.disable()  # it would look through all modules while they are imported; workers enable it
    lazy_package()
    zygote = importlib.import_module(f"{_NAME}._workers.zygote")
    zygote.main(control_file, parent, fork=fork, idle_s=idle_s)
