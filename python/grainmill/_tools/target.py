"""Pipelines of users that commands run, named by `MODULE:ATTRIBUTE`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from grainmill import MapDataset
from grainmill._tools.console import CommandError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator

TARGET_HELP: Final = """\
The attribute is a MapDataset, an IterDataset, a DataLoader or another iterable of elements, or a
function without arguments that returns one.
"""


@contextlib.contextmanager
def prints_elsewhere() -> Iterator[None]:
    """Makes what the program and its workers print go to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            os.dup2(2, 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def pipeline_of(target: str) -> Any:
    """The object that `MODULE:ATTRIBUTE` names.

    Raises:
        CommandError: There is no such module or attribute, or it is not iterable.
    """
    name, colon, attribute = target.rpartition(":")
    if not colon or not name or not attribute:
        raise CommandError(f"a pipeline is named by MODULE:ATTRIBUTE, got `{target}`")
    module = _module(name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise CommandError(f"{name} has no attribute `{attribute}`")
        found = getattr(found, part)
    if callable(found) and not hasattr(found, "__iter__"):
        found = found()
    if not hasattr(found, "__iter__") and not hasattr(found, "__getitem__"):
        raise CommandError(f"{target} is a {type(found).__name__}, which has no elements")
    return found.to_iter_dataset() if isinstance(found, MapDataset) else found


def _module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise CommandError(f"{name}: no such file", ExitCode.SYSTEM)
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # so that worker processes find its functions
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.split(".", maxsplit=1)[0] == error.name.split(".")[0]:
            raise CommandError(f"there is no module `{name}` here or installed") from error
        raise
