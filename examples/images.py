"""Trains a small convolutional network on handwritten digits with random augmentation.

The images are the 1,797 digits of scikit-learn, written compressed to ArrayRecord files. Every
time an image is read it is rotated and shifted with a random generator that the pipeline
provides. The generator depends only on the seed and on the position in the run, so a run can be
repeated, and resumed in the middle, with the same augmentation.

    python examples/images.py --epochs 12 --dir .cache/images
"""

import argparse
import math
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from scipy import ndimage
from sklearn.datasets import load_digits

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter

SIDE = 8
NUM_TEST = 360
Image = dict[str, np.ndarray]


# --- Images: from scikit-learn to ArrayRecord ------------------------------------------------


def encode(pixels: np.ndarray, label: int) -> bytes:
    """One record: the label in one byte, then the compressed pixels."""
    return bytes([label]) + zlib.compress(pixels.astype(np.uint8).tobytes())


def decode(record: bytes) -> Image:
    """The image and the label of one record, pixels from 0 to 1."""
    pixels = np.frombuffer(zlib.decompress(record[1:]), np.uint8).reshape(SIDE, SIDE)
    return {"image": pixels.astype(np.float32) / 16, "label": np.int32(record[0])}


def write_records(directory: Path) -> tuple[str, str]:
    """Writes the training and test images; returns both paths."""
    directory.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    records = [encode(*pair) for pair in zip(digits.images, digits.target, strict=True)]
    splits = {"train": records[NUM_TEST:], "test": records[:NUM_TEST]}
    paths = {name: str(directory / f"digits-{name}.array_record") for name in splits}
    for name, split in splits.items():
        writer = ArrayRecordWriter(paths[name], "group_size:1,zstd")
        for record in split:
            writer.write(record)
        writer.close()
    return paths["train"], paths["test"]


# --- Data: from ArrayRecord to batches on the device -----------------------------------------


def augment(element: Image, rng: np.random.Generator) -> Image:
    """The same digit, rotated by up to 15 degrees and shifted by up to one pixel."""
    angle = math.radians(rng.uniform(-15, 15))
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    center = np.full(2, (SIDE - 1) / 2)
    offset = center - rotation @ center + rng.uniform(-1, 1, size=2)
    image = ndimage.affine_transform(element["image"], rotation, offset, order=1)
    return {**element, "image": image}


def training_batches(path: str, batch_size: int, num_epochs: int) -> grain.IterDataset:
    """Batches of `num_epochs` epochs, each shuffled and augmented differently."""
    batches = (
        grain.MapDataset.source(grain.sources.ArrayRecordDataSource(path))
        .map(decode)
        .shuffle(seed=42)
        .repeat(num_epochs)
        .random_map(augment, seed=7)
        .batch(batch_size, drop_remainder=True)
        .to_iter_dataset()
    )
    return grain.experimental.device_put(batches, jax.local_devices()[0])


def test_batch(path: str) -> Image:
    """All test images, without augmentation."""
    source = grain.sources.ArrayRecordDataSource(path)
    return grain.MapDataset.source(source).map(decode).batch(len(source))[0]


# --- Model and training ----------------------------------------------------------------------


class Network(nnx.Module):
    """Two convolutions and a linear layer: logits of the ten digits."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.logits = nnx.Linear(32 * (SIDE // 2) ** 2, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.first(images[..., None]))
        x = nnx.relu(self.second(x))
        return self.logits(x.reshape(len(x), -1))


def loss_of(network: Network, batch: dict[str, jax.Array]) -> jax.Array:
    logits = network(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@nnx.jit
def train_step(network: Network, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]):
    """Updates the network with one batch and returns the loss before the update."""
    loss, gradients = nnx.value_and_grad(loss_of)(network, batch)
    optimizer.update(network, gradients)
    return loss


@nnx.jit
def accuracy(network: Network, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean(network(batch["image"]).argmax(axis=1) == batch["label"])


def train(network: Network, batches: grain.DatasetIterator, num_steps: int) -> dict:
    """Trains until the batches end; returns the pipeline's state in the middle of the run."""
    optimizer = nnx.Optimizer(network, optax.adam(3e-3), wrt=nnx.Param)
    waiting_s = total_s = num_examples = 0.0
    middle_state = {}
    figures_column = TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True))
    with Progress(BarColumn(20), figures_column) as progress:
        bar = progress.add_task("training", total=num_steps, figures="compiling")
        for step in range(num_steps):
            if step == num_steps // 2:
                middle_state = batches.get_state()
            start = time.perf_counter()
            batch = next(batches)
            got_batch = time.perf_counter()
            loss = float(train_step(network, optimizer, batch))
            if step > 1:  # The first steps compile.
                waiting_s += got_batch - start
                total_s += time.perf_counter() - start
                num_examples += len(batch["label"])
                figures = f"loss {loss:.3f}, {num_examples / total_s:,.0f} examples/s"
                figures += f", waiting {waiting_s / total_s:.1%}"
                progress.update(bar, figures=figures)
            progress.advance(bar)
    return middle_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dir", type=Path, default=Path(".cache/images"))
    parser.add_argument("--quick", action="store_true", help="two epochs: for tests")
    options = parser.parse_args()
    num_epochs = 2 if options.quick else options.epochs

    train_path, test_path = write_records(options.dir)
    num_train = len(grain.sources.ArrayRecordDataSource(train_path))
    num_steps = num_train * num_epochs // options.batch_size
    network = Network(rngs=nnx.Rngs(0))
    test = test_batch(test_path)
    print(f"{num_train} training images, {len(test['label'])} test images")
    print(f"accuracy before training: {float(accuracy(network, test)):.1%}")

    dataset = training_batches(train_path, options.batch_size, num_epochs)
    batches = iter(dataset)
    middle_state = train(network, batches, num_steps)
    batches.close()
    print(f"accuracy after {num_epochs} epochs: {float(accuracy(network, test)):.1%}")

    again, resumed = iter(dataset), iter(dataset)
    resumed.set_state(middle_state)
    for _ in range(num_steps // 2):
        next(again)
    expected, found = next(again), next(resumed)
    if any(not np.array_equal(expected[name], found[name]) for name in expected):
        raise SystemExit("the batch after resuming differs")
    print(f"resumed at step {num_steps // 2}: the next batch is bit-identical")
    again.close()
    resumed.close()


if __name__ == "__main__":
    main()
