"""Tries an installed grainmill, with nothing but its dependencies: every layer once, in seconds."""

import json
import os
import sys
import sysconfig
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

import numpy as np

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter

RECORDS = 200


def decode(record: bytes) -> dict[str, np.ndarray]:
    """The tokens of a record, and the process that decoded it."""
    tokens = np.asarray(json.loads(record), np.int32)
    return {"tokens": tokens, "process": np.asarray([os.getpid()])}


def packed(source: grain.sources.ArrayRecordDataSource, workers: int) -> grain.IterDataset:
    """Packed batches of the shuffled records, endlessly."""
    ds = grain.MapDataset.source(source).shuffle(seed=42).repeat().map(decode)
    options = grain.ReadOptions(num_workers=workers)
    ds = ds.to_iter_dataset(options).map(lambda element: {"tokens": element["tokens"]})
    ds = grain.experimental.FirstFitPackIterDataset(
        ds, length_struct={"tokens": 64}, num_packing_bins=8
    )
    return ds.batch(4)


def check(folder: Path) -> None:
    """Raises where the package does not do what it should."""
    path = str(folder / "numbers.array_record")
    with ArrayRecordWriter(path, "group_size:8,zstd") as writer:
        for n in range(RECORDS):
            writer.write(json.dumps(list(range(n % 60 + 1))).encode())
    source = grain.sources.ArrayRecordDataSource(path)
    assert len(source) == RECORDS

    batches = iter(packed(source, workers=0))
    seen = [next(batches)["tokens"] for _ in range(5)]
    state = json.loads(json.dumps(batches.get_state()))
    expected = [next(batches)["tokens"] for _ in range(5)]
    assert all(batch.shape == (4, 64) for batch in seen)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # workers are threads on this system
        with iter(packed(source, workers=2)) as resumed:
            resumed.set_state(state)
            for batch in expected:
                np.testing.assert_array_equal(next(resumed)["tokens"], batch)
        rows = grain.MapDataset.source(source).map(decode)
        elements = list(rows.to_iter_dataset(grain.ReadOptions(num_workers=2)))
    lengths = [element["tokens"].size for element in elements]
    assert lengths == [n % 60 + 1 for n in range(RECORDS)]
    processes = {int(element["process"][0]) for element in elements}
    in_threads = sys.platform != "linux" or sysconfig.get_config_var("Py_GIL_DISABLED")
    assert (processes == {os.getpid()}) == bool(in_threads), processes

    array = grain.multiprocessing.SharedMemoryArray((3,), np.int32)
    array.unlink_on_del()
    array[:] = 7
    assert array.sum() == 21


if __name__ == "__main__":
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        assert not sys._is_gil_enabled(), "importing grainmill has enabled the interpreter lock"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        check(Path(folder))
    print("grainmill", metadata.version("grainmill"), "in", Path(grain.__file__).parent, "works")
