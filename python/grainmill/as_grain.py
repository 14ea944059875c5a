"""Runs a program that imports Grain on grainmill: `python -m grainmill.as_grain program.py`.

The program, the libraries that it imports and the processes that it starts get grainmill where they
import `grain`; see `grainmill.install_as_grain`. A module is run by
`python -m grainmill.as_grain -m module`. Arguments, `sys.path` and `__main__` are what they are
without it.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
import types

from grainmill._as_grain import install_as_grain

__all__: list[str] = []


def __dir__() -> list[str]:
    return sorted(__all__)


_USAGE = "usage: python -m grainmill.as_grain [-m module | program.py] [argument ...]"


def main() -> None:
    """Runs the program that `sys.argv` names, with the arguments that follow it.

    Raises:
        SystemExit: No program is named, there is no such module, or the program exits.
    """
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    sys.argv[:] = arguments[is_module:]
    if not sys.argv or (not is_module and sys.argv[0].startswith("-")):
        sys.exit(_USAGE)
    install_as_grain()
    # A new module, which stays `__main__` for threads and exit handlers that outlive the program.
    program = types.ModuleType("__main__")
    vars(program)["__builtins__"] = builtins
    sys.modules["__main__"] = program
    if is_module:
        runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]  # noqa: SLF001 - as `python -m`
    else:
        _run_file(os.path.abspath(sys.argv[0]), program)  # noqa: PTH100 - as Python itself


def _run_file(path: str, program: types.ModuleType) -> None:
    """Runs a file in the namespace of `program`, as Python runs its own argument."""
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        sys.exit(f"{sys.executable}: can't open file '{path}': {error.strerror}")
    code = loader.source_to_code(source, path)
    program.__file__, program.__loader__ = path, loader
    vars(program)["__cached__"] = None
    exec(code, vars(program))


if __name__ == "__main__":
    main()
