"""A small language for pipelines: operations as JSON, built with any module that has Grain's API.

`../shared/data/grain_vectors` uses it, and so do the resume and parity tests, so that the same
pipeline can be built in this process or in a new one, with grainmill or with Grain.
"""

import functools
import inspect
import itertools

import numpy as np

# --- functions a pipeline may refer to by name ---------------------------------------------------


def add_one(x):
    return x + 1


def times_two(x):
    return x * 2


def is_even(x):
    return x % 2 == 0


def not_mult_3(x):
    return x % 3 != 0


def is_small(x):
    return x < 6


def drop_mult_3(x):
    return None if x % 3 == 0 else x


def pair(i, x):
    return (i, x)


def add_index(i, x):
    return x + i


def rand_u32(x, rng):
    return (x, int(rng.integers(0, 2**32)))


def add_rand(x, rng):
    return x + int(rng.integers(0, 1000))


def rand_many(_, rng):
    return [
        int(rng.integers(0, 2**63)),
        float(rng.random()),
        float(rng.standard_normal()),
        int(rng.integers(0, 10)),
        rng.permutation(5).tolist(),
    ]


def to_dict(x):
    return {"a": np.arange(x % 3 + 1, dtype=np.int32), "b": int(x)}


def fixed_dict(x):
    return {"a": np.full((2,), x, dtype=np.float32), "b": {"c": np.int64(x)}}


def vec4(x):
    return {"t": np.arange(4, dtype=np.int64) + 10 * int(x)}


def _num_tokens(x):
    return (x * 7 + 3) % 9 + 1


def tokens(x):
    return {"tokens": np.arange(_num_tokens(x), dtype=np.int32) + 100 * (x + 1)}


def tokens2(x):
    return {
        "inputs": np.arange(_num_tokens(x), dtype=np.int32) + 100 * (x + 1),
        "targets": np.arange((x * 5 + 1) % 6 + 1, dtype=np.int64) + 1000 * (x + 1),
    }


def tokens_meta(x):
    return {**tokens(x), "id": np.array([x], dtype=np.int64)}


def tokens_free_meta(x):
    return {**tokens(x), "name": f"doc{x}"}


