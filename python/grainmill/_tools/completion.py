"""`grainmill completion`: prints a completion file, made from the parsers of all commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from grainmill._tools import main
from grainmill._tools.console import ExitCode

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")

_EPILOG = """\
install:
  bash  grainmill completion bash > ~/.local/share/bash-completion/completions/grainmill
  zsh   grainmill completion zsh > ~/.zfunc/_grainmill    (with ~/.zfunc in $fpath)
  fish  grainmill completion fish > ~/.config/fish/completions/grainmill.fish
"""


class Option(NamedTuple):
    """An option of a command.

    Attributes:
        names: Such as `-n` and `--count`.
        help: One line.
        choices: Its values, if it has some of its own.
        takes_value: Whether a value follows.
    """

    names: tuple[str, ...]
    help: str
    choices: tuple[str, ...]
    takes_value: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(options: argparse.Namespace) -> int:
    """Runs the command."""
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](), end="")
    return ExitCode.OK


def options_of(command: str) -> list[Option]:
    """The options of a command."""
    parser = main.command_parser(command)
    return [
        Option(
            tuple(action.option_strings),
            " ".join((action.help or "").split()),
            tuple(map(str, action.choices or ())),
            action.nargs != 0,
        )
        for action in parser.arguments
        if action.option_strings
    ]


def _words_of(command: str) -> Iterator[str]:
    for option in options_of(command):
        yield from option.names
    if command == "completion":
        yield from SHELLS


def _bash() -> str:
    cases = []
    for command in main.COMMANDS:
        values = [
            f"        {command}:{'|'.join(option.names).replace('|', f'|{command}:')}) "
            f"words='{' '.join(option.choices)}' ;;"
            for option in options_of(command)
            if option.choices
        ]
        cases += values
    words = [
        f"        {command}) words='{' '.join(_words_of(command))}' ;;" for command in main.COMMANDS
    ]
    lines = [
        "# Completion of `grainmill` in bash; made by `grainmill completion bash`.",
        "_grainmill() {",
        "    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} words=",
        "    COMPREPLY=()",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f"        COMPREPLY=($(compgen -W '{' '.join(main.COMMANDS)} --help --version' "
        '-- "$current"))',
        "        return",
        "    fi",
        '    case "${COMP_WORDS[1]}:$previous" in',
        *cases,
        "    esac",
        '    if [ -n "$words" ]; then',
        '        COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "        return",
        "    fi",
        '    case "${COMP_WORDS[1]}" in',
        *words,
        "    esac",
        "    if [[ $current == -* || ${COMP_WORDS[1]} == completion ]]; then",
        '        COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "    else",
        '        COMPREPLY=($(compgen -f -- "$current"))',
        "    fi",
        "}",
        "complete -o filenames -F _grainmill grainmill",
    ]
    return "\n".join(lines) + "\n"


def _zsh() -> str:
    lines = [
        "#compdef grainmill",
        "# Completion of `grainmill` in zsh; made by `grainmill completion zsh`.",
        "_grainmill() {",
        "    local -a commands",
        "    commands=(",
        *(f"        {_quoted(f'{name}:{text}')}" for name, text in main.COMMANDS.items()),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe command commands",
        "        return",
        "    fi",
        '    case "$words[2]" in',
    ]
    for command in main.COMMANDS:
        lines.append(f"        {command})")
        specs = []
        for option in options_of(command):
            for name in option.names:
                text = option.help.translate({ord(char): f"\\{char}" for char in "[]:"})
                value = ""
                if option.takes_value:
                    value = f":value:({' '.join(option.choices)})" if option.choices else ":value:"
                specs.append(_quoted(f"{name}[{text}]{value}"))
        last = f"'*:shell:({' '.join(SHELLS)})'" if command == "completion" else "'*:file:_files'"
        lines.append(f"            _arguments {' '.join([*specs, last])} ;;")
    lines += ["    esac", "}", '_grainmill "$@"']
    return "\n".join(lines) + "\n"


def _fish() -> str:
    # The first word decides: a file may have the name of a command.
    lines = [
        "# Completion of `grainmill` in fish; made by `grainmill completion fish`.",
        "function __grainmill_command",
        "    set -l words (commandline -opc)",
        '    test "$words[2]" = "$argv[1]"',
        "end",
    ]
    lines += [
        f"complete -c grainmill -n '__grainmill_command \"\"' -f -a {name} -d {_fish_quoted(text)}"
        for name, text in main.COMMANDS.items()
    ]
    for command in main.COMMANDS:
        condition = f"-n '__grainmill_command {command}'"
        for option in options_of(command):
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            value = " -r" if option.takes_value else ""
            if option.choices:
                value += f" -f -a {_fish_quoted(' '.join(option.choices))}"
            lines.append(
                f"complete -c grainmill {condition} {names}{value} -d {_fish_quoted(option.help)}"
            )
        if command == "completion":
            lines.append(f"complete -c grainmill {condition} -f -a '{' '.join(SHELLS)}'")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Text in single quotes, for zsh."""
    return "'" + text.replace("%%", "%").replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    """Text in single quotes, for fish."""
    return "'" + text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'") + "'"
