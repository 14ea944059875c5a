"""Compares decoding of images with PIL, OpenCV and TensorFlow, whichever are installed.

Only PIL is needed. The images are made here: noise with the spectrum of photographs, 500x375,
as JPEG of quality 90 and 4:2:0. Each row is CPU time per image as the median of rounds in which all
take turns; before that, pixels are compared with PIL's.

    python benches/images.py --rounds 9
"""

import argparse
import datetime
import importlib.util
import io
import json
import os
import platform
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import release_only  # noqa: F401
from PIL import Image

from grainmill.transforms import DecodeImage

RECORD = Path(__file__).parents[1] / "benches/record"
HEIGHT, WIDTH, SIDE = 375, 500, 224
TOP, LEFT = (HEIGHT - SIDE) // 2, (WIDTH - SIDE) // 2
LARGE = 4


def photo(seed: int, height: int, width: int) -> Image.Image:
    """Noise whose amplitude falls with the frequency, as in photographs; colours vary less."""
    rng = np.random.default_rng(seed)
    y, x = np.meshgrid(np.fft.fftfreq(height), np.fft.fftfreq(width), indexing="ij")
    falling = 1 / np.maximum(np.hypot(y, x), 1 / width) ** 1.1
    noise = [
        np.fft.ifft2(falling * np.exp(2j * np.pi * rng.random((height, width)))).real
        for _ in range(3)
    ]
    light, red, blue = (part / part.std() for part in noise)
    colours = np.stack([light + 0.3 * red, light, light + 0.3 * blue], -1)
    return Image.fromarray((120 + 50 * colours).clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, **options)
    return file.getvalue()


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def cropped(array: np.ndarray) -> np.ndarray:
    return array[TOP : TOP + SIDE, LEFT : LEFT + SIDE]


def pil(data: bytes, draft: tuple[int, int] | None = None) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    if draft:
        image.draft("RGB", draft)
    return image


def cases() -> dict[str, tuple[list[bytes], dict]]:
    """Row -> images, and the functions compared on them."""
    small = [photo(seed, HEIGHT, WIDTH) for seed in range(6)]
    large = [photo(seed, HEIGHT * LARGE, WIDTH * LARGE) for seed in range(2)]
    box = (LEFT, TOP, LEFT + SIDE, TOP + SIDE)
    crop = {
        "grainmill": DecodeImage(size=(SIDE, SIDE), crop="center").map,
        "PIL": lambda data: np.asarray(pil(data, (SIDE, SIDE)).crop(box)),
    }
    whole = {
        "grainmill": DecodeImage().map,
        "PIL": lambda data: np.asarray(pil(data)),
    }
    resized = {
        "grainmill": DecodeImage(size=(SIDE, SIDE)).map,
        "PIL": lambda data: np.asarray(pil(data).resize((SIDE, SIDE), Image.Resampling.BILINEAR)),
    }
    draft = {
        "grainmill": DecodeImage(size=(SIDE, SIDE), draft=True).map,
        "PIL": lambda data: np.asarray(
            pil(data, (SIDE, SIDE)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        ),
    }
    whole_png = dict(whole)
    if importlib.util.find_spec("cv2"):
        import cv2  # noqa: PLC0415

        cv2.setNumThreads(1)

        def cv(data: bytes) -> np.ndarray:
            return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)

        crop["OpenCV"] = lambda data: np.ascontiguousarray(cropped(cv(data)))
        whole["OpenCV"] = whole_png["OpenCV"] = cv
    if importlib.util.find_spec("tensorflow"):
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        import tensorflow as tf  # noqa: PLC0415

        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
        window = tf.constant([TOP, LEFT, SIDE, SIDE])
        crop["TensorFlow"] = lambda data: tf.io.decode_and_crop_jpeg(
            data, window, channels=3
        ).numpy()
        whole["TensorFlow"] = lambda data: tf.io.decode_jpeg(data, channels=3).numpy()
        whole_png["TensorFlow"] = lambda data: tf.io.decode_png(data, channels=3).numpy()
    files = [jpeg(image) for image in small]
    return {
        "JPEG 500x375, 224x224 in the middle": (files, crop),
        "the same, progressive": ([jpeg(image, progressive=True) for image in small], crop),
        "JPEG 500x375, all of it": (files, whole),
        "JPEG 500x375, resized to 224x224": (files, resized),
        "JPEG 2000x1500, draft, resized to 224x224": ([jpeg(image) for image in large], draft),
        "PNG 500x375, all of it": ([png(image) for image in small], whole_png),
    }


def cpu_us(function: object, files: list[bytes], repeats: int) -> float:
    before = time.process_time()
    for _ in range(repeats):
        for data in files:
            function(data)
    return (time.process_time() - before) / (repeats * len(files)) * 1e6


def costs_of(files: list[bytes], functions: dict, rounds: int, repeats: int) -> dict:
    """CPU microseconds per image of each library in each round, after comparing pixels."""
    for data in files:
        np.testing.assert_array_equal(functions["grainmill"](data), functions["PIL"](data))
    costs: dict[str, list[float]] = {peer: [] for peer in functions}
    for _ in range(rounds):
        for peer, function in functions.items():
            costs[peer].append(cpu_us(function, files, repeats))
    return costs


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--record", type=Path, default=RECORD, help="folder of the results")
    parser.add_argument("--json", action="store_true", help="print the first row, for compare.py")
    options = parser.parse_args()
    # What allocators keep after the first large block is freed; pipelines of grainmill do this.
    np.ones(4 << 20)
    all_cases = cases()
    versions = {
        peer: installed(package) or installed(f"{package}-headless")
        for peer, package in PACKAGES.items()
    }
    if options.json:
        files, functions = next(iter(all_cases.values()))
        costs = costs_of(files, functions, options.rounds, options.repeats)
        by_peer = {f"{peer}/crop": found for peer, found in costs.items()}
        missing = [peer for peer in PEERS if peer not in functions]
        print(json.dumps({"costs": {"image.jpeg": by_peer}, "missing": missing}))
        return
    lines = ["| CPU us per image | " + " | ".join(PEERS) + " | share of the best other |"]
    lines.append("| --- |" + " ---: |" * (len(PEERS) + 1))
    for name, (files, functions) in all_cases.items():
        rounds = costs_of(files, functions, options.rounds, options.repeats)
        costs = {peer: statistics.median(found) for peer, found in rounds.items()}
        best = min(cost for peer, cost in costs.items() if peer != "grainmill")
        shown = [f"{costs[peer]:.0f}" if peer in costs else "" for peer in PEERS]
        lines.append(f"| {name} | " + " | ".join(shown) + f" | {costs['grainmill'] / best:.2f} |")
    now = datetime.datetime.now(tz=datetime.UTC)
    of_peers = "".join(f", {peer} {found}" for peer, found in versions.items() if found)
    head = (
        f"# Images, {now:%Y-%m-%d %H:%M} UTC\n\n"
        f"`python benches/images.py --rounds {options.rounds}`; "
        f"{os.cpu_count()} cores, {platform.machine()}, CPython {platform.python_version()}"
        f"{of_peers}. Medians of {options.rounds} rounds; pixels equal PIL's.\n\n"
    )
    text = head + "\n".join(lines) + "\n"
    options.record.mkdir(parents=True, exist_ok=True)
    (options.record / f"{now:%Y-%m-%d-%H%M}-images.md").write_text(text, "utf-8")
    print(text)


PACKAGES = {"PIL": "pillow", "OpenCV": "opencv-python", "TensorFlow": "tensorflow"}
PEERS = ("grainmill", *PACKAGES)

if __name__ == "__main__":
    main()
