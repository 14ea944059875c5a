"""A program in the style of Orbax: the position of a `DataLoader` is saved beside the model."""

import json
import sys

import grain.python as grain
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import app


class Words:
    """Records, with a text of their own for saved states."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"text": np.frombuffer(f"{index:04d}".encode(), np.uint8)}

    def __repr__(self):
        return f"Words({self.count})"


class Last(grain.RandomMapTransform):
    def random_map(self, element, rng):
        return {"last": element["text"][-1], "noise": rng.integers(100)}


class Reverse:
    """A sampler with no more than what is needed."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return grain.RecordMetadata(index=index, record_key=self.count - 1 - index)

    def __repr__(self):
        return f"Reverse({self.count})"


class First(grain.MapTransform):
    def map(self, element):
        return {"first": element["text"][0]}


def listed(batch):
    return {name: np.asarray(values).tolist() for name, values in sorted(batch.items())}


def main(argv):
    directory = argv[1]
    loader = grain.DataLoader(
        data_source=Words(40),
        sampler=grain.IndexSampler(
            40, grain.ShardByJaxProcess(drop_remainder=True), shuffle=True, num_epochs=None, seed=4
        ),
        operations=[Last(), grain.Batch(3, drop_remainder=True)],
        worker_count=1,
        worker_buffer_size=2,
    )
    reverse = grain.DataLoader(
        data_source=Words(9),
        sampler=Reverse(9),
        operations=[First(), grain.BatchOperation(2)],
        shard_options=grain.NoSharding(),
    )
    out = {"reverse": [listed(batch) for batch in reverse]}
    iterator = iter(loader)
    out["first"] = [listed(next(iterator)) for _ in range(3)]
    out["state"] = json.loads(iterator.get_state().decode())
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(directory, options=options) as manager:
        args = ocp.args.Composite(
            model=ocp.args.StandardSave({"weights": jnp.arange(3)}),
            data=grain.PyGrainCheckpointSave(iterator),
        )
        manager.save(3, args=args)
        after = [listed(next(iterator)) for _ in range(3)]
        restored = iter(loader)
        args = ocp.args.Composite(
            model=ocp.args.StandardRestore({"weights": jnp.zeros(3, int)}),
            data=grain.PyGrainCheckpointRestore(restored),
        )
        weights = manager.restore(3, args=args)["model"]["weights"]
        assert [listed(next(restored)) for _ in range(3)] == after
    out["weights"] = weights.tolist()
    print(json.dumps(out))


if __name__ == "__main__":
    app.run(main, [sys.argv[0], sys.argv[1]])
