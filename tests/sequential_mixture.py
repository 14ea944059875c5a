"""A weighted mixture of sequential datasets of lists of files, as MaxText trains on.

Worker processes import this module, so it imports little.
"""

import numpy as np

import grainmill as grain

LENGTH = 64
WEIGHTS = {"tfrecord": 0.2, "array_record": 0.5, "parquet": 0.3}
PARSE = grain.transforms.ParseExample({"text": grain.transforms.Feature(bytes)})


def component(package, files, kind):
    """The texts of files, read as MaxText reads them."""
    if kind == "array_record":
        source = package.MapDataset.source(package.sources.ArrayRecordDataSource(files))
        return source.shuffle(seed=7).repeat().to_iter_dataset().map(PARSE.map).map(tokens)
    experimental = package.experimental
    reader = {
        "tfrecord": experimental.TFRecordIterDataset,
        "parquet": experimental.ParquetIterDataset,
    }
    ds = package.MapDataset.source(files).shuffle(seed=3).repeat(4).map(reader[kind])
    ds = experimental.InterleaveIterDataset(ds, cycle_length=2)
    ds = experimental.WindowShuffleIterDataset(ds, window_size=20, seed=5)
    return (ds.map(PARSE.map) if kind == "tfrecord" else ds).map(tokens)


def sequential_pipeline(package, root, num_workers=0):
    components = {
        kind: component(package, grain.sources.expand_paths(f"{root}/{kind}/*.{kind}"), kind)
        for kind in WEIGHTS
    }
    ds = package.IterDataset.mix(components, WEIGHTS)
    lengths = {"inputs": LENGTH, "targets": LENGTH}
    ds = package.experimental.FirstFitPackIterDataset(ds, length_struct=lengths, num_packing_bins=4)
    ds = ds.batch(4, drop_remainder=True)
    if num_workers:
        ds = ds.mp_prefetch(package.MultiprocessingOptions(num_workers=num_workers))
    return ds


def continued(root, state, count):
    """The batches after a state."""
    iterator = iter(sequential_pipeline(grain, root))
    iterator.set_state(state)
    return taken(iterator, count)


def tokens(element):
    content = element["text"]
    content = content if isinstance(content, str) else content.decode()
    ids = np.frombuffer(content.encode(), np.uint8).astype(np.int32)[:LENGTH]
    return {"inputs": ids, "targets": np.roll(ids, -1)}


def taken(iterator, count):
    return [{key: value.tolist() for key, value in next(iterator).items()} for _ in range(count)]
