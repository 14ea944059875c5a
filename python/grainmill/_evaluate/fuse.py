"""Chains of user functions as one loop: each element goes through all of them in one pass.

The loop is generated for the kinds of its steps, since a call through a list of steps would cost
as much as a short user function. One element is finished before the next is begun, so a failure
leaves behind exactly the elements before it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from grainmill._plan.tracebacks import first_users_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from grainmill._evaluate.rng import IndexedGenerators

StepKind: TypeAlias = Literal["read", "map", "filter", "indexed", "random"]

_LINES: dict[StepKind, str] = {
    "read": "x = f{i}(x)",
    "map": "if x is not None: x = f{i}(x)",
    "filter": "if x is not None and not f{i}(x): x = None",
    "indexed": "if x is not None: x = f{i}(k{i}, x)",
    "random": "if x is not None: x = f{i}(x, g{i}(k{i}))",
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

    def __call__(
        self,
        elements: Iterable[Any],
        columns: Sequence[Sequence[int]] = (),
        made: list[Any] | None = None,
    ) -> Evaluated:
        """Applies the steps to each of `elements`.

        Args:
            elements: What goes in; indices where the first step reads.
            columns: One index per element for each step that takes one, in order.
            made: The list that the result is to have; it grows while others may look.
        """
        if self._loop is None:
            return Evaluated(list(elements), None)
        return evaluated(self._run, elements, columns, made)

    def runs(self, functions: Any) -> bool:
        """Whether a loop with these functions is that of these steps."""
        return self._functions is functions

    def _run(
        self,
        elements: Iterable[Any],
        columns: Sequence[Sequence[int]],
        append: Callable[[Any], None],
    ) -> None:
        if self._loop is not None:
            self._loop(elements, append, self._functions, self._generators, columns)


def evaluated(
    loop: Callable[..., None], elements: Iterable[Any], given: Any, made: list[Any] | None = None
) -> Evaluated:
    """What `loop(elements, given, append)` appends to `made`, up to the element that fails."""
    made = [] if made is None else made
    try:
        loop(elements, given, made.append)
    except StopIteration as stop:
        failure = stopped(stop)
        failure.__cause__ = stop
        return Evaluated(made, failure)
    except Exception as failure:
        return Evaluated(made, failure)
    except BaseException as failure:
        if _leaves_at_once and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C should not wait for its turn
        return Evaluated(made, failure)
    return Evaluated(made, None)


_STOPPED: Final = "raised StopIteration, which does not end the data"


def stopped(stop: StopIteration) -> RuntimeError:
    """What a user's function raises in effect that lets `stop` out, which would end the data."""
    code = first_users_code(stop)
    named = ""
    if code is not None:
        named = f" (`{code.co_qualname}`, defined at {code.co_filename}:{code.co_firstlineno})"
    return RuntimeError(
        f"a user function{named} {_STOPPED}; catch it there, or give `next` a default, and leave "
        "elements out with `filter`"
    )


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
    return _generated(lines, {})["loop"]  # type: ignore[no-any-return]


_GENERATED: Final = "<grainmill fused stages>"
_STEP: Final = re.compile(r"\bf(\d+)\(")


def _generated(lines: Sequence[str], scope: dict[str, Any]) -> dict[str, Any]:
    """What these lines of code define in `scope`, and which of them call which step."""
    calls = ((number, _STEP.search(line)) for number, line in enumerate(lines, 1))
    scope["step_of_line"] = {number: int(call[1]) for number, call in calls if call}
    exec(compile("\n".join(lines), _GENERATED, "exec"), scope)
    return scope


class Passed(NamedTuple):
    """Generated code that a failure came through.

    Attributes:
        step: The step whose function raised it; `None` where that is in code called by this one.
        functions: Those of the steps, in a loop over the elements of a block.
    """

    step: int | None
    functions: Any


def passed_by(failure: BaseException) -> list[Passed]:
    """The generated code that `failure` came through, the caller's first.

    Which step it was is told by the line that it came from, so that the loops do not note it.
    """
    frames = list(_generated_frames(failure))
    was_stopped = isinstance(failure.__cause__, StopIteration) and _STOPPED in str(failure)
    if was_stopped and failure.__cause__ is not None and _is_unknown(frames):
        # It was made of what the function raised, by the code that called that.
        frames = [*frames[:-1], *list(_generated_frames(failure.__cause__))[:1]]
    return [Passed(step, _functions(frame)) for frame, step in frames]


