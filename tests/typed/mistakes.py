"""What type checkers must refuse: an error that is ignored but not made is an error too."""

import jax
import numpy as np

import grainmill as grain
import grainmill.python as pygrain
from grainmill import experimental, transforms
from grainmill.experimental import devise_put  # type: ignore[attr-defined] # noqa: F401
from grainmill.python.experimental import LimitDataset  # type: ignore[attr-defined] # noqa: F401


class Length(transforms.Map):
    """A map of texts."""

    def map(self, element: str) -> int:
        return len(element)


class Short(transforms.Filter):
    """A filter of texts."""

    def filter(self, element: str) -> bool:
        return len(element) < 3


class Operation:
    """No transform."""

    def __call__(self, element: int) -> int:
        return element


def only_texts(text: str) -> int:
    return len(text)


def limit(ds: grain.MapDataset[int], count: int) -> grain.MapDataset[int]:
    return ds[:count]


def names(ds: grain.IterDataset[int]) -> None:
    grain.Mapdataset.range(3)  # type: ignore[attr-defined]
    grain.experimental.ThreadPrefetchDataset(ds)  # type: ignore[attr-defined]
    experimental.device_putt(ds, jax.devices()[0])  # type: ignore[attr-defined]
    pygrain.experimental.LimitDataset(ds, 3)  # type: ignore[attr-defined]
    pygrain.MapTransforms()  # type: ignore[attr-defined]
    grain.sources.ArrayRecordSource("a")  # type: ignore[attr-defined]
    grain.transforms.Maps()  # type: ignore[attr-defined]
    print(grain.config.py_debug_mod)  # type: ignore[attr-defined]
    ds.shuffle(seed=1)  # type: ignore[attr-defined]
    grain.MapDataset.range(3).shufle(seed=1)  # type: ignore[attr-defined]
    iter(ds).get_stat()  # type: ignore[attr-defined]


def arguments(ds: grain.IterDataset[int]) -> None:
    experimental.device_put(ds, "gpu")  # type: ignore[arg-type]
    experimental.device_put(ds, jax.devices()[0], buffer_size=2)  # type: ignore[call-arg]
    experimental.LimitIterDataset(ds)  # type: ignore[call-arg]
    experimental.LimitIterDataset(ds, count="3")  # type: ignore[arg-type]
    grain.MapDataset.range(3).shuffle(seed="1")  # type: ignore[arg-type]
    grain.MapDataset.range(3).batch(2, drop_remainders=True)  # type: ignore[call-overload]
    grain.MapDataset.range(3).batch("2")  # type: ignore[call-overload]
    grain.MapDataset.range(3).pipe(limit, "2")  # type: ignore[arg-type]
    grain.MapDataset.range(3).pipe(limit)  # type: ignore[call-arg]
    grain.ReadOptions(num_thread=3)  # type: ignore[call-arg]
    ds.mp_prefetch(grain.ReadOptions())  # type: ignore[arg-type]
    grain.MapDataset.source(3)  # type: ignore[arg-type]
    grain.DataLoader(data_source=range(3), operations=[Length()])  # type: ignore[call-overload]


def elements(ds: grain.MapDataset[int]) -> None:
    ds.map(only_texts)  # type: ignore[arg-type]
    ds.map(Length())  # type: ignore[arg-type]
    ds.map(Short())  # type: ignore[arg-type]
    ds.filter(Short())  # type: ignore[arg-type]
    ds.filter(Length())  # type: ignore[arg-type]
    ds.filter(lambda n: n * "x")  # type: ignore[arg-type,return-value]
    ds.apply(Length())  # type: ignore[arg-type]
    ds.apply(Operation())  # type: ignore[call-overload]
    ds.batch(2, batch_fn=only_texts)  # type: ignore[arg-type]
    ds.map(str).map(Length()).map(Length())  # type: ignore[arg-type]
    ds.batch(2).map(only_texts)  # type: ignore[arg-type]
    wrong: grain.MapDataset[str] = ds.map(np.float32)  # type: ignore[arg-type]
    next(iter(ds)).tolist()  # type: ignore[attr-defined]
    grain.MapDataset.mix([ds, ds.to_iter_dataset()])  # type: ignore[arg-type]
    experimental.ZipMapDataset([ds.to_iter_dataset()])  # type: ignore[list-item]
    experimental.ThreadPrefetchIterDataset([1], prefetch_buffer_size=2)  # type: ignore[arg-type]
    del wrong
