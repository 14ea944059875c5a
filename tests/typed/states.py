"""States saved and restored."""

import json
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import grainmill as grain
from grainmill import experimental

Batch = dict[str, NDArray[np.int32]]


def pipeline(seed: int) -> grain.IterDataset[Batch]:
    ds = grain.MapDataset.range(20).shuffle(seed=seed).repeat(2)
    return ds.map(lambda n: {"n": np.full(3, n, np.int32)}).to_iter_dataset().batch(4)


def train(batches: grain.DatasetIterator[Batch], num_steps: int) -> int:
    return sum(int(next(batches)["n"].sum()) for _ in range(num_steps))


def main() -> None:
    with iter(pipeline(1)) as iterator:
        assert_type(iterator, grain.DatasetIterator[Batch])
        train(iterator, 3)
        state = iterator.get_state()
        assert_type(state, dict[str, Any])
        saved = json.dumps(state)
        rest = train(iterator, 2)
    iterator = pipeline(1).__iter__()
    iterator.set_state(json.loads(saved))
    assert train(iterator, 2) == rest
    iterator.close()

    shard = grain.sharding.ShardOptions(shard_index=0, shard_count=2)
    rows = grain.MapDataset.range(20).map(lambda n: {"n": np.full(3, n, np.int32)})
    elastic = experimental.ElasticIterator(rows, 4, shard)
    assert_type(elastic, experimental.ElasticIterator[Batch])
    train(elastic, 1)
    assert_type(elastic.get_state(), dict[str, Any])
    filtered = rows.to_iter_dataset().filter(lambda element: bool(element["n"][0] % 3))
    with experimental.ElasticIterator(filtered, 4, shard) as by_shard:
        assert_type(next(by_shard), Batch)
        by_shard.set_shard_states(by_shard.get_shard_states())
        assert_type(by_shard.map(len), grain.IterDataset[int])

    ahead = experimental.ThreadPrefetchDatasetIterator(iter(pipeline(1)), prefetch_buffer_size=2)
    assert_type(ahead, experimental.ThreadPrefetchDatasetIterator[Batch])
    with ahead as batches:
        batches.start_prefetch()
        assert_type(next(batches), Batch)
    numbers = iter(grain.MapDataset.range(20))
    experimental.set_next_index(numbers, 3)
    assert_type(experimental.get_next_index(numbers), int)
    assert next(numbers) == 3


if __name__ == "__main__":
    main()