def _is_unknown(frames: Sequence[tuple[FrameType, int | None]]) -> bool:
    return all(step is None for _, step in frames)


def _generated_frames(failure: BaseException) -> Iterator[tuple[FrameType, int | None]]:
    traceback = failure.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_filename == _GENERATED:
            yield frame, frame.f_globals["step_of_line"].get(traceback.tb_lineno)
        traceback = traceback.tb_next


def _functions(frame: FrameType) -> Any:
    variables = frame.f_locals
    functions = variables.get("functions")
    if type(variables) is dict:  # a copy that the frame keeps, elements included
        variables.clear()
    return functions


SKIPPED: Final = object()
"""What stands for an element that a predicate turned down."""

# In a sequential stage the same, and a predicate that leaves out what it turns down.
Kind: TypeAlias = Literal["map", "indexed", "random", "test"]

_NUMBERED: Final[dict[Kind, str]] = {
    "indexed": "if x is not None: x = f{i}({n}, x)",
    "random": "if x is not None: x = f{i}(x, g{i}({n}))",
}


@functools.lru_cache(maxsize=256)
def finisher(kinds: tuple[Kind, ...], *, over_lazy: bool) -> Callable[..., tuple[Any, Any]]:
    """A function that makes `Block.finish` and `Block.finish_many` for a chain of these steps.

    It takes, one for each step where they are sequences: the functions; the generators of random
    steps; the number of the block's first element, and how far the next one's is from it; the
    watch of each predicate; the list for the places that were skipped up to a predicate, and
    after all steps `below`'s; and what finishes the raw elements first, if anything.
    """
    tests = [i for i, kind in enumerate(kinds) if kind == "test"]
    lines = ["try:"]
    lines += [f"    if w{i}.excess is not None: w{i}.raise_excess()" for i in reversed(tests)]
    if over_lazy:
        lines += ["    x = below(x, at)", "    if x is skipped:"]
        lines += [f"        a{i}(at)" for i in tests]
        lines += ["        SKIP"]
    skips = "below" if over_lazy else ""
    for i, kind in enumerate(kinds):
        if kind == "map":
            lines.append(f"    if x is not None: x = f{i}(x)")
        elif kind == "test":
            lines += [f"    if not f{i}(x):", f"        w{i}.dropped += 1"]
            lines += [f"        a{later}(at)" for later in tests if later >= i]
            lines += [f"        w{i}.left -= 1", f"        if not w{i}.left: w{i}.close_window()"]
            lines += ["        SKIP", f"    w{i}.left -= 1"]
            lines += [f"    if not w{i}.left: w{i}.close_window()"]
            skips = str(i)
        else:
            passed = f"at - len(d{skips})" if skips else "at"
            number = f"n{i} + ({passed}) * s{i}" if kind == "random" else f"n{i} + {passed}"
            lines.append("    " + _NUMBERED[kind].format(i=i, n=number))
    lines += ["except StopIteration as stop: raise stopped(stop) from stop"]
    source = [
        "def make(functions, generators, numbers, strides, watches, dropped, dbelow, below):",
        *(
            f"    {', '.join(f'{letter}{i}' for i in range(len(kinds)))}, = {group}"
            for letter, group in zip(
                "fgnswd",
                ("functions", "generators", "numbers", "strides", "watches", "dropped"),
                strict=True,
            )
        ),
        *(f"    a{i} = d{i}.append" for i in tests),
        "    def one(x, at):",
        *(f"        {line.replace('SKIP', 'return skipped')}" for line in lines),
        "        return x",
        "    def many(elements, at, append):",
        "        for at, x in enumerate(elements, at):",
        *(f"            {line.replace('SKIP', 'continue')}" for line in lines),
        "            append(x)",
        "    return one, many",
    ]
    scope: dict[str, Any] = {"skipped": SKIPPED, "stopped": stopped}
    return _generated(source, scope)["make"]  # type: ignore[no-any-return]
