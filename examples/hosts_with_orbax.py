"""Trains on several hosts, and saves model and data together with Orbax; then goes on from there.

    python examples/hosts_with_orbax.py --dir checkpoints

starts two processes on this machine, which stand for two hosts. Each reads its share of the data,
and their batches are the parts of one global array. They save every few steps and stop halfway, as
when they are preempted; two new processes restore the last step and go on. At the end, all losses
are compared with those of a run that never stopped. On a cluster, where `jax.distributed` finds the
processes by itself, start the same program on each host with `--on-this-host`.
"""

import argparse
import functools
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import grainmill as grain

GLOBAL_BATCH = 16
NUM_FEATURES = 8
SAVED_EVERY = 4


def element(number: int) -> dict[str, np.ndarray]:
    """Numbers, and a sum of them that the model is to find."""
    x = np.random.default_rng(number).normal(size=NUM_FEATURES).astype(np.float32)
    return {"x": x, "y": x @ np.arange(NUM_FEATURES, dtype=np.float32)}


def pipeline(sharding: NamedSharding) -> grain.IterDataset:
    """Global batches: this process reads its share of them, and holds the rows of its devices."""
    shard = grain.sharding.ShardByJaxProcess()
    numbers = grain.MapDataset.range(10_000).shuffle(seed=42).repeat()
    own = numbers[shard.shard_index :: shard.shard_count].map(element)
    batches = own.batch(GLOBAL_BATCH // shard.shard_count, drop_remainder=True)
    return grain.experimental.device_put(batches.to_iter_dataset(), sharding)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(weights: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    def loss_of(weights: jax.Array) -> jax.Array:
        return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


def train(directory: Path, num_steps: int) -> dict[int, float]:
    """Trains up to a step, from the last one that was saved; returns the loss of each step."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    weights = jax.device_put(jnp.zeros(NUM_FEATURES), NamedSharding(mesh, PartitionSpec()))
    iterator = iter(pipeline(NamedSharding(mesh, PartitionSpec("data"))))
    losses = {}
    options = ocp.CheckpointManagerOptions(save_interval_steps=SAVED_EVERY, max_to_keep=2)
    with iterator, ocp.CheckpointManager(directory, options=options) as manager:
        last = manager.latest_step()
        if last is not None:
            args = ocp.args.Composite(
                model=ocp.args.StandardRestore({"weights": weights}),
                data=grain.checkpoint.CheckpointRestore(iterator),
            )
            weights = manager.restore(last, args=args)["model"]["weights"]
        for step in range((last or 0) + 1, num_steps + 1):
            weights, loss = train_step(weights, next(iterator))
            losses[step] = float(loss)
            args = ocp.args.Composite(
                model=ocp.args.StandardSave({"weights": weights}),
                data=grain.checkpoint.CheckpointSave(iterator),
            )
            manager.save(step, args=args)  # does nothing between the steps that are due
    return losses


def train_as(process: int, options: argparse.Namespace) -> None:
    """Trains as one of the processes on this machine; the first prints the losses."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{options.port}", options.processes, process)
    losses = train(options.dir, options.steps)
    if process == 0:
        print(json.dumps(losses))
    jax.distributed.shutdown()


def launch(directory: Path, num_steps: int, num_processes: int) -> dict[int, float]:
    """Starts all processes and returns the losses."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command: list[Any] = [sys.executable, __file__, "--dir", directory, "--steps", num_steps]
    command += ["--port", port, "--processes", num_processes]
    started = [
        subprocess.Popen(
            [*map(str, command), "--process", str(n)], stdout=subprocess.PIPE, text=True
        )
        for n in range(num_processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("a process failed")
    return {int(step): loss for step, loss in json.loads(outputs[0].splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="of the checkpoints, seen by all hosts")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--on-this-host", action="store_true", help="one process of a cluster")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        train_as(options.process, options)
        return
    if options.on_this_host:
        jax.distributed.initialize()
        print(train(options.dir, options.steps))
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = (options.dir or Path(folder) / "checkpoints").absolute()
        before = launch(directory, options.steps // 2, options.processes)
        print(f"stopped after step {max(before)}: loss {before[max(before)]:.4f}")
        after = launch(directory, options.steps, options.processes)
        print(f"went on with step {min(after)}; step {max(after)}: loss {after[max(after)]:.4f}")
        whole = launch(Path(folder) / "never stopped", options.steps, options.processes)
    if whole != before | after:
        sys.exit("the losses differ from those of a run that never stopped")
    print("all losses are those of a run that never stopped")


if __name__ == "__main__":
    main()