def tokens_group(x):
    return {**tokens(x), "epoch": np.full((_num_tokens(x),), x // 6 + 1, dtype=np.int32)}


def rekey(x):
    """What programs do with packed rows: other names, and new arrays beside the old ones."""
    return {f"new_{key}": value for key, value in x.items()} | {"rows": np.int64(len(x))}


def sum_pair(x):
    return x[0] + x[1]


def join_batch(xs):
    return sum(xs)


FUNCTIONS = {
    f.__name__: f
    for f in (
        add_one,
        times_two,
        is_even,
        not_mult_3,
        is_small,
        drop_mult_3,
        pair,
        add_index,
        rand_u32,
        add_rand,
        rand_many,
        to_dict,
        fixed_dict,
        vec4,
        tokens,
        tokens2,
        tokens_meta,
        tokens_free_meta,
        tokens_group,
        rekey,
        sum_pair,
        join_batch,
    )
}


@functools.cache
def functions(g):
    """The named functions; those that return datasets use module `g`."""

    def range_iter(x):
        return g.MapDataset.range(10 * x, 10 * x + x).to_iter_dataset()

    return {**FUNCTIONS, "range_iter": range_iter}


@functools.cache
def transforms(g):
    """Transform classes of module `g` that a pipeline may refer to by name."""

    class FanOut(g.experimental.FlatMapTransform):
        max_fan_out = 4

        def flat_map(self, element):
            return [element * 10 + j for j in range(element % 5)]

    class FanTwo(g.experimental.FlatMapTransform):
        max_fan_out = 2

        def flat_map(self, element):
            return [element, -element]

    class FanWide(g.experimental.FlatMapTransform):
        max_fan_out = 2

        def flat_map(self, element):
            return [element] * 3

    class AddRand(g.transforms.RandomMap):
        def random_map(self, element, rng):
            return rand_u32(element, rng)

    class Even(g.transforms.Filter):
        def filter(self, element):
            return element % 2 == 0

    class PlusOne(g.transforms.Map):
        def map(self, element):
            return element + 1

    class Indexed(g.transforms.MapWithIndex):
        def map_with_index(self, index, element):
            return (index, element)

    return {c.__name__: c for c in (FanOut, FanTwo, FanWide, AddRand, Even, PlusOne, Indexed)}


# --- users' own datasets -------------------------------------------------------------------------


@functools.cache
def user_datasets(g):
    """User-defined subclasses: with random access, and with an iterator that has its own state."""

    class ShiftMap(g.MapDataset):
        """Element `i` is the parent's plus 1000."""

        def __len__(self):
            return len(self._parent)

        def __getitem__(self, index):
            if isinstance(index, slice):
                return self.slice(index)
            element = self._parent[index]
            return None if element is None else element + 1000

    class TwiceIterator(g.DatasetIterator):
        """Each element of the parent twice; keeps track of which of the two is next."""

        def __init__(self, parent):
            super().__init__(parent)
            self._held = None
            self._before = None

        def __next__(self):
            if self._before is None:
                before = self._parent.get_state()
                self._held = next(self._parent)
                self._before = before
                return self._held
            self._before = None
            return self._held

        def get_state(self):
            if self._before is None:
                return {"parent": self._parent.get_state(), "second": 0}
            return {"parent": self._before, "second": 1}

        def set_state(self, state):
            self._parent.set_state(state["parent"])
            self._before = None
            if state["second"]:
                next(self)

    class Twice(g.IterDataset):
        """An `IterDataset` whose iterator wraps the parent's."""

        def __iter__(self):
            return TwiceIterator(self._parent.__iter__())

    class SquaresIterator(g.DatasetIterator):
        """A source without any parent."""

        def __init__(self, n):
            super().__init__()
            self._n = n
            self._next = 0

        def __next__(self):
            if self._next >= self._n:
                raise StopIteration
            self._next += 1
            return (self._next - 1) ** 2

        def get_state(self):
            return {"at": self._next}

        def set_state(self, state):
            self._next = state["at"]

    class Squares(g.IterDataset):
        """The first `n` squares."""

        def __init__(self, n):
            super().__init__()
            self._n = n

        def __iter__(self):
            return SquaresIterator(self._n)

    return {"ShiftMap": ShiftMap, "Twice": Twice, "Squares": Squares}


# --- building ------------------------------------------------------------------------------------


def build(g, ops):
    """The dataset that `ops` describe, built with module `g`."""
    dataset = None
    for name, *args in ops:
        options = args.pop() if args and isinstance(args[-1], dict) else {}
        dataset = getattr(_Ops, name)(g, dataset, *args, **options)
    return dataset


def _parts(g, parts):
    return [build(g, part) for part in parts]


class _Ops:
    """One function per operation, from `(module, dataset so far, arguments)` to a dataset."""

    # sources and joins
    range = staticmethod(lambda g, _, *args: g.MapDataset.range(*args))
    source = staticmethod(lambda g, _, elements: g.MapDataset.source(elements))
    mix = staticmethod(lambda g, _, parts, *w: g.MapDataset.mix(_parts(g, parts), *w))
    concat = staticmethod(lambda g, _, parts: g.MapDataset.concatenate(_parts(g, parts)))
    select = staticmethod(
        lambda g, _, parts, choices: g.MapDataset.select_from_datasets(_parts(g, parts), choices)
    )
    zip = staticmethod(lambda g, _, parts: g.experimental.ZipMapDataset(_parts(g, parts)))
    iter_mix = staticmethod(lambda g, _, parts, *w: g.IterDataset.mix(_parts(g, parts), *w))
    iter_zip = staticmethod(
        lambda g, _, parts, **kw: g.experimental.ZipIterDataset(_parts(g, parts), **kw)
    )
    interleave = staticmethod(
        lambda g, _, parts, **kw: g.experimental.InterleaveIterDataset(_parts(g, parts), **kw)
    )
    interleave_lazy = staticmethod(
        lambda g, ds, **kw: g.experimental.InterleaveIterDataset(ds, **kw)
    )

    @staticmethod
    def iter_mix_named(g, _, *, parts, weights):
        return g.IterDataset.mix({k: build(g, p) for k, p in parts.items()}, weights)

    # order
    seed = staticmethod(lambda _, ds, seed: ds.seed(seed))
    shuffle = staticmethod(lambda _, ds, *seed: ds.shuffle(*seed))
    slice = staticmethod(lambda _, ds, *bounds: ds.slice(slice(*bounds)))
    getslice = staticmethod(lambda _, ds, *bounds: ds[slice(*bounds)])
    reindex = staticmethod(lambda _, ds, indices: ds.slice(indices))
    repeat = staticmethod(lambda _, ds, *n, **kw: ds.repeat(*n, **kw))

    @staticmethod
    def window_shuffle(g, ds, window_size, seed):
        by_index = isinstance(ds, g.MapDataset)
        e = g.experimental
        cls = e.WindowShuffleMapDataset if by_index else e.WindowShuffleIterDataset
        return cls(ds, window_size=window_size, seed=seed)

    # elements
    map = staticmethod(lambda g, ds, f: ds.map(functions(g)[f]))
    filter = staticmethod(lambda g, ds, f: ds.filter(functions(g)[f]))
    random_map = staticmethod(lambda g, ds, f, **kw: ds.random_map(functions(g)[f], **kw))
    map_with_index = staticmethod(lambda g, ds, f: ds.map_with_index(functions(g)[f]))
    apply = staticmethod(lambda g, ds, *names: ds.apply([transforms(g)[n]() for n in names]))

    @staticmethod
    def flat_map(g, ds, transform):
        by_index = isinstance(ds, g.MapDataset)
        cls = g.experimental.FlatMapMapDataset if by_index else g.experimental.FlatMapIterDataset
        return cls(ds, transforms(g)[transform]())

    @staticmethod
    def batch(g, ds, batch_size, *, batch_fn=None, **kw):
        if batch_fn is not None:
            kw["batch_fn"] = functions(g)[batch_fn]
        return ds.batch(batch_size, **kw)

    @staticmethod
    def batch_and_pad(g, ds, batch_size, **kw):
        pad = functools.partial(g.experimental.batch_and_pad, batch_size=batch_size, **kw)
        return ds.batch(batch_size, batch_fn=pad)

    # iteration
    @staticmethod
    def to_iter(g, ds, *, allow_nones=False, **read_options):
        options = g.ReadOptions(**read_options) if read_options else None
        return ds.to_iter_dataset(options, allow_nones=allow_nones)

    take_while = staticmethod(
        lambda g, ds, name: g.experimental.TakeWhileIterDataset(ds, globals()[name])
    )
    limit = staticmethod(lambda g, ds, n: g.experimental.LimitIterDataset(ds, n))
    iter_repeat = staticmethod(lambda g, ds, *n: g.experimental.RepeatIterDataset(ds, *n))
    cache = staticmethod(lambda g, ds: g.experimental.CacheIterDataset(ds))
    rebatch = staticmethod(lambda g, ds, n, **kw: g.experimental.RebatchIterDataset(ds, n, **kw))
    thread_prefetch = staticmethod(
        lambda g, ds, n: g.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=n)
    )
    multithread_prefetch = staticmethod(
        lambda g, ds, threads, size, **kw: g.experimental.multithread_prefetch(
            ds, num_threads=threads, buffer_size=size, **kw
        )
    )

    @staticmethod
    def mp_prefetch(g, ds, num_workers, buffer_size, **kw):
        options = g.MultiprocessingOptions(
            num_workers=num_workers, per_worker_buffer_size=buffer_size
        )
        return ds.mp_prefetch(options, **kw)

    @staticmethod
    def options(g, ds, **kw):
        e = g.experimental
        return e.WithOptionsIterDataset(ds, e.DatasetOptions(**kw))

    # packing
    first_fit = staticmethod(lambda g, ds, **kw: g.experimental.FirstFitPackIterDataset(ds, **kw))
    best_fit = staticmethod(lambda g, ds, **kw: g.experimental.BestFitPackIterDataset(ds, **kw))

    @staticmethod
    def concat_split(g, ds, *, bos_handling=None, **kw):
        if bos_handling is not None:
            kw["bos_handling"] = getattr(g.experimental.BOSHandling, bos_handling)
        return g.experimental.ConcatThenSplitIterDataset(ds, **kw)

    # users' own
    user_map = staticmethod(lambda g, ds: user_datasets(g)["ShiftMap"](ds))
    user_twice = staticmethod(lambda g, ds: user_datasets(g)["Twice"](ds))
    user_squares = staticmethod(lambda g, _, n: user_datasets(g)["Squares"](n))


OPERATIONS = {name for name, _ in inspect.getmembers(_Ops) if not name.startswith("_")}


def lacking(g):
    """The operations that make a dataset of a class that module `g` does not have."""

    def has(name):
        return hasattr(g, name) or hasattr(g.experimental, name)

    made = {op: getattr(_Ops, op).__code__.co_names for op in OPERATIONS}
    return {
        op
        for op, names in made.items()
        if not all(has(name) for name in names if name.endswith("Dataset"))
    }


# --- comparing elements --------------------------------------------------------------------------


def encode(x):  # noqa: PLR0911
    """`x` as JSON with its types: equal encodings mean equal values, dtypes and containers."""
    match x:
        case np.ndarray() if x.dtype == object:
            return {"nd": ["object", list(x.shape), [encode(v) for v in x.ravel()]]}
        case np.ndarray():
            return {"nd": [str(x.dtype), list(x.shape), x.ravel().tolist()]}
        case np.generic():
            return {"nd": [str(x.dtype), [], [x.item()]]}
        case tuple():
            return {"tuple": [encode(v) for v in x]}
        case list():
            return [encode(v) for v in x]
        case dict():
            return {"dict": {str(k): encode(v) for k, v in x.items()}}
        case bytes():
            return {"bytes": x.hex()}
        case bool() | int() | float() | str() | None:
            return x
    return {"repr": repr(x)}


def take(iterator, n):
    """Up to `n` more elements, encoded immediately, so that later ones cannot change them."""
    return [encode(x) for x in itertools.islice(iterator, n)]


def close(iterator):
    """Closes `iterator` if it can be closed."""
    if hasattr(iterator, "close"):
        iterator.close()
