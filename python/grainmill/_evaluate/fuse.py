"""Chains of user functions as one loop: each element goes through all of them in one pass.

The loop is generated for the kinds of its steps, since a call through a list of steps would cost
as much as a short user function. One element is finished before the next is begun, so a failure
leaves behind exactly the elements before it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from grainmill._evaluate.rng import IndexedGenerators

StepKind: TypeAlias = Literal["read", "map", "filter", "indexed", "random", "test"]

_LINES: dict[StepKind, str] = {
    "read": "x = f{i}(x)",
    "map": "if x is not None: x = f{i}(x)",
    "filter": "if x is not None and not f{i}(x): x = None",
    "indexed": "if x is not None: x = f{i}(k{i}, x)",
    "random": "if x is not None: x = f{i}(x, g{i}(k{i}))",
    "test": "x = bool(f{i}(x))",
}
_INDEXED_KINDS = ("indexed", "random")


class Evaluated(NamedTuple):
    """Elements in order, up to the one whose making raised `failure`, if any did."""

    elements: list[Any]
    failure: BaseException | None


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A user function in a chain; `column` tells the column of indices it is called with."""

    kind: StepKind
    function: Callable[..., Any]
    column: int | None = None
    generators: IndexedGenerators | None = None


class Fused:
    """The steps of a chain as one callable."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self._loop = _loop(tuple(step.kind for step in steps)) if steps else None
        self._functions = [step.function for step in steps]
        self._generators = [step.generators for step in steps if step.kind == "random"]

    def __call__(self, elements: Iterable[Any], columns: Sequence[Sequence[int]] = ()) -> Evaluated:
        """Applies the steps to each of `elements`.

        Args:
            elements: What goes in; indices where the first step reads.
            columns: One index per element for each step that takes one, in order.
        """
        if self._loop is None:
            return Evaluated(list(elements), None)
        made: list[Any] = []
        try:
            self._loop(elements, made.append, self._functions, self._generators, columns)
        except StopIteration as stop:
            failure = RuntimeError("a user function raised StopIteration")
            failure.__cause__ = stop
            return Evaluated(made, failure)
        except Exception as failure:
            return Evaluated(made, failure)
        except BaseException as failure:
            if _leaves_at_once and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C should not wait for its turn
            return Evaluated(made, failure)
        return Evaluated(made, None)


_leaves_at_once = True


def defer_interrupts() -> None:
    """Has what is no `Exception`, such as Ctrl-C, wait for its turn in the main thread too.

    For processes that no Ctrl-C is meant for.
    """
    global _leaves_at_once  # noqa: PLW0603 - a property of the process
    _leaves_at_once = False


@functools.lru_cache(maxsize=256)
def _loop(kinds: tuple[StepKind, ...]) -> Callable[..., None]:
    indexed = [i for i, kind in enumerate(kinds) if kind in _INDEXED_KINDS]
    randoms = [i for i, kind in enumerate(kinds) if kind == "random"]
    names = ", ".join(["x", *(f"k{i}" for i in indexed)])
    lines = [
        "def loop(elements, append, functions, generators, columns):",
        f"    {''.join(f'f{i}, ' for i in range(len(kinds)))}= functions",
        f"    {''.join(f'g{i}, ' for i in randoms)}= generators" if randoms else "",
        f"    for {names} in {'zip(elements, *columns)' if indexed else 'elements'}:",
        *(f"        {_LINES[kind].format(i=i)}" for i, kind in enumerate(kinds)),
        "        append(x)",
    ]
    scope: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<grainmill fused stages>", "exec"), scope)
    return scope["loop"]  # type: ignore[no-any-return]
