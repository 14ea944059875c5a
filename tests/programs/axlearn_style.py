"""A program in the style of AXLearn: classes of its own on private base classes, no workers."""

import json
import sys

import numpy as np
from grain import python as grain
from grain._src.core.sharding import even_split
from grain._src.python.data_loader import _determine_worker_count
from grain._src.python.dataset import dataset as dataset_lib
from grain._src.python.dataset.transformations import source as source_lib


class Unbatch(grain.IterDataset):
    """Elements of batches, one by one."""

    _MUTATES_ELEMENT_SPEC = True

    def __init__(self, parent, *, skip_empty=True):
        super().__init__(parent)
        self._skip_empty = skip_empty

    def __str__(self):
        return "Unbatch"

    def __iter__(self):
        return UnbatchIterator(self._parent.__iter__(), skip_empty=self._skip_empty)


class UnbatchIterator(dataset_lib.DatasetIterator):
    def __init__(self, parent, *, skip_empty):
        super().__init__(parent)
        self._skip_empty = skip_empty
        self._batch = None
        self._index = 0
        self._before = self._parent.get_state()

    def __next__(self):
        with self._stats.record_self_time():
            while self._batch is None or self._index == len(self._batch):
                self._before = self._parent.get_state()
                self._batch, self._index = next(self._parent), 0
            self._index += 1
            return self._stats.record_output_spec(self._batch[self._index - 1])

    def get_state(self):
        return {"parent": self._before, "index": self._index}

    def set_state(self, state):
        self._parent.set_state(state["parent"])
        self._batch, self._before = None, state["parent"]
        if state["index"]:
            self._batch = next(self._parent)
        self._index = state["index"]


class Reversed(dataset_lib.MapDataset):
    _MUTATES_ELEMENT_SPEC = False

    def __len__(self):
        return len(self._parent)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        with self._stats.record_self_time():
            position = len(self) - 1 - index % len(self)
        return self._parent[position]


def sources_of(ds):
    """Looks for the sources of a pipeline."""
    if isinstance(ds, source_lib.SourceMapDataset):
        return [ds]
    return [source for parent in ds.parents for source in sources_of(parent)]


def elements(iterator, count):
    return [int(next(iterator)) for _ in range(count)]


def main():
    counts = [_determine_worker_count(count) for count in (0, 3, None)]
    assert counts[2] > 0  # as the machine has cores
    out = {
        "worker_counts": counts[:2],
        "split": [even_split(11, grain.ShardOptions(shard, 3)) for shard in range(3)],
    }
    base = grain.MapDataset.source(np.arange(20)).seed(3).shuffle().repeat(2)
    assert len(grain.MapDataset.source(np.arange(20)).repeat()) == sys.maxsize
    ds = Reversed(base)
    assert isinstance(ds, dataset_lib.MapDataset)
    assert isinstance(ds, grain.MapDataset)
    out["sources"] = [len(source) for source in sources_of(ds)]
    out["element"] = int(ds[2])
    ds = ds.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)).batch(4)
    ds = Unbatch(ds).map(lambda x: x + 1).batch(3, drop_remainder=True)
    ds = Unbatch(ds).filter(lambda x: x % 2)
    iterator = iter(ds)
    out["first"] = elements(iterator, 6)
    state = out["state"] = json.loads(json.dumps(iterator.get_state()))
    rest = elements(iterator, 6)
    restored = iter(ds)
    restored.set_state(state)
    assert elements(restored, 6) == rest
    print(json.dumps(out))


if __name__ == "__main__":
    main()
