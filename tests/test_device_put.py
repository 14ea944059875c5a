"""Batches on devices: placement, states, what is in flight, and the end of the threads."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from verdict_pipelines import Slow, verdict_of

import grainmill as grain
from grainmill.experimental import device_put

# Programs of one process all run in one, as JAX takes most of their time to start.
PROGRAMS = """
    import json, sys
    for line in sys.stdin:
        exec(json.loads(line), {})
        print(flush=True)
"""
DISTRIBUTED = """
    import sys
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    process, port = map(int, sys.argv[1:])
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
"""
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"


def batches(num_elements=24, batch_size=4):
    ds = grain.MapDataset.range(num_elements).map(lambda x: {"x": np.full((2,), x, np.int32)})
    return ds.shuffle(seed=3).batch(batch_size).to_iter_dataset()


def start_python(code, *arguments, xla_flags):
    """A Python process of its own, since JAX fixes its devices when it starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": ":".join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin(process, code):
    print(json.dumps(textwrap.dedent(code)), file=process.stdin, flush=True)


def result_of(process):
    """What a program that was begun printed as JSON."""
    lines = []
    while (line := process.stdout.readline()) not in {"\n", ""}:
        lines.append(line)
    assert line, process.communicate()[1]
    return json.loads(lines[-1])


@pytest.fixture(scope="module")
def on_eight_devices():
    """Runs a program where there are eight devices; returns its result."""
    process = start_python(PROGRAMS, xla_flags=EIGHT_DEVICES)

    def run(code):
        begin(process, code)
        return result_of(process)

    yield run
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def on_two_processes():
    """Runs a program in two processes with four devices each; returns both results."""
    port = free_port()
    code = DISTRIBUTED + PROGRAMS + "    jax.distributed.shutdown()\n"
    processes = [start_python(code, i, port, xla_flags=FOUR_DEVICES) for i in range(2)]

    def run(code):
        for process in processes:
            begin(process, code)
        return list(map(result_of, processes))

    yield run
    for process in processes:
        process.stdin.close()
    for process in processes:
        assert process.wait(timeout=60) == 0
        process.stdout.close()
        process.stderr.close()


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def test_batches_are_arrays_on_the_device():
    device = jax.devices()[0]
    found = list(device_put(batches(), device))
    assert len(found) == 6
    for batch, expected in zip(found, batches(), strict=True):
        assert isinstance(batch["x"], jax.Array)
        assert batch["x"].devices() == {device}
        np.testing.assert_array_equal(batch["x"], expected["x"])


def test_batches_are_not_overwritten_while_arrays_live():
    found = list(device_put(batches(num_elements=400), jax.devices()[0]))
    for batch, expected in zip(found, batches(num_elements=400), strict=True):
        np.testing.assert_array_equal(batch["x"], expected["x"])


def test_batches_are_split_over_the_devices_of_a_sharding(on_eight_devices):
    found = on_eight_devices(
        """
        import json
        import jax, numpy as np
        import grainmill as grain
        mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        ds = grain.MapDataset.range(48).batch(16).to_iter_dataset()
        ds = grain.experimental.device_put(ds, sharding)
        print(json.dumps([
            {str(shard.device.id): shard.data.tolist() for shard in batch.addressable_shards}
            for batch in ds
        ]))
        """
    )
    assert found == [
        {str(d): [16 * b + 2 * d, 16 * b + 2 * d + 1] for d in range(8)} for b in range(3)
    ]


def test_two_processes_hold_one_global_array(on_two_processes):
    code = """
        import json
        import jax, numpy as np
        import grainmill as grain
        process = jax.process_index()
        mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        ds = grain.MapDataset.range(32)[process::2].batch(8).to_iter_dataset()
        it = iter(grain.experimental.device_put(ds, sharding))
        found = []
        for batch in it:
            local = [shard.data.tolist() for shard in batch.addressable_shards]
            total = jax.jit(lambda x: x.sum())(batch)
            found.append({"shape": batch.shape, "local": local, "sum": int(total)})
        it.close()
        print(json.dumps(found))
        """
    for process_index, found in enumerate(on_two_processes(code)):
        mine = range(32)[process_index::2]
        assert [batch["shape"] for batch in found] == [[16], [16]]
        assert [batch["sum"] for batch in found] == [sum(range(16)), sum(range(16, 32))]
        local = [x for batch in found for shard in batch["local"] for x in shard]
        assert local == list(mine)


