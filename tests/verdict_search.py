"""Random pipelines, in which one place is ten times dearer than each other: it must be named.

`python tests/verdict_search.py [--cases N] [--first SEED] [--busy N]` shows wrong verdicts.
"""

import argparse
import dataclasses
import functools
import hashlib
import random
import time
from collections.abc import Callable
from typing import Any

from verdict_pipelines import (
    CALLER,
    FUNCTION,
    MANY,
    ONE,
    SECONDS,
    WORKERS,
    CostlyIterator,
    Slow,
    Source,
    busy_processes,
    compute,
    costs,
    is_right,
    numbers,
    packed,
    prefetched,
    tokens,
    verdict_of,
    wait,
)

import grainmill as grain
from grainmill import MapDataset, MultiprocessingOptions

CHEAP_MS = 0.1
DEARER = 10
TOKENS_ROWS = 5  # about so many elements are packed into a row
PIECE = bytes(4096)  # longer than what is hashed with the lock


def _pieces_of_a_millisecond():
    def once():
        began = time.thread_time()
        _hash(200)
        return time.thread_time() - began

    return 200 * 1e-3 / min(once() for _ in range(7))


def _hash(count):
    for _ in range(count):
        hashlib.sha256(PIECE)


PIECES = _pieces_of_a_millisecond()


def compute_freely(ms):
    """Computes for `ms` milliseconds, nearly always without the lock."""
    _hash(round(ms * PIECES))


KINDS = (compute, compute_freely, wait)
# What threads and workers do at the same time, at most; without the lock, as there are two cores.
READS = {"0 threads": CALLER, "1 thread": ONE, "16 threads": MANY}
WEIGHTS = [0.6, 0.4]  # with equal ones, one of two workers gets all elements of a part
JOINS_TWO = ("mix", "zip", "iter.mix")
SEQUENTIAL_JOINS = ("iter.mix", "interleave")
CYCLE = 2  # so many parts of an interleave are open at a time
THREADS = {"0 threads": 1, "1 thread": 1, "16 threads": 16, "2 workers": 16}


@dataclasses.dataclass(frozen=True)
class Cheap(grain.transforms.Map):
    kind: Callable[[float], object]
    ms: float

    def map(self, element):
        return costs(self.kind, self.ms, element)


class Dear(Cheap):
    pass


@dataclasses.dataclass(frozen=True)
class CheapFilter(grain.transforms.Filter):
    kind: Callable[[float], object]
    ms: float

    def filter(self, element):  # noqa: ARG002
        return costs(self.kind, self.ms, True)  # noqa: FBT003


class DearFilter(CheapFilter):
    pass


@dataclasses.dataclass(frozen=True)
class CheapRandom(grain.transforms.RandomMap):
    kind: Callable[[float], object]
    ms: float

    def random_map(self, element, rng):  # noqa: ARG002
        return costs(self.kind, self.ms, element)


class DearRandom(CheapRandom):
    pass


@dataclasses.dataclass(frozen=True)
class CheapIndexed(grain.transforms.MapWithIndex):
    kind: Callable[[float], object]
    ms: float

    def map_with_index(self, index, element):  # noqa: ARG002
        return costs(self.kind, self.ms, element)


class DearIndexed(CheapIndexed):
    pass


def mapped(cheap, dear, ds, kind, ms, *, is_dear):
    return ds.map((dear if is_dear else cheap)(kind, ms))


def filtered(ds, kind, ms, *, is_dear):
    return ds.filter((DearFilter if is_dear else CheapFilter)(kind, ms))


def random_mapped(ds, kind, ms, *, is_dear):
    return ds.seed(1).random_map((DearRandom if is_dear else CheapRandom)(kind, ms))


def index_mapped(ds, kind, ms, *, is_dear):
    return ds.map_with_index((DearIndexed if is_dear else CheapIndexed)(kind, ms))


def same(element):
    return element


class CheapOwn(grain.IterDataset):
    """A user's own data set."""

    def __init__(self, parent, kind, ms):
        super().__init__(parent)
        self.kind, self.ms = kind, ms

    def __iter__(self):
        return CostlyIterator(self._parent.__iter__(), self.kind, self.ms)


class DearOwn(CheapOwn):
    pass


def own(ds, kind, ms, *, is_dear):
    return (DearOwn if is_dear else CheapOwn)(ds, kind, ms)


