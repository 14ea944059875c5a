"""Makes `import grain` import this package, here and in processes that are started later.

A directory with a package `grain` is put on the path of modules, which `multiprocessing` and worker
processes copy and other Python processes inherit. That package replaces itself with this one when
it is imported; a finder then resolves all names below `grain` to the modules of this package, so
that each module and class exists once.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_GRAIN = "grain"
_PACKAGE, _, _ = __name__.partition(".")
_PATH = __file__.removesuffix("_as_grain.py") + "_grain_path"


def install_as_grain() -> None:
    """Makes `import grain` import grainmill, so that programs and libraries run unchanged.

    All of `grain`, `grain.python`, `grain.experimental` and so on, and the private modules
    `grain._src...` that known programs use, become names of the modules of this package: classes
    are the same objects under both names. This also holds in worker processes and in Python
    processes that this one starts from now on, as it changes `sys.path` and the environment
    variable `PYTHONPATH`; real Grain may be installed or not. Calling it again does nothing.

    `python -m grainmill.as_grain program.py` does it for a program that is not changed at all.

    Raises:
        ImportError: Real Grain was imported before.

    Example:
        The first lines of a program, before anything imports Grain::

            import grainmill

            grainmill.install_as_grain()

            import keras  # which imports `grain` when it is needed
            import grain.python as pygrain  # as before
    """
    package, imported = sys.modules[_PACKAGE], sys.modules.get(_GRAIN)
    if imported is package:
        return
    if imported is not None:
        raise ImportError(
            f"`{_GRAIN}` was already imported from {getattr(imported, '__file__', None)}; call "
            f"`{_PACKAGE}.install_as_grain()` before anything imports it, or run the program by "
            f"`python -m {_PACKAGE}.as_grain`"
        )
    if _PATH not in sys.path:
        sys.path.insert(1, _PATH)  # programs expect their own directory in front
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _PATH not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([_PATH, *filter(None, inherited)])
    register()


def register() -> None:
    """Registers the modules of this package under the names of Grain, in this process only."""
    sys.modules[_GRAIN] = sys.modules[_PACKAGE]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:  # no `importlib.abc.Loader`: that takes 5 ms to import
    """Resolves `grain.a.b` to the module `grainmill.a.b`, which keeps its name and its spec."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        del path, target
        if not fullname.startswith(f"{_GRAIN}."):
            return None
        found = importlib.util.find_spec(_PACKAGE + fullname.removeprefix(_GRAIN))
        if found is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, cast("Any", self), origin=found.origin)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """See `importlib.abc.Loader.create_module`."""
        module = importlib.import_module(_PACKAGE + spec.name.removeprefix(_GRAIN))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the spec of `module`, which the import system has replaced."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state
