"""Trains on a mixture of data sets in buckets, as MaxText does: parsed, tokenized, packed, sharded.

    python examples/mixture_from_buckets.py \
        --mixture 's3://corpus/web/*.array_record:0.7;s3://corpus/code/*.tfrecord:0.3'

The files hold `tf.train.Example`s with a feature `text`; credentials are those that programs of the
provider find, too (`AWS_...`, `GOOGLE_...`, `AZURE_...`). Without `--mixture`, a server of S3 on
this machine (the package `moto`) stands in, and two small data sets are put there. The state is
saved halfway, and a second iterator shows that it continues with the same batches.
"""

import argparse
import contextlib
import functools
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import grainmill as grain
from grainmill import files

LENGTH = 128
WIDTH = 64
VOCABULARY = 256  # bytes stand in for a tokenizer: see `docs/parsing.md` for `Tokenize`
SOURCES = {
    ".array_record": grain.sources.ArrayRecordDataSource,
    ".tfrecord": grain.sources.TFRecordDataSource,
}
Batch = dict[str, Any]


@contextlib.contextmanager
def stand_in() -> Iterator[str]:
    """Yields a mixture of data sets in a bucket that lasts as long as this."""
    import boto3  # noqa: PLC0415 - only the stand-in needs these
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "testing"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="corpus")
    texts = {
        "web": "the price of tea in week {} was {} pence a pound",
        "code": "for i in range({}): total += {}",
    }
    with tempfile.TemporaryDirectory() as folder:
        for (name, text), suffix in zip(texts.items(), SOURCES, strict=True):
            lines = Path(folder) / f"{name}.jsonl"
            documents = (text.format(n, n * n) for n in range(500))
            lines.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
            output = f"s3://corpus/{name}/{name}@2{suffix}"
            files.convert(str(lines), output, content="example")
    try:
        yield "s3://corpus/web/*.array_record:0.7;s3://corpus/code/*.tfrecord:0.3"
    finally:
        server.stop()


# --- Data: from buckets to packed batches on all devices ----------------------------------------


def tokens(element: dict[str, bytes]) -> dict[str, np.ndarray]:
    """The tokens of a text, and for each of them the next one."""
    ids = np.frombuffer(element["text"][: LENGTH + 1], np.uint8).astype(np.int32)
    return {"inputs": ids[:-1], "targets": ids[1:]}


def part(path: str) -> grain.IterDataset:
    """The texts of one part of the mixture, endlessly; this process reads its share of them."""
    (suffix,) = (suffix for suffix in SOURCES if path.endswith(suffix))
    parse = grain.transforms.ParseExample({"text": grain.transforms.Feature(bytes, shape=())})
    texts = grain.MapDataset.source(SOURCES[suffix](path)).shuffle(seed=1).repeat()
    texts = texts[jax.process_index() :: jax.process_count()]
    return texts.map(parse).map(tokens).to_iter_dataset()


def pipeline(mixture: str, rows: int) -> grain.IterDataset:
    """Batches of packed rows, each process its part of them, divided among all devices."""
    ds = grain.experimental.mix_from_text(mixture, part)
    ds = grain.experimental.FirstFitPackIterDataset(
        ds,
        length_struct={"inputs": LENGTH, "targets": LENGTH},
        num_packing_bins=rows // jax.process_count(),
    )
    batches = ds.batch(rows // jax.process_count(), drop_remainder=True)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    return grain.experimental.device_put(batches, sharding)


# --- Model: the next token by the last one, and by where it stands ------------------------------


def loss_of(params: Batch, batch: Batch) -> jax.Array:
    hidden = params["token"][batch["inputs"]] + params["position"][batch["inputs_positions"]]
    log_probs = jax.nn.log_softmax(jax.nn.relu(hidden) @ params["out"])
    losses = -jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
    real = batch["targets_segment_ids"] != 0
    return jnp.sum(losses * real) / jnp.sum(real)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(params: Batch, batch: Batch) -> tuple[Batch, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 2.0 * g, params, gradients), loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixture", help="PATTERN:WEIGHT;PATTERN:WEIGHT...")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16, help="in a batch, of all processes")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        mixture = options.mixture or stack.enter_context(stand_in())
        for path, weight in grain.experimental.parse_mixture(mixture).items():
            print(f"{float(weight):.0%} from {len(grain.sources.expand_paths(path))} files: {path}")
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = {
            "token": (VOCABULARY, WIDTH),
            "position": (LENGTH, WIDTH),
            "out": (WIDTH, VOCABULARY),
        }
        params = {
            name: jax.random.normal(key, shape) / 8
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        state: Any = None
        later = []
        with iter(pipeline(mixture, options.rows)) as batches:
            for step in range(options.steps):
                if step == options.steps // 2:
                    state = json.loads(json.dumps(batches.get_state()))
                batch = next(batches)
                params, loss = train_step(params, batch)
                if state is not None:
                    later.append(batch["inputs"].addressable_data(0))
                if step in {0, options.steps - 1}:
                    print(f"step {step + 1}: loss {float(loss):.3f}")
        with iter(pipeline(mixture, options.rows)) as resumed:
            resumed.set_state(state)
            for inputs in later:
                np.testing.assert_array_equal(next(resumed)["inputs"].addressable_data(0), inputs)
        print(f"resumed at step {options.steps // 2}: {len(later)} batches are the same")


if __name__ == "__main__":
    main()
