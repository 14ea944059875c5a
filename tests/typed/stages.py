"""Stages that are classes, worker processes, and batches on devices."""

from typing import Any, assert_type

import jax
import numpy as np
from numpy.typing import NDArray

import grainmill as grain
from grainmill import experimental
from grainmill.experimental import device_put


def begin(worker_index: int, worker_count: int) -> None:
    assert worker_index < worker_count


def main() -> None:
    ds = grain.MapDataset.range(12).to_iter_dataset()
    assert_type(ds, grain.IterDataset[int])
    assert_type(
        experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2),
        experimental.ThreadPrefetchIterDataset[int],
    )
    assert_type(experimental.multithread_prefetch(ds, 2, 4), grain.IterDataset[int])
    assert_type(
        experimental.LimitIterDataset(grain.MapDataset.range(9), 3),
        experimental.LimitIterDataset[int],
    )
    repeated = experimental.RepeatIterDataset(experimental.CacheIterDataset(ds), num_epochs=2)
    assert_type(repeated, experimental.RepeatIterDataset[int])
    assert_type(experimental.LimitIterDataset(repeated, 3), experimental.LimitIterDataset[int])
    assert_type(
        experimental.TakeWhileIterDataset(ds, lambda n: n < 3),
        experimental.TakeWhileIterDataset[int],
    )
    assert_type(
        experimental.WindowShuffleIterDataset(ds, window_size=4, seed=1).batch(3),
        grain.IterDataset[NDArray[Any]],
    )
    assert_type(
        experimental.WindowShuffleMapDataset(grain.MapDataset.range(9), window_size=4, seed=1),
        experimental.WindowShuffleMapDataset[int],
    )
    options = experimental.DatasetOptions(filter_raise_threshold_ratio=0.5)
    assert_type(
        experimental.WithOptionsIterDataset(ds, options), experimental.WithOptionsIterDataset[int]
    )
    prefetched = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=1), begin)
    assert_type(prefetched, grain.IterDataset[int])
    assert_type(ds.pipe(experimental.LimitIterDataset, 2), experimental.LimitIterDataset[int])

    # JAX does not tell pyright what a device is.
    first = jax.devices()[0]  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    device = jax.sharding.SingleDeviceSharding(first)  # pyright: ignore[reportUnknownArgumentType]
    features = ds.map(lambda n: {"x": np.full(2, n, np.float32)}).batch(2)
    assert_type(device_put(features, device), grain.IterDataset[Any])
    on_device: grain.IterDataset[dict[str, jax.Array]] = grain.experimental.device_put(
        features, device, cpu_buffer_size=1, device_buffer_size=1
    )
    for batch in on_device:
        assert_type(batch, dict[str, jax.Array])

    spec = experimental.get_element_spec(grain.MapDataset.range(3).batch(2))
    assert_type(spec, Any)
    padded = experimental.batch_and_pad([1, 2, 3], batch_size=4)
    assert padded.shape == (4,)
    assert_type(experimental.index_shuffle(3, max_index=9, seed=1, rounds=4), int)


if __name__ == "__main__":
    main()