MAP = functools.partial(mapped, Cheap, Dear)
FUNCTIONS = {"map": MAP, "filter": filtered, "random map": random_mapped, "indexed": index_mapped}
# Those of sequential stages.
STEPS = {"map": MAP, "filter": filtered, "own": own}


@dataclasses.dataclass
class Place:
    """Where a function of the user runs.

    Attributes:
        per: How many elements of the source each of its elements has.
        threads: How many threads may run it at a time, and how many processes.
        weight: The share of elements that it sees.
    """

    name: str
    add: Callable[..., Any]
    kind: Callable[[float], object]
    per: float = 1.0
    threads: int = 1
    processes: int = 1
    weight: float = 1.0
    is_dear: bool = False

    @property
    def ms(self):
        if not self.is_dear:
            return CHEAP_MS
        if self.name == "consumer":  # dearer than the others together, or it waits for long
            return CHEAP_MS * 4 * DEARER * self.per
        at_a_time = {compute: 1, compute_freely: min(2, self.threads), wait: self.threads}
        return CHEAP_MS * DEARER * self.per * at_a_time[self.kind] * self.processes / self.weight

    def __call__(self, ds):
        return self.add(ds, self.kind, self.ms, is_dear=self.is_dear)


def source_of(place):
    if not place.is_dear:
        return numbers()
    return MapDataset.source(Source(place.kind, place.ms)).shuffle(seed=0)


def stepped(ds, kind, ms, *, is_dear):  # noqa: ARG001
    return ds  # the step is `Slow.consume`


