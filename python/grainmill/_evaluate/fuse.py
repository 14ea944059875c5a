"""User functions fused into one generated loop: each element goes through all of them in one pass.

A loop is generated for each sequence of kinds of steps, as calls through a list of steps would cost
as much as a short user function. One element is finished before the next is started, so after a
failure exactly the elements before it are there.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from grainmill._interrupts import raise_interrupt
from grainmill._plan.tracebacks import first_users_code
from grainmill._stats.meters import both_clocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

    from grainmill._evaluate.rng import IndexedGenerators
    from grainmill._plan.node import StepKind
    from grainmill._stats.meters import LoopMeter


_LINES: dict[StepKind, str] = {
    "read": "x = f{i}(x)",
    "map": "if x is not None: x = f{i}(x)",
    "filter": "if x is not None and not f{i}(x): x = None",
    "indexed": "if x is not None: x = f{i}(k{i}, x)",
    "random": "if x is not None: x = f{i}(x, g{i}(k{i}))",
}
_INDEXED_KINDS = ("indexed", "random")


class Evaluated(NamedTuple):
    """Elements in order, up to the one that raised `failure`, if any."""

    elements: list[Any]
    failure: BaseException | None


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A user function in a chain.

    Attributes:
        kind: How it is called.
        function: The function.
        column: The column of the indices it takes.
        generators: The generators of a random map.
        block: The same function of a list of elements, where the user offers one; it also takes the
            list of indices if `function` takes an index.
    """

    kind: StepKind
    function: Callable[..., Any]
    column: int | None = None
    generators: IndexedGenerators | None = None
    block: Callable[..., Any] | None = None


class Fused:
    """The steps of a chain fused into one callable.

    Attributes:
        steps: The steps.
        meter: Takes the times of the steps; `None` for none.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self.meter: LoopMeter | None = None
        self._kinds = tuple(step.kind for step in steps)
        self._loop = loop_of(self._kinds) if steps else None
        self._functions = [step.function for step in steps]
        self._generators = [step.generators for step in steps if step.kind == "random"]

    def __call__(
        self,
        elements: Iterable[Any],
        columns: Sequence[Sequence[int]] = (),
        output: list[Any] | None = None,
    ) -> Evaluated:
        """Applies the steps to each of `elements`.

        Args:
            elements: The inputs; indices if the first step reads.
            columns: One index per element for each step that takes one, in order.
            output: The list to append to; other threads may read it meanwhile.
        """
        loop = self._loop
        if loop is None:
            return Evaluated(list(elements), None)
        meter = self.meter
        if meter is not None and meter.timer.countdown <= 0:
            return self._timed(meter, elements, columns, output)
        output = [] if output is None else output
        try:  # as in `evaluated`, without another call for each block, which may be one element
            loop(elements, output.append, self._functions, self._generators, columns)
        except BaseException as failure:
            result = until_failure(output, failure)
        else:
            result = Evaluated(output, None)
        if meter is not None:
            count = len(output)
            meter.timer.countdown -= count
            if meter.counts:
                meter.count_elements(count)
        return result

    def _timed(
        self,
        meter: LoopMeter,
        elements: Iterable[Any],
        columns: Sequence[Iterable[int]],
        output: list[Any] | None,
    ) -> Evaluated:
        """`__call__`, with the time of the call and of the steps of some of its elements."""
        prepared_s = time.perf_counter()
        times: list[list[complex]] = [[] for _ in self.steps]
        timed_loop = loop_of(self._kinds, "specs" if meter.sees_next else "times")
        meter.start()
        first, count, see = meter.first, meter.count, meter.see
        if meter.sees_next:
            first, count, meter.sees_next = 0, 1, False

        def run(elements: Iterable[Any], columns: Any, append: Callable[[Any], None]) -> None:
            rest = iter(elements)
            columns = [iter(column) for column in columns]
            given = append, self._functions, self._generators, columns
            if self._loop is not None:
                if first:
                    self._loop(islice(rest, first), *given)
                timed_loop(islice(rest, count), *given, both_clocks, times, see)
                self._loop(rest, *given)

        started = both_clocks()
        result = evaluated(run, elements, columns, output)
        meter.record(times, result.elements, both_clocks() - started, prepared_s)
        return result

    def runs(self, functions: Any) -> bool:
        """Whether a loop with `functions` is the one of these steps."""
        return self._functions is functions


def evaluated(
    loop: Callable[..., None], elements: Iterable[Any], given: Any, output: list[Any] | None = None
) -> Evaluated:
    """Calls `loop(elements, given, output.append)`; returns the elements up to a failure."""
    output = [] if output is None else output
    try:
        loop(elements, given, output.append)
    except BaseException as failure:
        return until_failure(output, failure)
    return Evaluated(output, None)


def until_failure(elements: list[Any], failure: BaseException) -> Evaluated:
    """The elements before `failure`, which is being handled; raises it if it is an interrupt."""
    if _raises_interrupts and threading.current_thread() is threading.main_thread():
        raise_interrupt(failure)  # it is not delayed until its element is delivered
    if isinstance(failure, StopIteration):
        error = stop_iteration_error(failure)
        error.__cause__ = failure
        return Evaluated(elements, error)
    return Evaluated(elements, failure)


_STOPPED: Final = "raised StopIteration, which does not end the data"


def stop_iteration_error(stop: StopIteration) -> RuntimeError:
    """The exception for a user's function that raised `stop`, which would end the data."""
    code = first_users_code(stop)
    named = ""
    if code is not None:
        named = f" (`{code.co_qualname}`, defined at {code.co_filename}:{code.co_firstlineno})"
    return RuntimeError(
        f"a user function{named} {_STOPPED}; catch it there, or give `next` a default, and leave "
        "elements out with `filter`"
    )


