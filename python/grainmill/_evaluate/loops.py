"""Generated loops over elements: each goes through all functions of a chain in one pass.

A loop is generated for each sequence of kinds of steps, as calls through a list of steps would cost
as much as a short user function. One element is finished before the next is started, so after a
failure exactly the elements before it are there.

There are two forms. A loop over a block of a random-access plan takes the indices of elements from
columns, and replaces those that a predicate rejects by `None`. The functions of a lazy block count
elements, and leave those out.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from grainmill._evaluate.evaluated import SKIPPED, stop_iteration_error, stopped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from grainmill._plan.node import StepKind

INDEXED_KINDS: Final = ("indexed", "random")
"""The kinds of steps that take the number of the element."""

_CALLS: Final[dict[StepKind, str]] = {
    "read": "x = f{i}(x)",
    "map": "if x is not None: x = f{i}(x)",
    "indexed": "if x is not None: x = f{i}({number}, x)",
    "random": "if x is not None: x = f{i}(x, g{i}({number}))",
}


class _Predicate(NamedTuple):
    """What is done about the answer of a predicate.

    Attributes:
        rejects: Whether it rejects `x`.
        rejected: The lines for an element that it rejects.
        kept: Those for other elements.
    """

    rejects: str
    rejected: Sequence[str]
    kept: Sequence[str] = ()


def _lines_of(
    i: int, kind: StepKind, number: str, predicate: _Predicate | None, *, timed: bool
) -> list[str]:
    """The lines that pass an element `x` with the number `number` through step `i`.

    If `timed`, they pass the time since `start` to `t{i}`, and `x` to `see`, if that is not `None`.
    """
    take_time = [f"end = clock(); t{i}(end - start); start = end"] if timed else []
    if predicate is None:
        lines = [_CALLS[kind].format(i=i, number=number), *take_time]
    elif timed:
        lines = [f"rejects = {predicate.rejects}", *take_time, "if rejects:"]
    else:
        lines = [f"if {predicate.rejects}:"]
    if predicate is not None:
        lines += [*_indented(predicate.rejected), *predicate.kept]
    return [*lines, f"if see: see({i}, x); start = clock()"] if timed else lines


@functools.lru_cache(maxsize=256)
def loop_of(
    kinds: tuple[StepKind, ...], start: int = 0, stop: int | None = None, *, timed: bool = False
) -> Callable[..., None]:
    """The loop over the steps from `start` to `stop` of a chain of these kinds.

    Its arguments: the elements; the function that takes each result; with one item for each step of
    the whole chain, the functions and the generators of random steps; a column for each of its own
    steps that take a number. If `timed`, also the clock, a list for each step of the whole chain,
    and `see`, which takes the number of a step, -1 for the input, and its output, or `None`.
    """
    own = range(len(kinds))[start:stop]
    names = ["x", *(f"k{i}" for i in own if kinds[i] in INDEXED_KINDS)]
    steps = ["if see: see(-1, x)"] if timed and not start else []
    steps += ["start = clock()"] if timed else []
    for i in own:
        predicate = None
        if kinds[i] == "filter":
            predicate = _Predicate(f"x is not None and not f{i}(x)", ["x = None"])
        steps += _lines_of(i, kinds[i], f"k{i}", predicate, timed=timed)
    lines = [
        f"def loop(elements, append, functions, generators, columns{_TIMING if timed else ''}):",
        *_indented(_assignments(kinds, own, ["functions", "generators"], timed=timed)),
        f"    for {', '.join(names)} in {'zip(elements, *columns)' if names[1:] else 'elements'}:",
        *_indented([*steps, "append(x)"], 2),
    ]
    return _generated(lines, {})["loop"]  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def lazy_functions(
    kinds: tuple[StepKind, ...], *, over_lazy: bool, timed: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns `Block.finish` and `Block.finish_many` for a chain of these steps.

    Its arguments, with one item per step where they are sequences: the functions; the generators of
    random steps; the number of the block's first element, and the stride of the numbers; the watch
    of each predicate; the list of the places skipped up to each predicate, and that of `below`, the
    block upstream; and the function that finishes the raw elements first, if any. If `timed`, also
    the clock, the lists that take the times of each step, and `see`, or `None`.
    """
    tests = [i for i, kind in enumerate(kinds) if kind == "filter"]
    steps = [f"if w{i}.excess is not None: w{i}.raise_excess()" for i in reversed(tests)]
    if over_lazy:
        steps += ["x = below(x, at)", "if x is skipped:"]
        steps += _indented([*(f"a{i}(at)" for i in tests), _SKIP])
    steps += ["start = clock()"] if timed else []
    skips = "below" if over_lazy else ""
    for i, kind in enumerate(kinds):
        passed = f"at - len(d{skips})" if skips else "at"
        number = f"n{i} + ({passed}) * s{i}" if kind == "random" else f"n{i} + {passed}"
        predicate = None
        if kind == "filter":
            predicate, skips = _watched(i, tests), str(i)
        steps += _lines_of(i, kind, number, predicate, timed=timed)
    groups = ["functions", "generators", "numbers", "strides", "watches", "dropped"]
    lines = [
        f"def make({', '.join(groups)}, dbelow, below{_TIMING if timed else ''}):",
        *_indented(_assignments(kinds, range(len(kinds)), groups, timed=timed)),
        *(f"    a{i} = d{i}.append" for i in tests),
        "    def one(x, at):",
        "        try:",
        *_indented([line.replace(_SKIP, "return skipped") for line in steps], 3),
        "        except StopIteration as stop: raise stopped(stop) from stop",
        "        return x",
        "    def many(elements, at, append):",
        "        for at, x in enumerate(elements, at):",
        *_indented([line.replace(_SKIP, "continue") for line in steps], 3),
        "            append(x)",
        "    return one, many",
    ]
    scope: dict[str, Any] = {"skipped": SKIPPED, "stopped": stop_iteration_error}
    return _generated(lines, scope)["make"]  # type: ignore[no-any-return]


