"""A program in the style of Kauldron: no threads, transforms told apart by `match`, a mixture."""

import dataclasses
import json
import os

import numpy as np
from absl import app
from grain import python as grain
from grain._src.core import constants


@dataclasses.dataclass(frozen=True)
class Scale(grain.MapTransform):
    factor: int

    def map(self, element):
        return {name: value * self.factor for name, value in element.items()}


@dataclasses.dataclass(frozen=True)
class Noise(grain.RandomMapTransform):
    def random_map(self, element, rng):
        return {**element, "noise": rng.integers(1000)}


@dataclasses.dataclass(frozen=True)
class Odd(grain.FilterTransform):
    def filter(self, element):
        return bool(element["x"] % 2)


def applied(ds, transform):
    match transform:
        case grain.MapTransform():
            return ds.map(transform)
        case grain.RandomMapTransform():
            return ds.random_map(transform)
        case grain.FilterTransform():
            return ds.filter(transform)
        case grain.Batch():
            return ds.batch(transform.batch_size, drop_remainder=transform.drop_remainder)
        case _:
            raise TypeError(transform)


def record_worker(index, count):
    os.environ["WORKER"] = f"{index} of {count}"


def worker_of(element):
    assert os.environ["WORKER"].endswith("of 2")
    return element


def one(start, transforms):
    source = [{"x": np.int64(start + i), constants.INDEX: i} for i in range(30)]
    ds = grain.MapDataset.source(source).seed(7)[1::3].shuffle(seed=5)
    for transform in transforms:
        ds = applied(ds, transform)
    return ds


def main(argv):
    transforms = [Scale(3), Noise(), Odd()]
    assert {"_index", "_seed"} <= constants.META_FEATURES
    first, second = one(0, transforms), one(1000, [Noise()])
    out = {
        "arguments": len(argv),
        "lengths": [len(first), len(second)],
        "element": int(second[3]["noise"]),
    }
    ds = grain.MapDataset.mix([first, second], weights=[1, 3]).repeat()
    out["endless"] = len(ds)
    read_options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    ds = ds.to_iter_dataset(read_options=read_options).map(worker_of)
    ds = applied(ds, grain.Batch(4, drop_remainder=True))
    ds = ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2), worker_init_fn=record_worker)
    iterator = iter(ds)
    out["batches"] = [
        {name: values.tolist() for name, values in sorted(next(iterator).items())} for _ in range(4)
    ]
    out["state"] = iterator.get_state()
    print(json.dumps(out))


if __name__ == "__main__":
    app.run(main)