_raises_interrupts = True


def defer_interrupts() -> None:
    """Delivers interrupts and the like in the order of elements, in the main thread, too.

    For processes that Ctrl-C is not meant for.
    """
    global _raises_interrupts  # noqa: PLW0603 - a property of the process
    _raises_interrupts = False


@functools.lru_cache(maxsize=256)
def loop_of(
    kinds: tuple[StepKind, ...],
    timing: Literal["none", "times", "specs"] = "none",
    start: int = 0,
    stop: int | None = None,
) -> Callable[..., None]:
    """The loop over the steps from `start` to `stop` of a chain of these kinds.

    With `timing`, it takes the clock, a list of times for each step, and `see`. It always takes the
    functions and generators of the whole chain, but columns for its own steps only.
    """
    own = range(len(kinds))[start:stop]
    indexed = [i for i in own if kinds[i] in _INDEXED_KINDS]
    randoms = [i for i, kind in enumerate(kinds) if kind == "random"]
    names = ", ".join(["x", *(f"k{i}" for i in indexed)])
    timed = timing != "none"
    steps: list[str] = []
    for i in own:
        steps.append(f"        {_LINES[kinds[i]].format(i=i)}")
        if timed:
            steps.append(f"        end = clock(); t{i}.append(end - start); start = end")
        if timing == "specs":
            steps.append(f"        see({i}, x); start = clock()")
    lines = [
        "def loop(elements, append, functions, generators, columns, clock, times, see):"
        if timed
        else "def loop(elements, append, functions, generators, columns):",
        f"    {''.join(f't{i}, ' for i in range(len(kinds)))}= times" if timed else "",
        f"    {''.join(f'f{i}, ' for i in range(len(kinds)))}= functions",
        f"    {''.join(f'g{i}, ' for i in randoms)}= generators" if randoms else "",
        f"    for {names} in {'zip(elements, *columns)' if indexed else 'elements'}:",
        "        see(-1, x)" if timing == "specs" and not start else "",
        "        start = clock()" if timed else "",
        *steps,
        "        append(x)",
    ]
    return _generated(lines, {})["loop"]  # type: ignore[no-any-return]


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
    was_stopped = isinstance(failure.__cause__, StopIteration) and _STOPPED in str(failure)
    if was_stopped and failure.__cause__ is not None and _is_unknown(frames):
        # The caller of the function created it from what the function raised.
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
    if type(variables) is dict:  # a copy, which would keep the elements alive
        variables.clear()
    return functions


