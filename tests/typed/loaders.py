"""`DataLoader`, with transforms, with operations of the older kind and without any."""

from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import grainmill as grain
import grainmill.python as pygrain
from grainmill import transforms


class Square(transforms.Map):
    """A map."""

    def map(self, element: int) -> int:
        return element * element


def doubled(records: Iterator[grain.Record[int]]) -> Iterator[grain.Record[int]]:
    for record in records:
        yield grain.Record(record.metadata, 2 * record.data)


def elements_of(loader: grain.DataLoader) -> list[Any]:
    return list(loader)


def main() -> None:
    sampler = grain.samplers.IndexSampler(
        num_records=8,
        shard_options=grain.sharding.NoSharding(),
        shuffle=True,
        num_epochs=1,
        seed=1,
    )
    assert_type(sampler[0], grain.RecordMetadata)
    assert_type(sampler[0].rng, np.random.Generator | None)

    plain = grain.DataLoader(data_source=range(8), sampler=sampler)
    assert_type(plain, grain.DataLoader[int])
    for element in plain:
        assert_type(element, int)
    assert_type(grain.load(range(8), num_epochs=1), grain.DataLoader[int])

    batches: grain.DataLoader[NDArray[np.int64]] = grain.DataLoader(
        data_source=range(8),
        sampler=sampler,
        operations=[Square(), transforms.Batch(2, drop_remainder=True)],
        worker_count=0,
        read_options=grain.ReadOptions(num_threads=1),
    )
    with iter(batches) as iterator:
        assert_type(iterator, grain.DataLoaderIterator[NDArray[np.int64]])
        assert_type(next(iterator), NDArray[np.int64])
        state = iterator.get_state()
        assert_type(state, bytes)
        following = next(iterator)
        iterator.set_state(state)
        assert np.array_equal(next(iterator), following)

    loaded = grain.load(
        range(8), num_epochs=1, shuffle=True, seed=1, transformations=[Square()], batch_size=2
    )
    assert_type(loaded, grain.DataLoader[Any])
    assert len(elements_of(loaded)) == 4

    older = grain.DataLoader(
        data_source=range(8),
        sampler=grain.samplers.SequentialSampler(8, grain.sharding.ShardOptions(0, 2)),
        operations=[doubled, pygrain.BatchOperation(2)],
    )
    assert_type(older, grain.DataLoader[Any])
    assert len(elements_of(older)) == 2

    halves: pygrain.MapOperation[int, float] = pygrain.MapOperation(lambda n: n / 2)
    even: pygrain.FilterOperation[int] = pygrain.FilterOperation(lambda n: n % 2 == 0)
    pairs: pygrain.BatchOperation[float, NDArray[Any]] = pygrain.BatchOperation(2)
    last = grain.DataLoader(data_source=range(8), sampler=sampler, operations=[even, halves, pairs])
    assert len(list(last)) == 2


if __name__ == "__main__":
    main()