def _watched(i: int, tests: Sequence[int]) -> _Predicate:
    """Leaves out what predicate `i` of `tests` rejects, and counts for its watch."""
    passed = [f"w{i}.left -= 1", f"if not w{i}.left: w{i}.close_window()"]
    skipped = [f"a{later}(at)" for later in tests if later >= i]
    rejected = [f"w{i}.dropped += 1", *skipped, *passed, _SKIP]
    return _Predicate(f"not f{i}(x)", rejected, passed)


@functools.lru_cache(maxsize=256)
def block_call(step: int) -> Callable[..., list[Any]]:
    """A function that passes a block to step `step` and has the answer checked.

    Its arguments are the steps' functions, by which notes find their chain; the block function, its
    arguments, and the check, which gets the answer.
    """
    lines = [
        f"def call(functions, f{step}, arguments, check):",
        f"    return check(f{step}(*arguments))",
    ]
    return _generated(lines, {})["call"]  # type: ignore[no-any-return]


_TIMING: Final = ", clock, times, see"
_SKIP: Final = "SKIP"  # replaced by what goes on with the next element


def _assignments(
    kinds: Sequence[StepKind], own: Sequence[int], groups: Sequence[str], *, timed: bool
) -> list[str]:
    """The lines that assign the items of arguments to variables: `f0` is the first function."""
    lines = [
        f"{', '.join(f'{group[0]}{i}' for i in range(len(kinds)))}, = {group}"
        for group in groups
        if group != "generators" or "random" in kinds
    ]
    return lines + [f"t{i} = times[{i}].append" for i in own if timed]


def _indented(lines: Iterable[str], depth: int = 1) -> list[str]:
    return [f"{'    ' * depth}{line}" for line in lines]


# Keras takes code for that of a pipeline, and computes on the CPU, if a file on its stack has this
# path in its name.
_KERAS_LOOKS_FOR: Final = "grain/_src/python/dataset".replace("/", os.sep)
_GENERATED: Final = f"<grainmill fused stages, {_KERAS_LOOKS_FOR}>"
_STEP: Final = re.compile(r"\bf(\d+)\(")


def _generated(lines: Sequence[str], scope: dict[str, Any]) -> dict[str, Any]:
    """Runs `lines` in `scope` and returns it; records which line calls which step."""
    calls = ((number, _STEP.search(line)) for number, line in enumerate(lines, 1))
    scope["step_of_line"] = {number: int(call[1]) for number, call in calls if call}
    exec(compile("\n".join(lines), _GENERATED, "exec"), scope)
    return scope


class Passed(NamedTuple):
    """A frame of generated code in a traceback.

    Attributes:
        step: The step whose function raised; `None` if that was in another generated frame.
        functions: The functions of the steps, in a loop over the elements of a block.
    """

    step: int | None
    functions: Any


def passed_by(failure: BaseException) -> list[Passed]:
    """The frames of generated code in the traceback of `failure`, the outermost first.

    The step follows from the line number, so the loops need not record it.
    """
    frames = list(_generated_frames(failure))
    stop = stopped_by(failure)
    if stop is not None and all(step is None for _, step in frames):
        # The caller of the function created the failure from what the function raised.
        frames = [*frames[:-1], *list(_generated_frames(stop))[:1]]
    return [Passed(step, _functions(frame)) for frame, step in frames]


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
    if type(variables) is dict:  # a copy, which would keep the elements alive
        variables.clear()
    return functions
