"""WebP and GIF images as `DecodeImage` decodes them, compared with PIL."""

import io
import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
from effort import SEED, cases
from PIL import Image, ImageOps
from test_images import FILES, MODES, by_pil, opened

import grainmill as grain
from grainmill import _native
from grainmill.transforms import DecodeImage

# Whose data have no checksums, so that changes of some bits are other pixels.
NAMES = [name for name in FILES if name.endswith((".webp", ".gif"))]
pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency")


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def random_pixels(rng, channels):
    """Noise, gradients and areas, of any size."""
    height, width = rng.integers(1, 70, 2)
    y, x = np.mgrid[0:height, 0:width]
    planes = [(x * rng.integers(9) + y * rng.integers(9)) % 256 for _ in range(channels)]
    pixels = np.stack(planes, -1) + rng.normal(0, rng.choice([0, 3, 60]), (height, width, channels))
    pixels = pixels.clip(0, 255).astype(np.uint8)
    pixels[: height // 3, width // 2 :] = rng.integers(0, 256, channels)
    return pixels


def check_modes(data, seed):
    for channels in MODES:
        found = DecodeImage(channels=channels).map(data)
        np.testing.assert_array_equal(found, by_pil(opened(data), channels), f"{seed}")


def random_webp(rng):
    options = {
        "quality": int(rng.integers(0, 101)),
        "lossless": bool(rng.random() < 0.5),
        "method": int(rng.integers(0, 7)),
        "exact": bool(rng.random() < 0.5),
        "alpha_quality": int(rng.integers(0, 101)),
    }
    if rng.random() < 0.3:
        options |= {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0", "icc_profile": bytes(7)}
    images = [Image.fromarray(random_pixels(rng, int(rng.choice([3, 4]))))]
    if rng.random() < 0.3:
        other = Image.fromarray(255 - np.asarray(images[0]))
        options |= {"save_all": True, "append_images": [other], "allow_mixed": True}
    return saved(images[0], "WEBP", **options)


def test_random_webp_images_are_those_of_pil():
    for seed in range(SEED, SEED + cases(150, 20_000)):
        data = random_webp(np.random.default_rng(seed))
        check_modes(data, seed)
        image = opened(data)
        assert DecodeImage(channels=None).map(data).shape[2] == len(image.getbands())


def gif(rng):
    """A GIF whose first image may be a part of the whole, with colours of its own or not."""
    whole_height, whole_width = (int(n) for n in rng.integers(1, 30, 2))
    height, width = (int(n) for n in rng.integers(1, 30, 2))
    top, left = (int(n) for n in rng.integers(0, 9, 2))
    bits = int(rng.integers(1, 9))
    numbers = rng.integers(0, 1 << bits, (height, width))

    def colours(count):
        return rng.integers(0, 256, (1 << count, 3)).astype(np.uint8).tobytes()

    of_all = rng.random() < 0.7
    own = rng.random() < 0.5 or not of_all
    # Fewer than the numbers of pixels at times.
    counts = [max(1, bits - int(rng.random() < 0.1)), bits]
    out = b"GIF89a" + struct.pack(
        "<HHBBB", whole_width, whole_height, (0x80 if of_all else 0) | counts[0] - 1, 0, 0
    )
    out += colours(counts[0]) if of_all else b""
    if rng.random() < 0.5:
        out += b"!\xfe\x05hello\0"
    if rng.random() < 0.5:
        flags = int(rng.random() < 0.7) | int(rng.integers(0, 4)) << 2
        out += b"!\xf9\x04" + struct.pack("<BHBB", flags, 7, int(rng.integers(1 << bits)), 0)
    is_interlaced = rng.random() < 0.5
    flags = (0x80 if own else 0) | (0x40 if is_interlaced else 0) | counts[1] - 1
    out += b"," + struct.pack("<HHHHB", left, top, width, height, flags)
    out += colours(counts[1]) if own else b""
    rows = list(range(height))
    if is_interlaced:
        rows = [*rows[::8], *rows[4::8], *rows[2::4], *rows[1::2]]
    return out + lzw(np.concatenate([numbers[row] for row in rows]).tolist(), bits) + b";"


def lzw(numbers, bits):
    """Numbers as codes of one length, which is kept by clearing the table."""
    size = max(2, bits)
    clear, end = 1 << size, (1 << size) + 1
    step = (1 << size) - 2
    codes = []
    for at in range(0, len(numbers), step):
        codes += [clear, *numbers[at : at + step]]
    text = "".join(f"{code:0{size + 1}b}"[::-1] for code in [*codes, end])
    text += "0" * (-len(text) % 8)
    data = bytes(int(text[at : at + 8][::-1], 2) for at in range(0, len(text), 8))
    blocks = [data[at : at + 255] for at in range(0, len(data), 255)]
    return bytes([size]) + b"".join(bytes([len(block)]) + block for block in blocks) + b"\0"


def test_random_gif_images_are_those_of_pil():
    for seed in range(SEED, SEED + cases(300, 20_000)):
        data = gif(np.random.default_rng(seed))
        check_modes(data, seed)


def test_gif_images_that_pil_wrote_are_those_of_pil():
    for seed in range(SEED, SEED + cases(60, 5_000)):
        rng = np.random.default_rng(seed)
        image = Image.fromarray(random_pixels(rng, 3)).quantize(int(rng.integers(1, 257)))
        options = {"interlace": int(rng.integers(2))}
        if rng.random() < 0.5:
            options["transparency"] = int(rng.integers(256))
        if rng.random() < 0.3:
            options |= {"save_all": True, "append_images": [image.rotate(180)]}
        data = saved(image, "GIF", **options)
        check_modes(data, seed)


@pytest.mark.parametrize("name", NAMES)
def test_crops_and_sizes_are_parts_of_the_whole(name):
    whole = DecodeImage(channels=4).map(FILES[name])
    height, width = whole.shape[:2]
    for top, left in itertools.product((0, 1, height // 2), (0, 3, width - 1)):
        box = (top, left, height - top, min(5, width - left))
        found = DecodeImage(channels=4, crop=lambda *_, box=box: box).map(FILES[name])
        np.testing.assert_array_equal(found, whole[top:, left : left + box[3]])
    same = opened(FILES[name]).convert("RGB").resize((16, 12), Image.BILINEAR)
    found = DecodeImage(size=(12, 16)).map(FILES[name])
    np.testing.assert_array_equal(found, np.asarray(same))
    crop = grain.transforms.DecodeRandomCrop(size=(8, 8))
    assert crop.random_map(FILES[name], np.random.default_rng(0)).shape == (8, 8, 3)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_orientation_of_webp_is_that_of_pil(orientation):
    exif = Image.Exif()
    exif[0x112] = orientation
    image = Image.fromarray(random_pixels(np.random.default_rng(orientation), 3))
    data = saved(image, "WEBP", lossless=True, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(opened(data)))
    np.testing.assert_array_equal(DecodeImage(exif_orientation=True).map(data), expected)
    np.testing.assert_array_equal(DecodeImage().map(data), np.asarray(image))


def errors_of(data):
    """Whether decoding fails; otherwise a lenient decoder finds the same pixels."""
    try:
        found = DecodeImage(max_pixels=10**6).map(data)
    except (_native.GrainmillError, ValueError) as error:
        assert "image" in str(error) or "pixels" in str(error)  # noqa: PT017
        return True
    lenient = DecodeImage(max_pixels=10**6, allow_damaged=True).map(data)
    np.testing.assert_array_equal(lenient, found)
    return False


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_an_error(name):
    data = FILES[name]
    whole = DecodeImage().map(data)
    for length in range(len(data)):
        if not errors_of(data[:length]):
            # Behind the last pixel of a GIF nothing is read.
            assert name.endswith(".gif")
            np.testing.assert_array_equal(DecodeImage().map(data[:length]), whole)
            assert length >= len(data) - 4
    lenient = DecodeImage(allow_damaged=True).map(data[: len(data) * 3 // 4])
    assert lenient.shape == whole.shape
    if name.endswith(".gif") and name != "interlaced.gif":
        np.testing.assert_array_equal(lenient[:8], whole[:8])


@pytest.mark.parametrize("name", NAMES)
def test_damage_at_every_byte_is_an_error_or_pixels(name):
    data = FILES[name]
    num_errors = 0
    step = 1 if cases(0, 1) else 3
    for at in range(0, len(data), step):
        for value in (data[at] ^ 1, data[at] ^ 0x80, 0xFF):
            num_errors += errors_of(data[:at] + bytes([value]) + data[at + 1 :])
    assert num_errors > 3


def test_what_is_wrong_is_named():
    for sides, problem in ((16_382, "16383 x 16383 pixels, more"), (16_383, "has 0 x 0 pixels")):
        sizes = struct.pack("<I", sides | sides << 14)
        huge = b"RIFF\x16\0\0\0WEBPVP8L\x0a\0\0\0\x2f" + sizes + bytes(5)
        with pytest.raises((ValueError, _native.GrainmillError), match=problem):
            DecodeImage(max_pixels=10**6).map(huge)
    first = b",\0\0\0\0\1\0\1\0\0" + lzw([0], 1)
    with pytest.raises(ValueError, match="65535 x 65535 pixels, more than"):
        DecodeImage().map(b"GIF89a" + b"\xff" * 4 + b"\x80\0\0" + bytes(6) + first)
    for data, problem in (
        (b"GIF89a\1\0\1\0\x80\0\0" + bytes(6) + b";", "GIF image: byte 13: "),
        (b"GIF89a\1\0\1\0\0\0\0,\0\0\0\0\0\0\1\0\0", "GIF image: byte 13"),
        (FILES["lossy.webp"][:-9], "the file should have .* bytes: it was cut short"),
        (b"RIFF\0\0\0\0WEBP", "WebP image: byte 12"),
    ):
        with pytest.raises(_native.GrainmillError, match=problem):
            DecodeImage().map(data)


def test_batches_of_all_formats(tmp_path):
    paths = [tmp_path / name for name in FILES]
    for path in paths:
        path.write_bytes(FILES[path.name])
    ds = grain.MapDataset.source([Path(path).read_bytes() for path in paths])
    batch = ds.map(DecodeImage(size=(8, 9))).batch(len(paths))[0]
    assert batch.shape == (len(paths), 8, 9, 3)
    for row, path in zip(batch, paths, strict=True):
        np.testing.assert_array_equal(row, DecodeImage(size=(8, 9)).map(path.read_bytes()))
