"""Every parameter of every public stage, with values that are unusual, to be compared with Grain.

A case is a function of the module to use and of the value; it builds something, and what comes out
of it is compared.
"""

import contextlib
import warnings

import numpy as np
from pipelines import FUNCTIONS, close, encode

MAX_ELEMENTS = 20
LARGE, BEYOND_64_BITS = 2**32, 2**70
# None of them is a dataset, a function or a mapping; 100 is more than there are elements.
VALUES = [0, 1, 100, -1, None, 1.5, "x", True, np.int64(2), LARGE, BEYOND_64_BITS]
SMALL = [value for value in VALUES if value not in {LARGE, BEYOND_64_BITS}]


def _numbers(g, n=5):
    return g.MapDataset.range(n)


def _reading(g, dataset):
    return dataset.to_iter_dataset(g.ReadOptions(0, 0))


def _iter(g):
    return _reading(g, _numbers(g))


def _two(g):
    return [_iter(g), _reading(g, g.MapDataset.range(10, 13))]


def _named(g):
    return dict(zip("ab", _two(g), strict=True))


def _tokens(g):
    return _reading(g, _numbers(g, 6).map(FUNCTIONS["tokens"]))


def _odd(x):
    return x % 2


def _add_rand(x, rng):
    return x + int(rng.integers(9))


def _identity(x):
    return x


def _loader(g, **options):
    options = {
        "data_source": g.sources.RangeDataSource(0, 7, 1),
        "sampler": g.samplers.IndexSampler(7, num_epochs=1),
        "read_options": g.ReadOptions(0, 0),
        **options,
    }
    return g.DataLoader(**options)


def _load(g, **options):
    options = {"num_epochs": 1, "read_options": g.ReadOptions(0, 0), **options}
    return g.load(options.pop("source", g.sources.RangeDataSource(0, 4, 1)), **options)


def _pack(kind, **options):
    def make(g, value):
        chosen = {"length_struct": {"tokens": 12}, "num_packing_bins": 2, "seed": 0}
        for name, function in options.items():
            chosen[name] = function(value)
        return getattr(g.experimental, f"{kind}PackIterDataset")(_tokens(g), **chosen)

    return make


def _concat(**options):
    def make(g, value):
        chosen = {"length_struct": {"tokens": 8}}
        for name, function in options.items():
            chosen[name] = function(value)
        return g.experimental.ConcatThenSplitIterDataset(_tokens(g), **chosen)

    return make


def _replacing(name):
    def make(g, value):
        handling = g.experimental.BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS
        options = {"bos_token_id": 1, "bos_features": ["tokens"], name: value}
        return g.experimental.ConcatThenSplitIterDataset(
            _tokens(g), length_struct={"tokens": 8}, bos_handling=handling, **options
        )

    return make


def _feature(value):
    return {"tokens": value}


