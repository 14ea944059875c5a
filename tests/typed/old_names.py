"""The interface under its older names."""

from typing import assert_type

import grainmill.python as pygrain
from grainmill.python import experimental


class AddOne(pygrain.MapTransform):
    """A map."""

    def map(self, element: int) -> int:
        return element + 1


def main() -> None:
    ds = pygrain.MapDataset.source(pygrain.RangeDataSource(0, 5, 1)).map(AddOne())
    assert_type(ds, pygrain.MapDataset[int])
    assert_type(
        pygrain.experimental.WindowShuffleMapDataset(ds, window_size=2, seed=1),
        pygrain.experimental.WindowShuffleMapDataset[int],
    )
    assert_type(
        experimental.LimitIterDataset(ds.to_iter_dataset(), 2), experimental.LimitIterDataset[int]
    )
    shared = pygrain.InMemoryDataSource(["a", "b"])
    assert_type(pygrain.MapDataset.source(shared), pygrain.MapDataset[str])
    shared.close()
    shared.unlink()
    sampler = pygrain.IndexSampler(5, pygrain.ShardByJaxProcess(), num_epochs=1)
    loader = pygrain.DataLoader(data_source=range(5), sampler=sampler)
    assert_type(iter(loader), pygrain.PyGrainDatasetIterator[int])
    assert_type(pygrain.config.py_debug_mode, bool)


if __name__ == "__main__":
    main()