RAGGED = """
    import json
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import grainmill as grain
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    shardings = {
        "tokens": NamedSharding(mesh, P("data", "model")),
        "labels": {
            "length": NamedSharding(mesh, P("data")),
            "weights": NamedSharding(mesh, P("data")),
        },
        "step": NamedSharding(mesh, P()),
    }
    num_processes, process = jax.process_count(), jax.process_index()

    def element(x):
        labels = {"length": x, "weights": np.full(3, x / 2)}
        return {"tokens": np.full(6, x, np.uint16), "labels": labels}

    ds = grain.MapDataset.range(24)[process::num_processes].map(element)
    ds = ds.batch(8 // num_processes, drop_remainder=True).to_iter_dataset()
    ds = ds.map_with_index(lambda step, batch: {**batch, "step": step})
    it = iter(grain.experimental.device_put(ds, shardings))
    found = []
    for batch in it:
        total = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf.sum(), x))(batch)
        leaves = [batch["tokens"], *batch["labels"].values(), batch["step"]]
        found.append({
            "shapes": [leaf.shape for leaf in leaves],
            "dtypes": [str(leaf.dtype) for leaf in leaves],
            "specs": [str(leaf.sharding.spec) for leaf in leaves],
            "totals": jax.tree.map(float, total),
        })
    it.close()
    print(json.dumps(found))
    """


def ragged_batches():
    """What `RAGGED` must find: the same, whatever the number of processes."""
    for step in range(3):
        numbers = range(8 * step, 8 * step + 8)
        yield {
            "shapes": [[8, 6], [8], [8, 3], []],
            "dtypes": ["uint16", "int32", "float32", "int32"],
            "specs": [*map(str, (P("data", "model"), P("data"), P("data"), P()))],
            "totals": {
                "tokens": 6 * sum(numbers),
                "labels": {"length": sum(numbers), "weights": 1.5 * sum(numbers)},
                "step": step,
            },
        }


def test_each_leaf_of_a_ragged_batch_has_its_own_sharding(on_eight_devices):
    assert on_eight_devices(RAGGED) == list(ragged_batches())


def test_each_leaf_of_a_global_ragged_batch_has_its_own_sharding(on_two_processes):
    for found in on_two_processes(RAGGED):
        assert found == list(ragged_batches())


def test_elements_of_different_shapes_are_put_as_they_are():
    rows = [{"x": np.arange(n), "mask": [np.ones(n, bool)] * n} for n in range(1, 6)]
    ds = grain.MapDataset.source(rows).to_iter_dataset()
    found = list(device_put(ds, jax.devices()[0]))
    assert [batch["x"].shape for batch in found] == [(n,) for n in range(1, 6)]
    assert [len(batch["mask"]) for batch in found] == [1, 2, 3, 4, 5]
    for batch, row in zip(found, rows, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, row)


def test_a_slow_transfer_is_said_to_need_fewer_bytes(monkeypatch):
    put = jax.device_put

    def put_slowly(*args):
        time.sleep(0.02)
        return put(*args)

    monkeypatch.setattr(jax, "device_put", put_slowly)
    ds = device_put(batches(num_elements=400), jax.devices()[0])
    verdict = verdict_of(Slow("transfer", lambda: ds, kinds="function", names=""), seconds=0.5)
    assert verdict.kind == "function"
    assert "`DevicePut`" in verdict.text
    assert "send fewer bytes" in verdict.text


@pytest.mark.parametrize("batch_fn", [None, list])
def test_leaves_that_jax_has_no_type_for_are_refused_with_their_place(batch_fn):
    rows = [{"x": 1, "text": "one"}, {"x": 2, "text": "two"}]
    ds = grain.MapDataset.source(rows).batch(2, batch_fn=batch_fn).to_iter_dataset()
    with pytest.raises(TypeError, match="JAX") as raised:
        next(iter(device_put(ds, jax.devices()[0])))
    assert "DevicePut" in "\n".join(raised.value.__notes__)


@pytest.mark.parametrize("pad", [False, True])
def test_a_remainder_that_does_not_divide_is_refused_unless_padded(on_eight_devices, pad):
    code = """
        import functools, json
        import jax, numpy as np
        import grainmill as grain
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "data")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        padded = functools.partial(grain.experimental.batch_and_pad, batch_size=4)
        ds = grain.MapDataset.range(10).map(lambda x: {"x": x, "is_real": True})
        ds = ds.batch(4, batch_fn=padded if PAD else None).to_iter_dataset()
        it = iter(grain.experimental.device_put(ds, sharding))
        next(it), next(it)
        try:
            print(json.dumps({name: array.tolist() for name, array in next(it).items()}))
        except ValueError as error:
            print(json.dumps(str(error)))
        """
    found = on_eight_devices(code.replace("PAD", str(pad)))
    if pad:
        assert found == {"x": [8, 9, 0, 0], "is_real": [True, True, False, False]}
    else:
        # The words are those of JAX, before 0.5 and since.
        assert re.search("dimension size is 2|dimension 0 .* is equal to 2", found)