_MAP = {
    "range(stop)": lambda g, v: g.MapDataset.range(v),
    "range(start)": lambda g, v: g.MapDataset.range(v, 5),
    "range(step)": lambda g, v: g.MapDataset.range(0, 5, v),
    "range[i]": lambda g, v: _numbers(g)[v],
    "source(source)": lambda g, v: g.MapDataset.source(v),
    "source[i]": lambda g, v: g.MapDataset.source([1, 2, 3])[v],
    "shuffle[i]": lambda g, v: _numbers(g).shuffle(1)[v],
    "map[i]": lambda g, v: _numbers(g).map(lambda x: x + 1)[v],
    "repeat[i]": lambda g, v: _numbers(g).repeat(2)[v],
    "batch[i]": lambda g, v: _numbers(g).batch(2)[v],
    "slice[i]": lambda g, v: _numbers(g)[1:4][v],
    "shuffle(seed)": lambda g, v: _numbers(g).shuffle(v),
    "seed(seed)": lambda g, v: _numbers(g).seed(v).shuffle(),
    "seed(1).seed(seed)": lambda g, v: _numbers(g).seed(1).seed(v).shuffle(),
    "seed(seed).shuffle(3)": lambda g, v: _numbers(g).seed(v).shuffle(3),
    "repeat(num_epochs)": lambda g, v: _numbers(g).repeat(v)[:12],
    "repeat(reseed_each_epoch)": lambda g, v: _numbers(g).shuffle(1).repeat(2, reseed_each_epoch=v),
    "batch(batch_size)": lambda g, v: _numbers(g).batch(v),
    "batch(drop_remainder)": lambda g, v: _numbers(g).batch(2, drop_remainder=v),
    "batch(batch_fn)": lambda g, v: _numbers(g).batch(2, batch_fn=v),
    "map(transform)": lambda g, v: _numbers(g).map(v),
    "filter(transform)": lambda g, v: _numbers(g).filter(v),
    "map_with_index(transform)": lambda g, v: _numbers(g).map_with_index(v),
    "random_map(transform)": lambda g, v: _numbers(g).random_map(v, seed=1),
    "random_map(seed)": lambda g, v: _numbers(g).random_map(_add_rand, seed=v),
    "slice(sl)": lambda g, v: _numbers(g).slice(v),
    "[start:]": lambda g, v: _numbers(g)[v:],
    "[:stop]": lambda g, v: _numbers(g)[:v],
    "[::step]": lambda g, v: _numbers(g)[::v],
    "mix(datasets)": lambda g, v: g.MapDataset.mix(v),
    "mix(datasets=[., v])": lambda g, v: g.MapDataset.mix([_numbers(g), v]),
    "mix(weights)": lambda g, v: g.MapDataset.mix([_numbers(g)] * 2, v),
    "mix(weights=[1, v])": lambda g, v: g.MapDataset.mix([_numbers(g)] * 2, [1, v]),
    "mix(weights=[3, v])": lambda g, v: g.MapDataset.mix([_numbers(g)] * 2, [3, v]),
    "concatenate(datasets)": lambda g, v: g.MapDataset.concatenate(v),
    "concatenate([., v])": lambda g, v: g.MapDataset.concatenate([_numbers(g), v]),
    "select(selection_map)": lambda g, v: g.MapDataset.select_from_datasets([_numbers(g)] * 2, v),
    "select([(v, 0)])": lambda g, v: g.MapDataset.select_from_datasets([_numbers(g)] * 2, [(v, 0)]),
    "select([(0, v)])": lambda g, v: g.MapDataset.select_from_datasets([_numbers(g)] * 2, [(0, v)]),
    "to_iter_dataset(read_options)": lambda g, v: _numbers(g).to_iter_dataset(v),
    "to_iter_dataset(allow_nones)": lambda g, v: (
        _numbers(g).filter(_odd).to_iter_dataset(g.ReadOptions(0, 0), allow_nones=v)
    ),
    "apply(transformations)": lambda g, v: _numbers(g).apply(v),
    "apply(Batch(v))": lambda g, v: _numbers(g).apply(g.transforms.Batch(v)),
    "ZipMapDataset(parents)": lambda g, v: g.experimental.ZipMapDataset(v),
    "ZipMapDataset([., v])": lambda g, v: g.experimental.ZipMapDataset([_numbers(g), v]),
    "WindowShuffleMapDataset(window_size)": lambda g, v: g.experimental.WindowShuffleMapDataset(
        _numbers(g, 6), window_size=v, seed=1
    ),
    "WindowShuffleMapDataset(seed)": lambda g, v: g.experimental.WindowShuffleMapDataset(
        _numbers(g, 6), window_size=3, seed=v
    ),
    "FlatMapMapDataset(transform)": lambda g, v: g.experimental.FlatMapMapDataset(_numbers(g), v),
}
_ITER = {
    "iter.batch(batch_size)": lambda g, v: _iter(g).batch(v),
    "iter.batch(drop_remainder)": lambda g, v: _iter(g).batch(2, drop_remainder=v),
    "iter.batch(batch_fn)": lambda g, v: _iter(g).batch(2, batch_fn=v),
    "iter.map(transform)": lambda g, v: _iter(g).map(v),
    "iter.filter(transform)": lambda g, v: _iter(g).filter(v),
    "iter.map_with_index(transform)": lambda g, v: _iter(g).map_with_index(v),
    "iter.random_map(transform)": lambda g, v: _iter(g).random_map(v, seed=1),
    "iter.random_map(seed)": lambda g, v: _iter(g).random_map(_add_rand, seed=v),
    "iter.seed(seed)": lambda g, v: _iter(g).seed(v).random_map(_add_rand),
    "iter.seed(1).seed(seed)": lambda g, v: _iter(g).seed(1).seed(v).random_map(_add_rand),
    "iter.apply(transformations)": lambda g, v: _iter(g).apply(v),
    "IterDataset.mix(datasets)": lambda g, v: g.IterDataset.mix(v),
    "IterDataset.mix([., v])": lambda g, v: g.IterDataset.mix([_iter(g), v]),
    "IterDataset.mix(weights)": lambda g, v: g.IterDataset.mix(_two(g), v),
    "IterDataset.mix(weights=[1, v])": lambda g, v: g.IterDataset.mix(_two(g), [1, v]),
    "IterDataset.mix({}, weights)": lambda g, v: g.IterDataset.mix(_named(g), v),
    "IterDataset.mix({}, {a: 1, b: v})": lambda g, v: g.IterDataset.mix(
        _named(g), {"a": 1, "b": v}
    ),
    "mp_prefetch(options)": lambda g, v: _iter(g) if v is None else _iter(g).mp_prefetch(v),
    "multithread_prefetch(buffer_size)": lambda g, v: g.experimental.multithread_prefetch(
        _iter(g), 2, v
    ),
    "ThreadPrefetchIterDataset(size)": lambda g, v: g.experimental.ThreadPrefetchIterDataset(
        _iter(g), prefetch_buffer_size=v
    ),
    "LimitIterDataset(count)": lambda g, v: g.experimental.LimitIterDataset(_iter(g), v),
    "RepeatIterDataset(num_epochs)": lambda g, v: g.experimental.LimitIterDataset(
        g.experimental.RepeatIterDataset(_iter(g), v), 12
    ),
    "RebatchIterDataset(batch_size)": lambda g, v: g.experimental.RebatchIterDataset(
        _iter(g).batch(2), v
    ),
    "RebatchIterDataset(drop_remainder)": lambda g, v: g.experimental.RebatchIterDataset(
        _iter(g).batch(2), 3, v
    ),
    "WindowShuffleIterDataset(window_size)": lambda g, v: g.experimental.WindowShuffleIterDataset(
        _iter(g), window_size=v, seed=1
    ),
    "WindowShuffleIterDataset(seed)": lambda g, v: g.experimental.WindowShuffleIterDataset(
        _iter(g), window_size=3, seed=v
    ),
    "ZipIterDataset(parents)": lambda g, v: g.experimental.ZipIterDataset(v),
    "ZipIterDataset([., v])": lambda g, v: g.experimental.ZipIterDataset([_iter(g), v]),
    "ZipIterDataset(strict)": lambda g, v: g.experimental.ZipIterDataset(_two(g), strict=v),
    "FlatMapIterDataset(transform)": lambda g, v: g.experimental.FlatMapIterDataset(_iter(g), v),
    "InterleaveIterDataset(datasets)": lambda g, v: g.experimental.InterleaveIterDataset(
        v, cycle_length=2
    ),
    "InterleaveIterDataset([., v])": lambda g, v: g.experimental.InterleaveIterDataset(
        [_iter(g), v], cycle_length=2
    ),
    "InterleaveIterDataset(cycle_length)": lambda g, v: g.experimental.InterleaveIterDataset(
        _two(g), cycle_length=v
    ),
    "InterleaveIterDataset(iter_buffer_size)": lambda g, v: g.experimental.InterleaveIterDataset(
        _two(g), cycle_length=1, iter_buffer_size=v
    ),
    "InterleaveIterDataset(make_iter_buffer_size)": lambda g, v: (
        g.experimental.InterleaveIterDataset(_two(g), cycle_length=1, make_iter_buffer_size=v)
    ),
    "WithOptionsIterDataset(options)": lambda g, v: g.experimental.WithOptionsIterDataset(
        _iter(g), v
    ),
}
for _kind in ("FirstFit", "BestFit"):
    _ITER |= {
        f"{_kind}(length_struct)": _pack(_kind, length_struct=_identity),
        f"{_kind}(length_struct of a feature)": _pack(_kind, length_struct=_feature),
        f"{_kind}(num_packing_bins)": _pack(_kind, num_packing_bins=_identity),
        f"{_kind}(seed)": _pack(_kind, seed=_identity),
        f"{_kind}(shuffle_bins)": _pack(_kind, shuffle_bins=_identity),
        f"{_kind}(shuffle_bins_group_by_feature)": _pack(
            _kind, shuffle_bins_group_by_feature=_identity
        ),
        f"{_kind}(meta_features)": _pack(_kind, meta_features=_identity),
        f"{_kind}(meta_features=[v])": _pack(_kind, meta_features=lambda v: [v]),
        f"{_kind}(padding_struct)": _pack(_kind, padding_struct=_identity),
        f"{_kind}(padding_struct of a feature)": _pack(_kind, padding_struct=_feature),
        f"{_kind}(pack_alignment_struct)": _pack(_kind, pack_alignment_struct=_identity),
        f"{_kind}(pack_alignment_struct of a feature)": _pack(
            _kind, pack_alignment_struct=_feature
        ),
        f"{_kind}(max_sequences_per_bin)": _pack(_kind, max_sequences_per_bin=_identity),
    }
