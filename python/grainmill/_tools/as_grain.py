"""`grainmill as-grain`: runs a program that imports Grain; see `grainmill.as_grain`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from grainmill import as_grain
from grainmill._tools.console import ExitCode

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_HELP = """\
usage: grainmill as-grain [-m MODULE | PROGRAM.py] [ARGUMENT ...]

Runs a program on grainmill: where it, its libraries and the processes that it starts import
`grain`, they get grainmill. Arguments, `sys.path` and `__main__` are what they are without it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command; those after them are the program's."""
    parser.add_argument("-m", metavar="MODULE", help="run a module")
    parser.add_argument("program", metavar="PROGRAM.py", help="and its arguments")


def run_program(arguments: Sequence[str]) -> int:
    """Runs the program that `arguments` name; it ends this process as it likes."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(_HELP, end="")
        return 0 if arguments else 2
    problem = "" if arguments[0].startswith("-") else _problem_of(arguments[0])
    if problem:
        print(f"grainmill as-grain: {arguments[0]}: {problem}", file=sys.stderr)
        return ExitCode.SYSTEM
    sys.argv[1:] = arguments
    as_grain.main()
    return 0


def _problem_of(path: str) -> str:
    """Why a program cannot be read, without opening it: it may be a pipe."""
    if not os.path.exists(path):  # noqa: PTH110 - as the program is opened
        return "no such file"
    if os.path.isdir(path):  # noqa: PTH112
        return "a directory"
    return "" if os.access(path, os.R_OK) else "permission denied"
