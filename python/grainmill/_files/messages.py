"""Messages of errors that name arguments, which a command line calls by its own options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping


class Argument(str):
    """The name of an argument in a message."""


class Message(str):
    """A message, in which each `Argument` is in backticks.

    Args:
        *parts: What it consists of.
    """

    _parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> Self:
        message = super().__new__(cls, _joined(parts, {}))
        message._parts = parts
        return message

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def renamed(self, names: Mapping[str, str]) -> str:
        """The message with other names of arguments."""
        return _joined(self._parts, names)


def _joined(parts: tuple[str, ...], names: Mapping[str, str]) -> str:
    return "".join(
        [names.get(part, f"`{part}`") if isinstance(part, Argument) else part for part in parts]
    )


def message_of(error: BaseException, names: Mapping[str, str]) -> str:
    """Returns the message of an error of this module, in which arguments have other names.

    It is for a program whose users do not write Python, as the command line, where an existing file
    is replaced with `--force`. What may be secret of URLs is left out of all messages.

    Args:
        error: What one of the functions has raised; of others, the message stays as it is.
        names: What arguments are called, by their names.

    Example:
        >>> from grainmill import files
        >>> with open("a.jsonl", "w") as file:
        ...     _ = file.write("{}")
        >>> try:
        ...     files.convert("a.jsonl", "a.txt")
        ... except ValueError as error:
        ...     files.message_of(error, {"target_format": "--to"})
        'a.txt: its format is not known from its name; pass --to (...)'
    """
    message = error.args[0] if error.args else ""
    return message.renamed(names) if isinstance(message, Message) else str(error)


def check_at_least(name: str, value: int | None, minimum: int) -> None:
    """Refuses a number that is too small; `None` is one that is not given."""
    if value is not None and value < minimum:
        raise ValueError(Message(Argument(name), f" must be at least {minimum}, got {value}"))


def check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Refuses what is none of the choices; `None` is one that is not given."""
    if value is not None and value not in choices:
        raise ValueError(
            Message(Argument(name), f" must be one of {', '.join(choices)}, got {value}")
        )
