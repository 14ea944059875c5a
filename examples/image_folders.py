"""Trains a classifier on images in folders, each folder a class: images/circle/7.png, ...

    python examples/image_folders.py --dir images

Without `--dir`, a small folder of drawn shapes is made first. Images are read and decoded where
they are needed: the data set is a list of paths, so it is shuffled as a whole, and a random crop
depends on the seed and the position only. Images far away, or small and many, are read faster from
a few large files: `--convert` writes them into one ArrayRecord file first, and trains on that.
"""

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter

SIDE = 32
SHAPES = ("circle", "square", "triangle")
Element = dict[str, Any]


def draw_shapes(directory: Path, count: int) -> None:
    """Writes `count` images of each shape, of many sizes and colours."""
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        (directory / shape).mkdir(parents=True)
        for number in range(count):
            side = int(rng.integers(40, 80))
            image = Image.new("RGB", (side, side), tuple(map(int, rng.integers(0, 90, 3))))
            box = (side // 6, side // 6, side * 5 // 6, side * 5 // 6)
            corners = [(box[0], box[3]), (side // 2, box[1]), (box[2], box[3])]
            colour = tuple(map(int, rng.integers(150, 255, 3)))
            pen = ImageDraw.Draw(image)
            if shape == "triangle":
                pen.polygon(corners, fill=colour)
            else:
                {"circle": pen.ellipse, "square": pen.rectangle}[shape](box, fill=colour)
            image.save(directory / shape / f"{number}.png")


# --- Data: from folders to batches on the device ----------------------------------------------


def listed(directory: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """The path and the label of each image, and the names of the labels."""
    names = sorted(path.name for path in directory.iterdir() if path.is_dir())
    suffixes = {".jpg", ".jpeg", ".png"}
    found = [
        (str(path), label)
        for label, name in enumerate(names)
        for path in sorted((directory / name).iterdir())
        if path.suffix.lower() in suffixes
    ]
    if not found:
        raise SystemExit(f"{directory} has no folders of JPEG or PNG images")
    return found, names


def read(item: tuple[str, int]) -> Element:
    """The bytes of an image, and its label."""
    path, label = item
    return {"image": Path(path).read_bytes(), "label": np.int32(label)}


def convert(items: list[tuple[str, int]], path: str) -> None:
    """Writes images and labels into one file, as they are."""
    with ArrayRecordWriter(path, "group_size:1,uncompressed") as writer:
        for item in items:
            element = read(item)
            writer.write(grain.transforms.to_example({**element, "label": [int(item[1])]}))


def converted(path: str) -> grain.MapDataset:
    """What `read` returns for each image, from the file that `convert` wrote."""
    features = {
        "image": grain.transforms.Feature(bytes),
        "label": grain.transforms.Feature(np.int32, shape=()),
    }
    source = grain.sources.ArrayRecordDataSource(path)
    return grain.MapDataset.source(source).map(grain.transforms.ParseExample(features))


def scale(element: Element) -> Element:
    return {**element, "image": element["image"].astype(np.float32) / 255 - 0.5}


def batches_of(images: grain.MapDataset, batch_size: int) -> grain.IterDataset:
    """Endless batches on the device, each epoch shuffled and cropped anew."""
    decode = grain.transforms.DecodeRandomCrop("image", size=(SIDE, SIDE), scale=(0.6, 1.0))
    ds = images.shuffle(seed=42).repeat().random_map(decode, seed=7).map(scale)
    batches = ds.batch(batch_size).to_iter_dataset()
    return grain.experimental.device_put(batches, jax.local_devices()[0])


# --- Model --------------------------------------------------------------------------------------


def new_params(num_labels: int) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "first": jax.random.normal(keys[0], (3, 3, 3, 16)) / 5,
        "second": jax.random.normal(keys[1], (3, 3, 16, 32)) / 12,
        "logits": jax.random.normal(keys[2], (32, num_labels)) / 6,
    }


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    x = images
    for name in ("first", "second"):
        kind = ("NHWC", "HWIO", "NHWC")
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, params[name], (2, 2), "SAME", dimension_numbers=kind)
        )
    return x.max(axis=(1, 2)) @ params["logits"]


def loss_of(params: Any, batch: Element) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy, and the share of images that are classified correctly."""
    logits = logits_of(params, batch["image"])
    losses = -jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch["label"]]
    return losses.mean(), (logits.argmax(axis=1) == batch["label"]).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params: Any, momentum: Any, batch: Element) -> tuple[Any, Any, jax.Array]:
    (_, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 0.05 * m, params, momentum), momentum, accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="a folder of folders of images")
    parser.add_argument("--convert", action="store_true", help="into an ArrayRecord file, first")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = options.dir
        if directory is None:
            directory = Path(folder) / "images"
            draw_shapes(directory, count=60)
        items, names = listed(directory)
        print(f"{len(items)} images of {', '.join(names)}")
        if options.convert:
            path = str(Path(folder) / "images.array_record")
            convert(items, path)
            print(f"{Path(path).stat().st_size:,} bytes in one file")
        images = converted(path) if options.convert else grain.MapDataset.source(items).map(read)

        params = new_params(len(names))
        momentum = jax.tree.map(jnp.zeros_like, params)
        accuracies = []
        with iter(batches_of(images, options.batch_size)) as batches:
            for step in range(options.steps):
                params, momentum, accuracy = train_step(params, momentum, next(batches))
                accuracies.append(float(accuracy))
                if (step + 1) % max(options.steps // 5, 1) == 0:
                    print(f"step {step + 1}: accuracy {np.mean(accuracies[-20:]):.1%}")
            print(batches.verdict())


if __name__ == "__main__":
    main()
