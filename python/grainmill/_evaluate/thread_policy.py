"""How many threads to run user functions on: measurements of a span of time in, a number out.

There is no clock and no thread in here, so simulated traces test it.
"""

from __future__ import annotations

from typing import NamedTuple

# The consumer waits for elements at least this share of the time, or more threads are not tried.
STARVED_SHARE = 0.5
# Threads that compute less than this share of their time wait for something else than the
# interpreter lock, as long as all together compute less than `WAITING_CORES`: a function that holds
# the lock keeps one core busy, however many threads call it.
WAITING_SHARE = 0.5
WAITING_CORES = 0.6
# Above this many busy cores, functions have run at the same time and so let go of the lock.
TOGETHER_CORES = 1.2
# A trial of more threads is kept where elements come this much faster and none costs more than
# this. The clock rate of a shared machine may double from one span to the next; CPU time may not.
WORTHWHILE = 1.3
TOLERABLE = 1.25
# A trial of fewer threads is kept where elements come at this share of the rate before.
AS_FAST = 0.95
# A function that waits may spend this much of its waiting on waking up.
WAKING_SHARE = 0.02
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class Span(NamedTuple):
    """What a span of time brought.

    Attributes:
        elapsed_s: How long it was.
        elements: Elements that were computed.
        starved_s: How long the consumer waited for them.
        busy_s: Seconds the threads spent in functions, added up; waits for storage left out.
        cpu_s: CPU seconds they used.
        ready_s: Those, and the seconds in which they waited for a core: on a busy machine, that
            is no wait of the functions.
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
        """Cores that were wanted."""
        return self.ready_s / self.elapsed_s

    @property
    def waits(self) -> bool:
        """Whether the functions wait, rather than compute."""
        return self.cores < WAITING_CORES and self.ready_s < WAITING_SHARE * self.busy_s

    @property
    def starves(self) -> bool:
        """Whether the consumer mostly waits."""
        return self.starved_s > STARVED_SHARE * self.elapsed_s


class _Trial(NamedTuple):
    """Another count that is being tried.

    Attributes:
        threads: The count before.
        before: What that brought.
        began: Whether it has gone on for a span.
    """

    threads: int
    before: Span
    began: bool = False


class ThreadPolicy:
    """Grows while the consumer starves and more threads bring more elements.

    A function that waits gets all allowed threads at once. For one that computes, a doubled count
    is tried, for a second span where the first, a cold start, does not show it: that stays only
    where functions ran at the same time, elements came clearly faster and none cost clearly more.
    Where several threads keep no more than one core busy, fewer are tried. Pauses after a trial
    that failed double. What several threads bring together is now and then compared with what half
    of them do: the span before they were tried may have been a cold start, or the functions may
    have changed.

    Attributes:
        count: The threads to give work to, from 1 to `allowed`.
        on_trial: Whether the next span decides whether `count` stays.
    """

    def __init__(self, allowed: int) -> None:
        self.count = 1
        self._allowed = allowed
        self._trial: _Trial | None = None
        self._rest_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._proof_s = self._next_proof_s = FIRST_PAUSE_S

    @property
    def on_trial(self) -> bool:
        """Whether the next span decides if `count` stays."""
        return self._trial is not None

    def decide(self, span: Span) -> int:
        """The count after `span`, in which `count` threads had work."""
        trial, self._trial = self._trial, None
        if trial is not None:
            if not self._is_worth(trial, span):
                if self.count > trial.threads and not trial.began and not trial.before.waits:
                    # New threads compute into memory that was never touched.
                    self._trial = trial._replace(began=True)
                else:
                    self._end_trial(trial)
                return self.count
            self._pause_s = self._proof_s = self._next_proof_s = FIRST_PAUSE_S
        self._rest_s -= span.elapsed_s
        self._proof_s -= span.elapsed_s
        wanted = self._wanted(span)
        if wanted != self.count:
            self._trial = _Trial(self.count, span)
            self.count = wanted
        return self.count

    def _end_trial(self, trial: _Trial) -> None:
        """Goes back to the count before."""
        if self.count < trial.threads and trial.before.cores > TOGETHER_CORES:
            self._next_proof_s = min(LONGEST_PAUSE_S, 2 * self._next_proof_s)
            self._proof_s = self._next_proof_s
        else:
            self._rest_s = self._pause_s
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        self.count = trial.threads

    def _wanted(self, span: Span) -> int:
        if self._rest_s > 0 or not span.elements + span.busy_s:
            return self.count
        if self.count > 1 and span.cores > TOGETHER_CORES and self._proof_s <= 0:
            return self.count // 2
        if self.count > 1 and WAITING_CORES <= span.cores <= TOGETHER_CORES:
            return 1
        if not span.starves or self.count == self._allowed:
            return self.count
        return self._allowed if span.waits else min(self._allowed, 2 * self.count)

    def _is_worth(self, trial: _Trial, span: Span) -> bool:
        before = trial.before
        if self.count < trial.threads:
            if span.rate >= AS_FAST * before.rate or not span.starves:
                return True
            return before.cores > TOGETHER_CORES and not self._pays(span, before)
        if not span.elements:
            return before.waits and span.waits  # each element takes longer than the span
        return self._pays(before, span)

    def _pays(self, fewer: Span, more: Span) -> bool:
        """Whether more threads are worth what they cost."""
        together = more.cores > TOGETHER_CORES or fewer.cores < WAITING_CORES
        faster = more.rate >= WORTHWHILE * fewer.rate or not more.starves
        return together and faster and self._is_as_cheap(fewer, more)

    def _is_as_cheap(self, before: Span, span: Span) -> bool:
        if not before.elements:
            return True
        per_element = before.cpu_s / before.elements
        waking = WAKING_SHARE * before.elapsed_s / before.elements
        return span.cpu_s / span.elements <= TOLERABLE * per_element + waking
