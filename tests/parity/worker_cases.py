"""Pipelines with worker processes, to be run with either module."""

import itertools

from pipelines import build, close, encode, transforms

_READ = {"num_threads": 0, "prefetch_buffer_size": 0}
# Few: a worker of Grain takes seconds to start.
PIPELINES = {
    "one_worker": [
        ["range", 11],
        ["shuffle", 3],
        ["to_iter", _READ],
        ["filter", "not_mult_3"],
        ["batch", 2],
        ["mp_prefetch", 1, 2],
    ],
    "three_workers": [
        ["range", 14],
        ["map", "tokens"],
        ["to_iter", _READ],
        ["first_fit", {"length_struct": {"tokens": 12}, "num_packing_bins": 2}],
        ["mp_prefetch", 3, 1],
        ["map_with_index", "pair"],
    ],
}
LOADERS = {"loader": 2}
CASES = [*PIPELINES, *LOADERS]


def _loader(g, num_workers):
    return g.DataLoader(
        data_source=g.sources.RangeDataSource(0, 17, 1),
        sampler=g.samplers.IndexSampler(17, shuffle=True, num_epochs=2, seed=5),
        operations=[transforms(g)["AddRand"](), g.transforms.Batch(3)],
        worker_count=num_workers,
        read_options=g.ReadOptions(0, 0),
    )


def _iterator(g, name):
    if name in LOADERS:
        return iter(_loader(g, LOADERS[name]))
    return iter(build(g, PIPELINES[name]))


def _as_json(state):
    return state.decode() if isinstance(state, bytes) else state


def run(g, name):
    """All elements, and the state before each and at the end."""
    iterator = _iterator(g, name)
    elements, states = [], []
    for element in iterator:
        elements.append(encode(element))
        states.append(_as_json(iterator.get_state()))
    close(iterator)
    return elements, states


def remaining(g, name, state):
    """The elements after `state`."""
    iterator = _iterator(g, name)
    iterator.set_state(state.encode() if name in LOADERS else state)
    found = [encode(element) for element in itertools.islice(iterator, 100)]
    close(iterator)
    return found
