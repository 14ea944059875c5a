"""How many threads run user functions: a pure function of measurements over a span of time.

There is no clock and no thread in here, so simulated traces test it.
"""

from __future__ import annotations

from typing import NamedTuple

# More threads are tried only if the consumer waits for elements at least this share of the time.
STARVED_SHARE = 0.5
# Functions wait, rather than compute, if threads use less than this share of their busy time as CPU
# time, and all together less than `WAITING_CORES`. The second excludes waits for the interpreter
# lock: functions that hold it keep one core busy, however many threads call them.
WAITING_SHARE = 0.5
WAITING_CORES = 0.6
# Threads that wait for a core for most of the time in which they could run have short turns between
# waits of another kind: on a busy machine each of these is followed by one for a core.
COMPUTING_SHARE = 0.25
# With more busy cores than this, functions ran at the same time, so they release the lock.
TOGETHER_CORES = 1.2
# A trial of more threads succeeds if the rate of elements grows by at least the first factor, and
# the CPU time per element by at most the second. The clock rate of a shared machine, and with it
# the rate, may double from one span to the next; CPU time may not.
MIN_SPEEDUP = 1.3
MAX_COST_RATIO = 1.25
# A trial of fewer threads succeeds if at least this share of the rate remains.
MIN_RATE_KEPT = 0.95
# The share of its waiting time that a function may spend on waking up.
WAKING_SHARE = 0.02
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Span(NamedTuple):
    """Measurements over a span of time.

    Attributes:
        elapsed_s: Its length.
        elements: Elements that were computed.
        starved_s: How long the consumer waited for them.
        busy_s: Seconds in functions, summed over threads, without waits for storage.
        cpu_s: CPU seconds, summed over threads.
        ready_s: CPU seconds and seconds of waiting for a core, which a busy machine causes, not
            the functions.
    """

    elapsed_s: float
    elements: int
    starved_s: float
    busy_s: float
    cpu_s: float
    ready_s: float

    @property
    def rate(self) -> float:
        """Elements per second."""
        return self.elements / self.elapsed_s

    @property
    def cores(self) -> float:
        """Cores that the threads could have used."""
        return self.ready_s / self.elapsed_s

    @property
    def waits(self) -> bool:
        """Whether the functions mostly wait, rather than compute."""
        if self.busy_s <= self.elapsed_s:  # one at a time: none waits for the lock of another
            for_core_s = self.ready_s - self.cpu_s
            return self.cpu_s < WAITING_SHARE * (self.busy_s - for_core_s)
        if self.cpu_s < COMPUTING_SHARE * self.ready_s:
            return True
        return self.cores < WAITING_CORES and self.ready_s < WAITING_SHARE * self.busy_s

    @property
    def starves(self) -> bool:
        """Whether the consumer waits most of the time."""
        return self.starved_s > STARVED_SHARE * self.elapsed_s


class _Trial(NamedTuple):
    """A change of the number of threads that is being tried.

    Attributes:
        threads: The number before.
        before: The measurements before.
        extended: Whether this is its second span.
    """

    threads: int
    before: Span
    extended: bool = False


class ThreadPolicy:
    """Adds threads while the consumer starves and more threads bring more elements.

    Functions that wait get all allowed threads at once. For functions that compute, a doubled
    number is tried, for a second span if the first, a cold start, does not show a gain. It stays
    only if functions ran at the same time, elements came clearly faster and none cost clearly more.
    If several threads keep no more than one core busy, fewer are tried. Each pause after a failed
    trial is twice as long as the one before. Several threads that pay off are compared with half of
    them now and then: the span before their trial may have been a cold start, or the functions may
    have changed.

    Attributes:
        count: The number of threads to give work to, from 1 to `allowed`.
        on_trial: Whether the next span decides if `count` stays.
    """

    def __init__(self, allowed: int) -> None:
        self.count = 1
        self._allowed = allowed
        self._trial: _Trial | None = None
        self._pause_left_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._recheck_left_s = self._recheck_pause_s = FIRST_PAUSE_S

    @property
    def on_trial(self) -> bool:
        """Whether the next span decides if `count` stays."""
        return self._trial is not None

    def decide(self, span: Span) -> int:
        """The new count after `span`, during which `count` threads had work."""
        trial, self._trial = self._trial, None
        if trial is not None:
            if not self._succeeded(trial, span):
                if self.count > trial.threads and not trial.extended:
                    # New threads start with untouched memory, and the first of them may be late.
                    self._trial = trial._replace(extended=True)
                else:
                    self._end_trial(trial)
                return self.count
            self._pause_s = self._recheck_left_s = self._recheck_pause_s = FIRST_PAUSE_S
        self._pause_left_s -= span.elapsed_s
        self._recheck_left_s -= span.elapsed_s
        wanted = self._wanted(span)
        if wanted != self.count:
            self._trial = _Trial(self.count, span)
            self.count = wanted
        return self.count

    def _end_trial(self, trial: _Trial) -> None:
        """Restores the count before the trial."""
        if self.count < trial.threads and trial.before.cores > TOGETHER_CORES:
            self._recheck_pause_s = min(LONGEST_PAUSE_S, 2 * self._recheck_pause_s)
            self._recheck_left_s = self._recheck_pause_s
        else:
            self._pause_left_s = self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self.count = trial.threads

    def _wanted(self, span: Span) -> int:
        if self._pause_left_s > 0 or not span.elements + span.busy_s:
            return self.count
        if self.count > 1 and span.cores > TOGETHER_CORES and self._recheck_left_s <= 0:
            return self.count // 2
        if self.count > 1 and not span.waits and WAITING_CORES <= span.cores <= TOGETHER_CORES:
            return 1
        if not span.starves or self.count == self._allowed:
            return self.count
        return self._allowed if span.waits else min(self._allowed, 2 * self.count)

    def _succeeded(self, trial: _Trial, span: Span) -> bool:
        before = trial.before
        if self.count < trial.threads:
            if span.rate >= MIN_RATE_KEPT * before.rate or not span.starves:
                return True
            return before.cores > TOGETHER_CORES and not self._pays_off(span, before)
        if not span.elements:
            return before.waits and span.waits  # each element takes longer than the span
        return self._pays_off(before, span)

    def _pays_off(self, fewer: Span, more: Span) -> bool:
        """Whether the gain from more threads is worth their cost."""
        wait = fewer.cores < WAITING_CORES or fewer.waits or more.waits
        together = wait or more.cores > TOGETHER_CORES
        faster = more.rate >= MIN_SPEEDUP * fewer.rate or not more.starves
        return together and faster and self._is_as_cheap(fewer, more)

    def _is_as_cheap(self, before: Span, span: Span) -> bool:
        if not before.elements:
            return True
        per_element = before.cpu_s / before.elements
        waking = WAKING_SHARE * before.elapsed_s / before.elements
        return span.cpu_s / span.elements <= MAX_COST_RATIO * per_element + waking