SKIPPED: Final = object()
"""The placeholder of an element that a predicate rejected."""

# The kinds of steps in sequential stages, where predicates leave out the elements they reject.
Kind: TypeAlias = Literal["map", "indexed", "random", "test"]

_NUMBERED: Final[dict[Kind, str]] = {
    "indexed": "if x is not None: x = f{i}({n}, x)",
    "random": "if x is not None: x = f{i}(x, g{i}({n}))",
}


_TAKE_TIME: Final = "    end = clock(); t{i}(end - start); start = end"


@functools.lru_cache(maxsize=256)
def finisher(
    kinds: tuple[Kind, ...], *, over_lazy: bool, timed: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns `Block.finish` and `Block.finish_many` for a chain of these steps.

    Its arguments, with one item per step where they are sequences: the functions; the generators of
    random steps; the number of the block's first element, and the stride of the numbers; the watch
    of each predicate; the list of the places skipped up to each predicate, and that of `below`, the
    block upstream; and the function that finishes the raw elements first, if any. If `timed`, also
    the clock, the lists that take the seconds of each step, and `see`, if specs are recorded.
    """
    tests = [i for i, kind in enumerate(kinds) if kind == "test"]
    lines = ["try:"]
    lines += [f"    if w{i}.excess is not None: w{i}.raise_excess()" for i in reversed(tests)]
    if over_lazy:
        lines += ["    x = below(x, at)", "    if x is skipped:"]
        lines += [f"        a{i}(at)" for i in tests]
        lines += ["        SKIP"]
    skips = "below" if over_lazy else ""
    if timed:
        lines.append("    start = clock()")
    for i, kind in enumerate(kinds):
        if kind == "map":
            lines.append(f"    if x is not None: x = f{i}(x)")
        elif kind == "test":
            if timed:
                lines += [f"    keeps = f{i}(x)", _TAKE_TIME.format(i=i), "    if not keeps:"]
            else:
                lines.append(f"    if not f{i}(x):")
            lines.append(f"        w{i}.dropped += 1")
            lines += [f"        a{later}(at)" for later in tests if later >= i]
            lines += [f"        w{i}.left -= 1", f"        if not w{i}.left: w{i}.close_window()"]
            lines += ["        SKIP", f"    w{i}.left -= 1"]
            lines += [f"    if not w{i}.left: w{i}.close_window()"]
            if timed:
                lines.append(f"    if see: see({i}, x); start = clock()")
            skips = str(i)
        else:
            passed = f"at - len(d{skips})" if skips else "at"
            number = f"n{i} + ({passed}) * s{i}" if kind == "random" else f"n{i} + {passed}"
            lines.append("    " + _NUMBERED[kind].format(i=i, n=number))
        if timed and kind != "test":
            lines += [_TAKE_TIME.format(i=i), f"    if see: see({i}, x); start = clock()"]
    lines += ["except StopIteration as stop: raise stopped(stop) from stop"]
    source = [
        "def make(functions, generators, numbers, strides, watches, dropped, dbelow, below, "
        "clock=None, times=(), see=None):",
        *(
            f"    {', '.join(f'{letter}{i}' for i in range(len(kinds)))}, = {group}"
            for letter, group in zip(
                "fgnswd",
                ("functions", "generators", "numbers", "strides", "watches", "dropped"),
                strict=True,
            )
        ),
        *(f"    a{i} = d{i}.append" for i in tests),
        *(f"    t{i} = times[{i}].append" for i in range(len(kinds)) if timed),
        "    def one(x, at):",
        *(f"        {line.replace('SKIP', 'return skipped')}" for line in lines),
        "        return x",
        "    def many(elements, at, append):",
        "        for at, x in enumerate(elements, at):",
        *(f"            {line.replace('SKIP', 'continue')}" for line in lines),
        "            append(x)",
        "    return one, many",
    ]
    scope: dict[str, Any] = {"skipped": SKIPPED, "stopped": stop_iteration_error}
    return _generated(source, scope)["make"]  # type: ignore[no-any-return]
