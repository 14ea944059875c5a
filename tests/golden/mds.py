"""Writes `mds/`: data sets of `streaming.MDSWriter`, and what its own reader has of them.

Run by hand, where `mosaicml-streaming` 0.13 is installed: `python tests/golden/mds.py`.
"""

import io
import json
import shutil
from decimal import Decimal
from pathlib import Path

import numpy as np
from PIL import Image
from streaming.base.format.mds import MDSReader, MDSWriter

HERE = Path(__file__).with_name("mds")
NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
COLUMNS = {
    **{name: name for name in ("bytes", "str", "int", "ndarray", *NUMBERS)},
    **{name: name for name in ("float16", "float32", "float64", "json", "pkl", "pil", "jpeg")},
    **{name: name for name in ("str_int", "str_float", "str_decimal", "png", "jpeg_array")},
    "jpegs": "list[jpeg]",
    "pngs": "list[png]",
    "pils": "list[pil]",
    "typed": "ndarray:float32",
    "shaped": "ndarray:int16:2,3",
}
FEW = {name: name for name in ("bytes", "str", "int", "ndarray", "float32", "json")}
MODES = ("L", "RGB", "1", "RGBA", "P", "LA", "CMYK", "I", "F", "YCbCr", "HSV")


def image(n, mode="RGB"):
    pixels = np.random.RandomState(n).randint(0, 255, (2, 3, 3))
    return Image.fromarray(pixels.astype(np.uint8)).convert(mode)


def jpeg(n):
    file = io.BytesIO()
    image(n).save(file, format="JPEG", quality=10)
    return file.getvalue()


def sample(n):
    dtype = (np.uint8, np.int64, np.float16, np.uint32)[n % 4]
    return {
        **{name: n + 200 if name.startswith("u") else -n for name in NUMBERS},
        **dict.fromkeys(("float16", "float32", "float64"), n + 0.25),
        "bytes": bytes([n]) * n,
        "str": "ä" * n + str(n),
        "int": -n,
        "ndarray": np.full((n + 1, 2), n, dtype),
        "typed": np.arange(300 if n == 2 else n + 1, dtype=np.float32).reshape(1, -1, 1),
        "shaped": np.arange(6, dtype=np.int16).reshape(2, 3) + n,
        "json": {"n": n, "list": [1, None, "x"]},
        "pkl": {"pickled": n},
        "pil": image(n, MODES[n % len(MODES)]),
        "jpeg": image(n),
        "png": image(n),
        "str_int": 10 ** (25 + n),
        "str_float": n / 3,
        "str_decimal": Decimal(n) / 7,
        "jpeg_array": [jpeg(n)] * (n % 2 + 1),
        "jpegs": [image(n)] * (n % 3),
        "pngs": [image(n)] * (n % 2),
        "pils": [image(n), image(n, "L")][: n % 3],
    }


def shown(value):
    """A value as JSON, with its type; of images in a file only the format."""
    if isinstance(value, Image.Image):
        return [value.format] if value.format else shown(np.asarray(value))
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), list(value.shape), value.tolist()]
    if isinstance(value, list):
        return ["list", [shown(each) for each in value]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", json.dumps(value)]
    return [type(value).__name__, str(value)]


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    for name, columns, compression in (
        ("all", COLUMNS, None),
        ("gz", FEW, "gz:9"),
        ("zstd", FEW, "zstd:9"),
        ("br", FEW, "br"),
    ):
        limit = 2000 if columns is FEW else 16_000
        out = str(HERE / name)
        with MDSWriter(out=out, columns=columns, compression=compression, size_limit=limit) as file:
            for n in range(11):
                file.write({column: sample(n)[column] for column in columns})
    rows = []
    for shard in json.loads((HERE / "all/index.json").read_text())["shards"]:
        reader = MDSReader.from_json(str(HERE / "all"), None, shard)
        samples = (reader[n] for n in range(len(reader)))
        rows += [{column: shown(value) for column, value in each.items()} for each in samples]
    (HERE / "all.json").write_text(json.dumps(rows, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