@pytest.mark.parametrize("sizes", [(4, 2), (1, 1), (0, 2), (2, 0), (0, 0)])
def test_state_is_that_of_the_delivered_batch(sizes):
    cpu_buffer_size, device_buffer_size = sizes
    ds = device_put(
        batches(),
        jax.devices()[0],
        cpu_buffer_size=cpu_buffer_size,
        device_buffer_size=device_buffer_size,
    )
    plain, it = iter(batches()), iter(ds)
    expected = [batch["x"].tolist() for batch in batches()]
    for k in range(7):
        state = it.get_state()
        assert state == plain.get_state()
        resumed = iter(ds)
        resumed.set_state(json.loads(json.dumps(state)))
        assert [batch["x"].tolist() for batch in resumed] == expected[k:]
        if k < 6:
            next(it)
            next(plain)
    it.close()


def test_another_number_of_processes_continues_what_was_on_devices():
    def on_device(process_index, num_processes):
        shard = grain.sharding.ShardOptions(process_index, num_processes)
        ds = grain.MapDataset.range(40).shuffle(seed=0)
        elastic = grain.experimental.ElasticIterator(ds, 8, shard)
        return iter(device_put(elastic, jax.devices()[0]))

    expected = list(grain.MapDataset.range(40).shuffle(seed=0))
    both = [on_device(i, 2) for i in range(2)]
    for step in range(2):
        found = np.stack([next(it) for it in both], axis=1).ravel()
        assert found.tolist() == expected[8 * step : 8 * step + 8]
    state = json.loads(json.dumps(both[1].get_state()))
    alone = on_device(0, 1)
    alone.set_state(state)
    assert [x for batch in alone for x in batch.tolist()] == expected[16:]
    for it in [*both, alone]:
        it.close()


def test_batches_in_flight_are_bounded():
    num_made = 0

    def counted(element):
        nonlocal num_made
        num_made += 1
        return element

    endless = grain.MapDataset.range(8).repeat().batch(2)
    ds = endless.to_iter_dataset(grain.ReadOptions(num_threads=0)).map(counted)
    it = iter(device_put(ds, jax.devices()[0], cpu_buffer_size=3, device_buffer_size=2))
    for num_delivered in range(1, 20):
        next(it)
        # What both buffers hold, and what each of the two threads has in hand.
        assert num_made <= num_delivered + 3 + 2 + 2
    deadline = time.monotonic() + 60
    while num_made < 19 + 3 + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert 19 + 3 + 2 <= num_made <= 19 + 3 + 2 + 2
    it.close()


def test_closing_early_ends_the_threads():
    before = set(threading.enumerate())
    ds = device_put(batches().map(lambda batch: batch), jax.devices()[0])
    it = iter(ds)
    next(it)
    assert set(threading.enumerate()) - before
    it.close()
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
    with pytest.raises(ValueError, match="closed iterator"):
        next(it)


def test_user_errors_arrive_in_their_place():
    def fails_at_two(element):
        if element == 2:
            raise RuntimeError("the third one")
        return element

    ds = grain.MapDataset.range(5).to_iter_dataset().map(fails_at_two)
    it = iter(device_put(ds, jax.devices()[0]))
    assert [int(next(it)), int(next(it))] == [0, 1]
    with pytest.raises(RuntimeError, match="the third one"):
        next(it)
    it.close()


def test_derived_seeds_count_three_nodes():
    ds = grain.MapDataset.range(3).seed(42).to_iter_dataset()
    drawn = [
        int(x)
        for x in device_put(ds, jax.devices()[0]).random_map(lambda _, rng: rng.integers(2**31))
    ]
    seed = np.random.SeedSequence([42, 5]).generate_state(1, np.uint32)[0]
    key = np.random.SeedSequence(int(seed)).generate_state(2, np.uint64)
    generators = [
        np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, i])) for i in range(3)
    ]
    assert drawn == [int(generator.integers(2**31)) for generator in generators]
