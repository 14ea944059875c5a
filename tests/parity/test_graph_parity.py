"""Drawings are compared with those of Grain, whose settings need a process of their own."""

import logging
import os
import subprocess
import sys

import pytest

import grainmill as grain

PIPELINES = """
import numpy as np

class Double(grain.transforms.Map):
    def map(self, x):
        return {"x": np.full(3, x, np.float32), "y": [1, 2], "z": (1, "a")}

def pipelines():
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    source = grain.MapDataset.source([1, 2, 3, 4])
    yield source.shuffle(seed=1).map(Double()).to_iter_dataset(read).batch(2)
    yield source.to_iter_dataset(read).map(str).filter(len)
    yield source[1:3].repeat(2).batch(2).to_iter_dataset(read)
    yield grain.MapDataset.range(4).seed(3).random_map(abs_of).to_iter_dataset(read)

def abs_of(x, rng):
    return abs(x)
"""

OF_GRAIN = f"""
import logging, sys
import grain
from absl import flags
from absl import logging as absl_logging
flags.FLAGS(["test"])
absl_logging.set_verbosity(absl_logging.INFO)
class Handler(logging.Handler):
    def emit(self, record):
        sys.stdout.write(record.getMessage() + chr(0))
absl_logging.get_absl_logger().addHandler(Handler())
grain.config.update("py_dataset_visualization_output_dir", "")
{PIPELINES}
for ds in pipelines():
    next(iter(ds))
    sys.stdout.write(chr(1))
"""


@pytest.fixture(scope="module")
def drawn_by_grain():
    env = dict(os.environ, JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-c", OF_GRAIN], capture_output=True, timeout=300, env=env, check=False
    )
    assert not done.returncode, done.stderr.decode()
    logged = done.stdout.decode().split("\1")[:-1]
    # Grain draws what leads to each iterator first; the last drawing is complete.
    return [messages.split("\0")[-2] for messages in logged]


def without_places(text):
    """Without where functions are defined, which differs between the two programs."""
    return "\n".join(line.partition(" @ ")[0].rstrip(")") for line in text.splitlines())


def test_drawings_are_those_of_grain(drawn_by_grain, caplog):
    caplog.set_level(logging.INFO, "grainmill")
    names = {"grain": grain}
    exec(PIPELINES, names)
    grain.config.update("py_dataset_visualization_output_dir", "")
    try:
        for ds in names["pipelines"]():
            next(iter(ds))
    finally:
        grain.config.update("py_dataset_visualization_output_dir", None)
    drawn = [record.getMessage() for record in caplog.records]
    assert len(drawn) == len(drawn_by_grain) == 4
    for own, grains in zip(drawn, drawn_by_grain, strict=True):
        assert without_places(own) == without_places(grains)