class Draw:
    """Draws a pipeline: its places first, of which one is made dear, then its stages."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.places: list[Place] = []
        choice = self.random.choice
        self.mode = choice([*READS, "2 workers"])
        self.in_workers = self.mode != "2 workers" and self.random.random() < 0.4
        self.processes = 2 if self.in_workers or self.mode == "2 workers" else 1
        joins = ["", "", "", "mix", "zip", "concatenate", "iter.mix"]
        self.joint = choice(joins if self.mode == "2 workers" else [*joins, "interleave"])
        joins_sequential = self.joint in SEQUENTIAL_JOINS
        self.prefetches_parts = joins_sequential and choice([True, False])
        self.prefetch = choice(["", "", "one thread", "two threads"])
        if self.mode == "2 workers" and self.prefetch == "two threads":
            self.prefetch = "one thread"
        lanes = 2 if self.prefetch == "two threads" else 1
        self.threads = THREADS[self.mode] * lanes
        self.batch = 0 if joins_sequential else choice([0, 0, 0, 3])
        self.per = 1.0
        self.parts = [self._part() for _ in range(2 if self.joint in JOINS_TWO else 1)]
        self.joined = [] if joins_sequential else self._functions(self.random.randrange(2))
        self.per *= self.batch or 1
        self.batched = self._functions(1) if self.batch else []
        self.packs = not self.batch and self.joint != "zip" and choice([True, False])
        self.processes = 2 if self.in_workers else 1
        self.threads = lanes * (
            CYCLE if self.joint == "interleave" and self.prefetches_parts else 1
        )
        self.steps_of_parts = [
            self._functions(self.random.randrange(2), STEPS, self._weight)
            if joins_sequential
            else []
            for _ in self.parts
        ]
        self.threads = lanes
        self.sequential = self._functions(self.random.randrange(3), STEPS)
        self.per *= TOKENS_ROWS if self.packs else 1
        self.threads = 1
        self.rows = self._functions(self.random.randrange(2), STEPS)
        self.late_batch = choice([0, 0, 2])
        self.per *= self.late_batch or 1
        self.processes = 1
        self.delivered = self._functions(self.random.randrange(2), STEPS)
        self.step = Place("consumer", stepped, choice(KINDS), self.per)
        self.places += [self.step]
        self.dear = choice(self.places)
        self.dear.is_dear = True
        self.name = f"{seed}: {self.dear.name} {self.dear.kind.__name__} {self.dear.ms:.3g} ms"

    @property
    def _weight(self):
        """The share of the elements that come from a part."""
        return min(WEIGHTS) if self.joint in {"mix", "iter.mix"} else 1.0

    def _place(self, name, add, weight=1.0):
        place = Place(
            name,
            add,
            self.random.choice(KINDS),
            self.per,
            self.threads,
            self.processes,
            weight,
        )
        self.places.append(place)
        return place

    def _functions(self, count, functions=FUNCTIONS, weight=1.0):
        chosen = [self.random.choice(list(functions)) for _ in range(count)]
        if self.batch or self.joint == "zip":  # whose elements all must be there
            chosen = ["map" if name == "filter" else name for name in chosen]
        return [self._place(name, functions[name], weight) for name in chosen]

    def _part(self):
        source = self._place("source", None, self._weight)
        return [source, *self._functions(self.random.randrange(1, 3), weight=self._weight)]

    def _read(self, ds, steps=()):
        ds = ds.to_iter_dataset(READS.get(self.mode, WORKERS))
        ds = functools.reduce(lambda ds, place: place(ds), steps, ds)
        return prefetched(ds) if self.prefetches_parts and self.joint == "iter.mix" else ds

    def _interleaved(self, part):
        return grain.experimental.InterleaveIterDataset(
            [part] * 8, cycle_length=CYCLE, iter_buffer_size=4 if self.prefetches_parts else 1
        )

    def _prefetched(self, ds):
        if self.prefetch == "two threads":
            return grain.experimental.multithread_prefetch(ds, 2, 4)
        return prefetched(ds) if self.prefetch else ds

    def build(self):
        parts = []
        for source, *functions in self.parts:
            parts.append(
                functools.reduce(lambda ds, place: place(ds), functions, source_of(source))
            )
        if self.joint == "mix":
            ds = MapDataset.mix(parts, WEIGHTS)
        elif self.joint == "zip":
            ds = grain.experimental.ZipMapDataset(parts)
        elif self.joint == "concatenate":
            ds = MapDataset.concatenate([parts[0], parts[0]])
        else:
            ds = parts[0]
        ds = functools.reduce(lambda ds, place: place(ds), self.joined, ds)
        ds = ds.batch(self.batch) if self.batch else ds
        ds = functools.reduce(lambda ds, place: place(ds), self.batched, ds)
        if self.joint == "iter.mix":
            ds = grain.IterDataset.mix(list(map(self._read, parts, self.steps_of_parts)), WEIGHTS)
        elif self.joint == "interleave":
            ds = self._interleaved(self._read(ds, self.steps_of_parts[0]))
        else:
            ds = self._read(ds)
        ds = functools.reduce(lambda ds, place: place(ds), self.sequential, ds)
        ds = packed(ds.map(tokens)) if self.packs else ds
        ds = self._prefetched(ds)
        ds = functools.reduce(lambda ds, place: place(ds), self.rows, ds)
        ds = ds.batch(self.late_batch) if self.late_batch else ds
        ds = ds.mp_prefetch(MultiprocessingOptions(2)) if self.in_workers else ds
        ds = functools.reduce(lambda ds, place: place(ds), self.delivered, ds)
        return ds.map(same) if isinstance(ds, CheapOwn) else ds  # or it is the consumer


def random_pipeline(seed):
    """A pipeline, and what its verdict must say."""
    draw = Draw(seed)
    dear = draw.dear
    kinds, names = FUNCTION, "Dear"
    if dear.name == "source":
        kinds, names = ("storage function", "Source") if dear.kind is wait else (FUNCTION, "Source")
    elif dear is draw.step:
        kinds, names = "consumer", ""
    consume = functools.partial(draw.step.kind, draw.step.ms)
    joint = f"{draw.joint}{', parts prefetched' if draw.prefetches_parts else ''}"
    where = f"{draw.mode}{' in workers' if draw.in_workers else ''}"
    name = f"{draw.name} | {where} | {joint} | {draw.prefetch}"
    return Slow(name, draw.build, kinds, names, consume)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="*")
    options = parser.parse_args()
    began, right = time.perf_counter(), 0
    with busy_processes(options.busy):
        for seed in options.seeds or range(options.first, options.first + options.cases):
            pipeline = random_pipeline(seed)
            verdict = verdict_of(pipeline, SECONDS)
            if is_right(pipeline, verdict):
                right += 1
            else:
                print(
                    f"WRONG {pipeline.name}\n      {verdict.kind}: {verdict.text[:200]}", flush=True
                )
    print(f"right: {right} of {options.cases}; {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