_ITER |= {
    "ConcatThenSplit(length_struct)": _concat(length_struct=_identity),
    "ConcatThenSplit(length_struct of a feature)": _concat(length_struct=_feature),
    "ConcatThenSplit(meta_features)": _concat(meta_features=_identity),
    "ConcatThenSplit(split_full_length_features)": _concat(
        length_struct=lambda _: {"tokens": 9}, split_full_length_features=_identity
    ),
    "ConcatThenSplit(bos_handling)": _concat(bos_handling=_identity),
    "ConcatThenSplit(bos_token_id, not used)": _concat(bos_token_id=_identity),
    "ConcatThenSplit(bos_token_id)": _replacing("bos_token_id"),
    "ConcatThenSplit(bos_features)": _replacing("bos_features"),
}
_OTHER = {
    "ReadOptions(num_threads)": lambda g, v: [repr(g.ReadOptions(num_threads=v))],
    "ReadOptions(prefetch_buffer_size)": lambda g, v: [repr(g.ReadOptions(prefetch_buffer_size=v))],
    "ShardOptions(shard_index)": lambda g, v: [repr(g.sharding.ShardOptions(v, 3))],
    "ShardOptions(shard_count)": lambda g, v: [repr(g.sharding.ShardOptions(0, v))],
    "SequentialSampler(num_records)": lambda g, v: [
        repr(g.samplers.SequentialSampler(v)),
        len(g.samplers.SequentialSampler(v)),
    ],
    "SequentialSampler(seed)": lambda g, v: [
        repr(g.samplers.SequentialSampler(3, seed=v)[0].record_key)
    ],
    "SequentialSampler[i]": lambda g, v: [str(g.samplers.SequentialSampler(3)[v])],
    "IndexSampler(num_records)": lambda g, v: [repr(g.samplers.IndexSampler(v))],
    "IndexSampler(num_epochs)": lambda g, v: [
        repr(g.samplers.IndexSampler(3, num_epochs=v)),
        len(g.samplers.IndexSampler(3, num_epochs=v)),
    ],
    "IndexSampler(shuffle, seed)": lambda g, v: [
        str(g.samplers.IndexSampler(3, shuffle=True, num_epochs=1, seed=v)[k].record_key)
        for k in range(3)
    ],
    "IndexSampler(seed)": lambda g, v: [
        str(g.samplers.IndexSampler(3, num_epochs=1, seed=v)[1].record_key)
    ],
    "IndexSampler[i]": lambda g, v: [str(g.samplers.IndexSampler(3, num_epochs=2)[v])],
    "RangeDataSource(stop)": lambda g, v: [
        repr(g.sources.RangeDataSource(0, v, 1)),
        len(g.sources.RangeDataSource(0, v, 1)),
    ],
    "RangeDataSource(step)": lambda g, v: [
        repr(g.sources.RangeDataSource(0, 5, v)),
        len(g.sources.RangeDataSource(0, 5, v)),
    ],
    "RangeDataSource[i]": lambda g, v: [g.sources.RangeDataSource(0, 5, 1)[v]],
    "Batch(batch_size)": lambda g, v: [str(g.transforms.Batch(v).batch_size)],
    "DataLoader(data_source)": lambda g, v: _loader(g, data_source=v),
    "DataLoader(sampler)": lambda g, v: _loader(g, sampler=v),
    "DataLoader(operations)": lambda g, v: _loader(g, operations=v),
    "DataLoader(operations=[v])": lambda g, v: _loader(g, operations=[v]),
    "DataLoader(worker_buffer_size)": lambda g, v: _loader(g, worker_buffer_size=v),
    "DataLoader(shard_options)": lambda g, v: _loader(g, shard_options=v),
    "DataLoader(read_options)": lambda g, v: _loader(g, read_options=v),
    "load(source)": lambda g, v: _load(g, source=v),
    "load(num_epochs)": lambda g, v: list(zip(range(12), _load(g, num_epochs=v), strict=False)),
    "load(seed)": lambda g, v: _load(g, shuffle=True, seed=v),
    "load(batch_size)": lambda g, v: _load(g, batch_size=v),
    "load(transformations)": lambda g, v: _load(g, transformations=v),
    "batch_and_pad(pad_value)": lambda g, v: [
        g.experimental.batch_and_pad([1, 2], batch_size=3, pad_value=v)
    ],
    "index_shuffle(index)": lambda g, v: [g.experimental.index_shuffle(v, 9, 1, 4)],
    "index_shuffle(max_index)": lambda g, v: [g.experimental.index_shuffle(0, v, 1, 4)],
    "index_shuffle(seed)": lambda g, v: [g.experimental.index_shuffle(0, 9, v, 4)],
}
# Numbers of threads, rows or bytes: a large one is allocated, or waited for.
_SMALL = {
    "MultiprocessingOptions(num_workers)": (
        [0, -1, None, "x"],
        lambda g, v: _iter(g).mp_prefetch(g.MultiprocessingOptions(num_workers=v)),
    ),
    "multithread_prefetch(num_threads)": (
        [0, 1, -1, None, "x"],
        lambda g, v: g.experimental.multithread_prefetch(_iter(g), v, 1),
    ),
    "InterleaveIterDataset(num_make_iter_threads)": (
        [0, 1, -1, None, 1.5, "x", True],
        lambda g, v: g.experimental.InterleaveIterDataset(
            _two(g), cycle_length=1, num_make_iter_threads=v
        ),
    ),
    "DataLoader(worker_count)": ([0, -1, "x"], lambda g, v: _loader(g, worker_count=v)),
    "batch_and_pad(batch_size)": (
        [0, 1, 2, 5, -1, None, "x"],
        lambda g, v: [g.experimental.batch_and_pad([1, 2], batch_size=v)],
    ),
    "index_shuffle(rounds)": (SMALL, lambda g, v: [g.experimental.index_shuffle(0, 9, 1, v)]),
}
for _name in [name for name in _ITER if "length_struct" in name or "num_packing_bins" in name]:
    _SMALL[_name] = (SMALL, _ITER.pop(_name))

CASES = {name: (VALUES, case) for name, case in {**_MAP, **_ITER, **_OTHER}.items()} | _SMALL


def outcome(g, case, value):
    """What `case` gives with `value`: ("ok", elements) or (when it failed, exception)."""
    when = "build"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = case(g, value)
            when = "read"
            if isinstance(built, list | int | float | np.generic | np.ndarray):
                return "ok", encode(built)
            length = len(built) if hasattr(built, "__len__") else None
            iterator = iter(built)
            elements = []
            with contextlib.suppress(StopIteration):
                while len(elements) < MAX_ELEMENTS:
                    elements.append(encode(next(iterator)))
            close(iterator)
            return "ok", [length, elements]
    except Exception as error:  # the two are compared
        return when, error
