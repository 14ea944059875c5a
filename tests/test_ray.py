"""Shards written by tasks of a local Ray, which takes a few seconds to start."""

import os
import signal
import sys
from pathlib import Path

import pytest
import ray

import grainmill as grain
from grainmill.array_record import ArrayRecordReader
from grainmill.ray import materialize

pytestmark = [
    pytest.mark.better_than_grain("Grain has no such function"),
    # Ray leaves sockets and processes to the end of the interpreter.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
    # It forks to start them, where other tests may have imported JAX.
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    settings = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    ray.init(num_cpus=2, object_store_memory=100 << 20, runtime_env=environment, **settings)
    yield
    ray.shutdown()


def read_all(*paths):
    return [record for path in paths for record in ArrayRecordReader(path)]


@pytest.mark.usefixtures("cluster")
def test_shards_are_ranges_of_the_dataset_and_finished_ones_are_kept(tmp_path):
    ds = grain.MapDataset.range(100).shuffle(seed=1).map(lambda x: b"%d" % x)
    paths = [Path(path) for path in materialize(ds, 3, tmp_path / "out")]
    assert read_all(*paths) == list(ds)
    paths[1].unlink()
    before = [paths[0].stat().st_ino, paths[2].stat().st_ino]
    materialize(ds, 3, tmp_path / "out")
    assert [paths[0].stat().st_ino, paths[2].stat().st_ino] == before
    assert read_all(*paths) == list(ds)
    with pytest.raises(grain.GrainmillError, match="another pipeline"):
        materialize(ds.shuffle(seed=2), 3, tmp_path / "out")


@pytest.mark.usefixtures("cluster")
def test_worker_that_is_killed_is_replaced_and_errors_are_raised(tmp_path):
    marker = str(tmp_path / "killed")

    def killed_once(x):
        if x == 30 and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return b"%d" % x

    ds = grain.MapDataset.range(40)
    paths = materialize(ds.map(killed_once), 2, tmp_path / "out")
    assert Path(marker).exists()
    assert read_all(*paths) == [b"%d" % x for x in range(40)]
    assert not list(tmp_path.glob("*.part"))
    with pytest.raises(Exception, match="records must be `bytes`"):
        materialize(ds, 2, tmp_path / "other")
    assert not list(tmp_path.glob("other-0*"))
