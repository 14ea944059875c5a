"""Finds the command, runs it, and turns exceptions into one line and an exit code.

A command is a module of this package with `add_arguments(parser)` and `run(options)`, and a line in
`COMMANDS`. Only the module of the command that is called is imported, so that help comes quickly.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from grainmill import GrainmillError, __version__, files
from grainmill._tools.console import EXIT_CODES, CommandError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = {
    "info": "records, bytes, chunks, options and sizes of files",
    "cat": "print records: raw, JSON, tf.train.Example or hex",
    "head": "print the first records",
    "verify": "check structure, checksums and index; write or check hashes",
    "convert": "convert between formats, reshard, shuffle",
    "index": "write an index, so that files open quickly",
    "doctor": "versions, limits of this machine, and what of them matters",
    "bench": "measure a pipeline and say what holds it back",
    "trace": "write a timeline of a pipeline, for Perfetto",
    "as-grain": "run a program that imports Grain on grainmill",
    "completion": "print a completion file for bash, zsh or fish",
}

_EPILOG = "exit codes:\n" + "\n".join(f"  {code:d}  {text}" for code, text in EXIT_CODES.items())


class Parser(argparse.ArgumentParser):
    """A parser of arguments.

    Attributes:
        arguments: Those that were added to it.
    """

    def __init__(self, **options: Any) -> None:
        self.arguments: list[argparse.Action] = []
        super().__init__(formatter_class=HelpFormatter, **options)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Adds an argument; see `argparse.ArgumentParser.add_argument`."""
        action = super().add_argument(*names, **options)
        self.arguments.append(action)
        return action

    def error(self, message: str) -> NoReturn:
        """Ends the program, as an argument is wrong."""
        super().error(files.redacted(message))


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of one width, the same with every version of Python."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=88)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, action.dest.upper())
        return f"{', '.join(action.option_strings)} {value}"


def module_of(command: str) -> Any:
    """The module that implements a command."""
    name = {"head": "cat"}.get(command, command.replace("-", "_"))
    return importlib.import_module(f"grainmill._tools.{name}")


def command_parser(command: str) -> Parser:
    """The parser of the arguments of one command."""
    parser = Parser(
        prog=f"grainmill {command}",
        description=COMMANDS[command][0].upper() + COMMANDS[command][1:] + ".",
        allow_abbrev=False,
    )
    module = module_of(command)
    parser.set_defaults(command=command)
    module.add_arguments(parser)
    if command not in {"completion", "as-grain"}:
        parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument(
        "--traceback", action="store_true", help="show where in the program an error was raised"
    )
    places = [
        f"{action.metavar} [{action.metavar} ...]" if action.nargs == "+" else action.metavar
        for action in parser.arguments
        if not action.option_strings
    ]
    parser.usage = " ".join(["grainmill", command, "[OPTION ...]", *map(str, places)])
    return parser


def _main_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:{width}}{text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="grainmill",
        usage="grainmill COMMAND [ARGUMENT ...]",
        description="Looks at files of records, checks, converts and indexes them, and measures "
        "pipelines.",
        epilog=f"commands (`grainmill COMMAND --help` describes each):\n{lines}\n\n{_EPILOG}",
    )
    parser.add_argument("--version", action="version", version=f"grainmill {__version__}")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` name, by default those of the process.

    Returns:
        The exit code, one of `ExitCode`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0].startswith("-"):
        _main_parser().parse_args(given or ["--help"])
    command, rest = given[0], given[1:]
    if command not in COMMANDS:
        text = f"unknown command `{command}`; commands: {', '.join(COMMANDS)}"
        print(f"grainmill: {files.redacted(text)}", file=sys.stderr)
        return ExitCode.USAGE
    if command == "as-grain":  # all arguments are the program's
        return int(module_of(command).run_program(rest))
    parser = command_parser(command)
    options = parser.parse_args(rest)
    try:
        code = int(module_of(command).run(options))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has all that it wants. Flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + getattr(signal, "SIGPIPE", 13)
    except (Exception, KeyboardInterrupt) as error:
        if options.traceback and not _is_interrupt(error):
            print(files.redacted(traceback.format_exc()), end="", file=sys.stderr)
        else:
            print(f"grainmill {command}: {_line_of(error, parser)}", file=sys.stderr)
        return _code_of(error)
    return code


def _line_of(error: BaseException, parser: Parser) -> str:
    known = (CommandError, OSError, GrainmillError, ValueError, IndexError, MemoryError)
    if _is_interrupt(error):
        text = "interrupted"
    elif isinstance(error, OSError) and error.filename and error.strerror:
        # An error of the engine has a message that names the file, one of Python has not.
        text = error.strerror
        text = text if str(error.filename) in text else f"{error.filename}: {text}"
    elif isinstance(error, known):
        options = {a.dest: a.option_strings[-1] for a in parser.arguments if a.option_strings}
        text = files.message_of(error, options) or type(error).__name__
    else:
        text = f"{type(error).__name__}: {error} (`--traceback` shows where)"
    return files.redacted(" ".join(text.split("\n")))


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is one, or of a `Condition` whose lock a second one kept it from acquiring."""
    if isinstance(error, RuntimeError):
        return isinstance(error.__context__, KeyboardInterrupt)
    return isinstance(error, KeyboardInterrupt)


def _code_of(error: BaseException) -> int:
    if isinstance(error, CommandError):
        return error.code
    if _is_interrupt(error):
        return ExitCode.INTERRUPTED
    if isinstance(error, FileExistsError) and error.errno is None:
        return ExitCode.EXISTS  # an output; those of the system have a number
    if isinstance(error, OSError):
        return ExitCode.SYSTEM
    if isinstance(error, GrainmillError):
        return ExitCode.DAMAGED
    return ExitCode.USAGE if isinstance(error, ValueError | IndexError) else ExitCode.FAILED


def script() -> NoReturn:
    """The console script."""
    sys.exit(main())
