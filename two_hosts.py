import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import grainmill as grain

process_index, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_cpu_collectives_implementation", "gloo")  # CPUs only
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process_index)

shard = grain.sharding.ShardByJaxProcess()
ds = grain.MapDataset.range(64).shuffle(seed=0).repeat()
ds = ds[shard.shard_index :: shard.shard_count].batch(16 // shard.shard_count)

mesh = Mesh(np.array(jax.devices()), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))
batches = grain.experimental.device_put(ds.to_iter_dataset(), split)
with iter(batches) as iterator:
    batch = next(iterator)
    total = jax.jit(lambda x: x.sum())(batch)
    if process_index == 0:
        print(batch.shape, len(batch.addressable_shards), int(total))
jax.distributed.shutdown()
