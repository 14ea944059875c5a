"""Images as `DecodeImage` and `DecodeRandomCrop` decode them, compared with PIL."""

import io
import pickle
import re
import sys
import threading
import zipfile
import zlib
from pathlib import Path

import numpy as np
import PIL
import pytest
from effort import SEED, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

import grainmill as grain
from grainmill import _native
from grainmill.transforms import DecodeImage, DecodeRandomCrop

FILES = {p.name: p.read_bytes() for p in sorted((Path(__file__).parent / "data/images").iterdir())}
# PIL cuts 16 bits of gray off at 255 where it should scale them.
LIKE_PIL = sorted(set(FILES) - {"gray_16.png"})
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
COLOUR_JPEG = [name for name in LIKE_PIL if name.endswith(".jpg") and "gray" not in name]


pytestmark = pytest.mark.filterwarnings("ignore:Palette images with Transparency")


def resized(image, size, resample):
    """The image in another size as PIL 13 computes it; earlier ones always begin with rows."""
    lost_down, lost_across = image.height - size[1], image.width - size[0]
    if PIL.__version__ < "13" and lost_down > max(0, 2 * lost_across):
        if image.mode == "RGBA":
            return resized(image.convert("RGBa"), size, resample).convert("RGBA")
        image = image.resize((image.width, size[1]), resample)
    return image.resize(size, resample)


def opened(data):
    return Image.open(io.BytesIO(data))


def by_pil(image, channels=3):
    """The pixels of an image that PIL opened, with that number of channels."""
    if channels == 1 and image.format == "JPEG":
        image.draft("L", image.size)
    pixels = np.asarray(image.convert(MODES[channels]))
    return pixels.reshape(*pixels.shape[:2], channels)


def photo(height, width, seed=0):
    """A picture with edges, gradients and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([x * 3 % 256, (y * 5 + x) % 256, 128 + 100 * np.sin(x / 5 + y / 9)], -1)
    picture[height // 4 : height // 2, width // 3 : width // 2] = [250, 20, 40]
    return Image.fromarray(
        (picture + rng.normal(0, 9, picture.shape)).clip(0, 255).astype(np.uint8)
    )


def jpeg(height, width, **options):
    file = io.BytesIO()
    photo(height, width).save(file, "JPEG", **options)
    return file.getvalue()


# --- pixels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", MODES)
@pytest.mark.parametrize("name", LIKE_PIL)
def test_pixels_are_those_of_pil(name, channels):
    if channels == 1 and name in {"cmyk.jpg", "rgb.jpg"}:  # without brightness of their own
        expected = np.asarray(opened(FILES[name]).convert("L"))[..., None]
    else:
        expected = by_pil(opened(FILES[name]), channels)
    np.testing.assert_array_equal(DecodeImage(channels=channels).map(FILES[name]), expected)


def test_channels_as_stored():
    found = {name: DecodeImage(channels=None).map(data).shape[2] for name, data in FILES.items()}
    gray = {"gray.jpg", "gray_progressive.jpg", "gray.png", "gray_16.png", "bits_1.png"}
    others = {"gray_alpha.png": 2, "rgba.png": 4, "palette_alpha.png": 4}
    others |= {"lossy_alpha.webp": 4, "lossless_alpha.webp": 4, "interlaced.gif": 4}
    assert found == {name: 1 if name in gray else others.get(name, 3) for name in FILES}


def test_sixteen_bits_of_gray_keep_their_upper_half():
    expected = np.asarray(opened(FILES["gray_16.png"])) >> 8
    np.testing.assert_array_equal(
        DecodeImage(channels=1).map(FILES["gray_16.png"])[..., 0], expected
    )


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (9, 2), (17, 33), (64, 48), (250, 129)])
def test_all_sizes_and_kinds_of_jpeg_are_those_of_pil(shape, subsampling, progressive):
    for quality, restarts in [(30, 0), (75, 1), (90, 3)]:
        data = jpeg(
            *shape,
            quality=quality,
            subsampling=subsampling,
            progressive=progressive,
            restart_marker_blocks=restarts,
        )
        np.testing.assert_array_equal(DecodeImage().map(data), by_pil(opened(data)))


@settings(max_examples=300)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_crop_equals_that_part_of_the_image(name, data):
    exif = data.draw(st.booleans())
    whole = DecodeImage(exif_orientation=exif).map(FILES[name])
    top = data.draw(st.integers(0, whole.shape[0] - 1))
    left = data.draw(st.integers(0, whole.shape[1] - 1))
    height = data.draw(st.integers(1, whole.shape[0] - top))
    width = data.draw(st.integers(1, whole.shape[1] - left))
    asked = []

    def crop(*size):
        asked.append(size)
        return top, left, height, width

    part = DecodeImage(crop=crop, exif_orientation=exif).map(FILES[name])
    np.testing.assert_array_equal(part, whole[top : top + height, left : left + width])
    assert asked == [whole.shape[:2]]


@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "lanczos", "box"])
@pytest.mark.parametrize("size", [(24, 24), (50, 9), (7, 67), (120, 200), (1, 1)])
def test_resized_pixels_are_those_of_pil(size, resample):
    for name in ("baseline_420.jpg", "gray.jpg", "rgba.png", "palette.png"):
        channels = 4 if name == "rgba.png" else 3
        image = opened(FILES[name]).convert(MODES[channels])
        expected = resized(image, size[::-1], getattr(Image.Resampling, resample.upper()))
        found = DecodeImage(size=size, channels=channels, resample=resample).map(FILES[name])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("divisor", [2, 4, 8])
@pytest.mark.parametrize("name", [*COLOUR_JPEG, "gray.jpg"])
def test_draft_is_that_of_pil(name, divisor):
    image = opened(FILES[name])
    size = (image.height // divisor, image.width // divisor)
    image.draft(None, size[::-1])
    assert image.width < 67
    expected = resized(image.convert("RGB"), size[::-1], Image.Resampling.BILINEAR)
    found = DecodeImage(size=size, draft=True).map(FILES[name])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_orientation_is_that_of_pil(kind, orientation):
    exif = Image.Exif()
    exif[0x112] = orientation
    file = io.BytesIO()
    photo(23, 38).save(file, kind, exif=exif)
    upright = ImageOps.exif_transpose(opened(file.getvalue()))
    decode = DecodeImage(exif_orientation=True)
    np.testing.assert_array_equal(decode.map(file.getvalue()), np.asarray(upright))
    small = DecodeImage(size=(9, 20), exif_orientation=True).map(file.getvalue())
    expected = resized(upright, (20, 9), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(small, expected)
    as_stored = np.asarray(opened(file.getvalue()))
    np.testing.assert_array_equal(DecodeImage().map(file.getvalue()), as_stored)


def xmp_of(orientation, form='tiff:Orientation="{}"'):
    text = form.format(orientation)
    return f"<x:xmpmeta><rdf:Description xmp:Rating='3' {text}/></x:xmpmeta>".encode()


def with_xmp(data, xmp):
    """An image with that XMP data before what PIL wrote after the first header."""
    if data.startswith(b"\xff\xd8"):
        segment = b"http://ns.adobe.com/xap/1.0/\0" + xmp
        return data[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + data[2:]
    text = chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    return data[:33] + text + data[33:]


# What EXIF has: no EXIF at all, EXIF without an orientation, or an orientation.
@pytest.mark.parametrize("exif_orientation", [None, "other", 0, 1, 3, 9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_orientation_in_xmp_counts_where_exif_has_none(kind, exif_orientation):
    exif = Image.Exif()
    if exif_orientation == "other":
        exif[0x10F] = "a maker"
    elif exif_orientation is not None:
        exif[0x112] = exif_orientation
    file = io.BytesIO()
    photo(23, 38).save(file, kind, **({} if exif_orientation is None else {"exif": exif}))
    forms = ['tiff:Orientation="{}"', "><tiff:Orientation>{}</tiff:Orientation>", "other='{}'"]
    for form in forms:
        for orientation in range(10):
            data = with_xmp(file.getvalue(), xmp_of(orientation, form))
            upright = ImageOps.exif_transpose(opened(data))
            found = DecodeImage(exif_orientation=True).map(data)
            np.testing.assert_array_equal(found, np.asarray(upright))
            np.testing.assert_array_equal(DecodeImage().map(data), np.asarray(opened(data)))
    cut = with_xmp(file.getvalue(), xmp_of("", "tiff:Orientation"))
    assert DecodeImage(exif_orientation=True).map(cut).shape == (23, 38, 3)


def segments(data):
    """The headers of a JPEG file before its scan, and the rest."""
    at, found = 2, []
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        found.append((data[at + 1], data[at:end]))
        at = end
    return found, data[at:]


@pytest.mark.parametrize("missing", [{0x00, 0x01, 0x10, 0x11}, {0x00}, {0x11}, {0x01, 0x10}])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_standard_tables_stand_for_those_that_a_jpeg_has_not(mode, missing):
    """As in frames of Motion JPEG; PIL's libjpeg uses the same ones."""
    file = io.BytesIO()
    photo(61, 47).convert(mode).save(file, "JPEG", quality=90)
    headers, rest = segments(file.getvalue())
    data = b"\xff\xd8"
    for marker, segment in headers:
        if marker == 0xC4 and segment[4] in missing:
            assert len(segment) - 4 in {29, 179}  # one table each
            continue
        data += segment
    data += rest
    expected = by_pil(opened(data))
    np.testing.assert_array_equal(expected, by_pil(opened(file.getvalue())))
    np.testing.assert_array_equal(DecodeImage().map(data), expected)
    box = DecodeImage(crop=lambda *_: (30, 10, 20, 30)).map(data)
    np.testing.assert_array_equal(box, expected[30:50, 10:40])


def test_a_table_that_no_standard_has_is_missing():
    data = bytearray(jpeg(20, 20))
    scan = data.index(b"\xff\xda")
    data[scan + 6] = 0x22  # the tables of the first component
    with pytest.raises(_native.GrainmillError, match="a Huffman table that is not defined"):
        DecodeImage().map(bytes(data))
    headers, rest = segments(jpeg(40, 40, progressive=True))
    without = b"\xff\xd8" + b"".join(part for marker, part in headers if marker != 0xC4) + rest
    with pytest.raises(_native.GrainmillError, match="a Huffman table that is not defined"):
        DecodeImage().map(without)


def chunk(kind, content):
    checksum = zlib.crc32(kind + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + kind + content + checksum


def png(pixels, *, interlaced=False, size=None):
    """A PNG file of RGB pixels, written by hand: PIL writes no interlaced ones."""
    height, width = size or pixels.shape[:2]
    passes = [pixels]
    if interlaced:
        starts = [
            (0, 0, 8, 8),
            (0, 4, 8, 8),
            (4, 0, 8, 4),
            (0, 2, 4, 4),
            (2, 0, 4, 2),
            (0, 1, 2, 2),
        ]
        passes = [pixels[y::dy, x::dx] for y, x, dy, dx in [*starts, (1, 0, 2, 1)]]
    rows = b"".join(b"\0" + row.tobytes() for part in passes if part.size for row in part)
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, interlaced])
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def chunks(data):
    at = 8
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        yield data[at + 4 : at + 8], data[at + 8 : end - 4]
        at = end


def animation(*, is_first_shown):
    file = io.BytesIO()
    frames = [photo(13, 21, seed) for seed in range(3)]
    options = {"save_all": True, "default_image": not is_first_shown}
    frames[0].save(file, "PNG", append_images=frames[1:], **options)
    return file.getvalue()


@pytest.mark.parametrize("is_first_shown", [True, False])
def test_the_first_image_of_an_animation_is_read_whatever_the_others_are(is_first_shown):
    data = animation(is_first_shown=is_first_shown)
    expected = np.asarray(photo(13, 21))
    np.testing.assert_array_equal(DecodeImage().map(data), expected)
    rng = np.random.default_rng(1)
    for kinds in ([b"fcTL"], [b"fdAT"], [b"fcTL", b"fdAT"], [b"acTL"]):
        for _ in range(20):
            parts = [b"\x89PNG\r\n\x1a\n"]
            for kind, content in chunks(data):
                number = rng.bytes(4) if kind in kinds else content[:4]
                parts.append(chunk(kind, number + content[4:]))
            wrong = b"".join(parts)
            np.testing.assert_array_equal(DecodeImage().map(wrong), expected)
    cut = data[: data.index(b"fdAT") + 20]
    with pytest.raises(_native.GrainmillError, match="it was cut short"):
        DecodeImage().map(cut)
    np.testing.assert_array_equal(DecodeImage(allow_damaged=True).map(cut), expected)


@pytest.mark.parametrize(
    ("colour", "depth"), [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (2, 8), (2, 16)]
)
def test_the_transparent_colour_has_as_many_bits_as_samples(colour, depth):
    """What is above them is ignored, as libpng does it."""
    rng = np.random.default_rng(depth)
    samples = 3 if colour else 1
    width, height = 32, 9
    rows = [rng.bytes(width * samples * depth // 8) for _ in range(height)]
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([depth, colour, 0, 0, 0])

    def file(numbers):
        transparent = b"".join(int(number).to_bytes(2, "big") for number in numbers)
        parts = [(b"IHDR", header), (b"tRNS", transparent)]
        parts += [(b"IDAT", zlib.compress(b"\0" + b"\0".join(rows))), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)

    first = rows[4][: max(1, samples * depth // 8)]
    if depth == 16:
        numbers = [int.from_bytes(first[n : n + 2], "big") for n in range(0, len(first), 2)]
    else:
        numbers = [byte >> 8 - depth for byte in first]
    expected = DecodeImage(channels=4).map(file(numbers))
    assert expected[4, 0, 3] == 0
    assert (expected[..., 3] == 255).any()
    if depth in {1, 8}:  # PIL does not scale the number of other depths as it scales samples
        np.testing.assert_array_equal(expected, by_pil(opened(file(numbers)), 4))
    if depth < 16:
        for high in (1, 0x80, 255 >> depth or 1, (1 << 16 - depth) - 1):
            wide = [number | high << depth for number in numbers]
            np.testing.assert_array_equal(DecodeImage(channels=4).map(file(wide)), expected)
    wrong = bytearray(file([0xFFFF] * samples))
    wrong[wrong.index(b"tRNS") + 5] ^= 1  # its checksum is wrong
    with pytest.raises(_native.GrainmillError, match="PNG image: byte 33"):
        DecodeImage().map(bytes(wrong))


def test_interlaced_png():
    pixels = np.asarray(photo(13, 21))
    data = png(pixels, interlaced=True)
    np.testing.assert_array_equal(np.asarray(opened(data)), pixels)
    np.testing.assert_array_equal(DecodeImage().map(data), pixels)
    np.testing.assert_array_equal(
        DecodeImage(size=(5, 5), crop="center").map(data), pixels[4:9, 8:13]
    )


# --- crops ---------------------------------------------------------------------------------------


def test_center_is_a_window_of_the_image():
    data = jpeg(60, 91)
    whole = DecodeImage().map(data)
    found = DecodeImage(size=(32, 40), crop="center").map(data)
    np.testing.assert_array_equal(found, whole[14:46, 25:65])


def test_smaller_images_are_enlarged_to_the_window():
    data = jpeg(20, 91)
    found = DecodeImage(size=(32, 40), crop="center").map(data)
    expected = resized(opened(data).crop((33, 0, 58, 20)), (40, 32), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(60, 91), (91, 60), (5, 300)])
def test_fit_is_the_largest_window_of_that_shape(shape):
    data = jpeg(*shape)
    found = DecodeImage(size=(16, 16), crop="fit").map(data)
    expected = ImageOps.fit(opened(data), (16, 16), Image.Resampling.BILINEAR)
    # PIL's window may begin at half a pixel, ours never does.
    side = min(shape)
    top, left = (shape[0] - side) // 2, (shape[1] - side) // 2
    exact = opened(data).crop((left, top, left + side, top + side))
    np.testing.assert_array_equal(found, resized(exact, (16, 16), Image.Resampling.BILINEAR))
    if not (max(shape) - side) % 2:
        np.testing.assert_array_equal(found, expected)


def test_fraction_of_the_window():
    data = jpeg(64, 100)
    found = DecodeImage(size=(16, 16), crop="fit", fraction=0.875).map(data)
    expected = resized(opened(data).crop((22, 4, 78, 60)), (16, 16), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(found, expected)


def test_random_crops_depend_on_seed_and_position():
    data = jpeg(60, 91)
    decode = DecodeRandomCrop("image", size=(16, 24))
    source = grain.MapDataset.source([{"image": data, "n": n} for n in range(8)])
    ds = source.repeat(2).random_map(decode, seed=5)
    elements = list(ds)
    assert [e["n"] for e in elements] == [*range(8)] * 2
    assert {e["image"].shape for e in elements} == {(16, 24, 3)}
    assert len({e["image"].tobytes() for e in elements}) == 16
    threads = list(ds.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)))
    workers = list(ds.to_iter_dataset(grain.ReadOptions(num_workers=2)))
    for other in (threads, workers, list(source.repeat(2).seed(3).random_map(decode, seed=5))):
        for one, same in zip(elements, other, strict=True):
            np.testing.assert_array_equal(one["image"], same["image"])
    iterator = iter(ds.to_iter_dataset())
    for _ in range(5):
        next(iterator)
    state = iterator.get_state()
    restored = iter(ds.to_iter_dataset())
    restored.set_state(state)
    np.testing.assert_array_equal(next(restored)["image"], elements[5]["image"])


def test_random_boxes_are_pinned():
    # Crops of saved pipelines depend on these.
    decode = DecodeRandomCrop(size=(8, 8))
    boxes = [decode._random_box(375, 500, np.random.default_rng(n)) for n in range(3)]
    narrow = decode._random_box(10, 400, np.random.default_rng(0))
    assert (boxes, narrow) == (BOXES, NARROW)


BOXES = [(35, 302, 171, 129), (3, 19, 282, 366), (48, 219, 260, 231)]
NARROW = (0, 193, 10, 13)


@settings(max_examples=200)
@given(st.integers(1, 600), st.integers(1, 600), st.integers(0, 2**32))
def test_random_boxes_lie_in_the_image(height, width, seed):
    decode = DecodeRandomCrop(size=(8, 8), scale=(0.2, 0.5), ratio=(0.5, 2))
    top, left, crop_height, crop_width = decode._random_box(
        height, width, np.random.default_rng(seed)
    )
    assert 0 <= top <= height - crop_height
    assert 0 <= left <= width - crop_width
    assert min(crop_height, crop_width) > 0
    if min(height, width) > 50 and 0.5 < width / height < 2:
        assert 0.15 < crop_height * crop_width / (height * width) < 0.55


# --- elements and pipelines ----------------------------------------------------------------------


def test_features_and_kinds_of_bytes():
    data = FILES["baseline_420.jpg"]
    expected = DecodeImage().map(data)
    assert expected.dtype == np.uint8
    assert expected.flags.writeable
    element = {"image": data, "label": 3}
    found = DecodeImage("image").map(element)
    assert found["label"] == 3
    assert element["image"] is data
    for kind in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        np.testing.assert_array_equal(DecodeImage().map(kind), expected)
    with pytest.raises(
        TypeError, match="the feature 'image' must be the bytes of an image, got str"
    ):
        DecodeImage("image").map({"image": "a.jpg"})


def test_pipeline_of_batches_in_workers():
    source = grain.MapDataset.source([FILES[name] for name in LIKE_PIL] * 4)
    ds = source.map(DecodeImage(size=(12, 12), crop="center")).batch(8)
    for one, other in zip(ds, ds.to_iter_dataset(grain.ReadOptions(num_workers=2)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_error_in_pipeline_is_that_of_the_decoder():
    source = grain.MapDataset.source([FILES["gray.jpg"], b"BM......"])
    with pytest.raises(_native.GrainmillError, match="neither JPEG, PNG, WebP nor GIF"):
        list(source.map(DecodeImage()))


def test_transforms_are_pickled_and_shown():
    decode = DecodeImage("image", size=(8, 8), crop="fit", fraction=0.5)
    again = pickle.loads(pickle.dumps(decode))
    assert repr(again) == repr(decode)
    assert repr(decode).startswith(
        "DecodeImage(feature='image', size=(8, 8), crop='fit', fraction=0.5"
    )
    data = {"image": FILES["rgb.png"]}
    np.testing.assert_array_equal(again.map(data)["image"], decode.map(data)["image"])


def test_other_threads_run_while_an_image_is_decoded():
    """A thread that never gives up the interpreter on its own is overtaken during the call."""
    data = jpeg(1500, 2000, quality=95)
    decode = DecodeImage()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for _ in range(20):
            steps: list[str] = []
            begun = threading.Event()

            def run(steps=steps, begun=begun):
                begun.set()
                decode.map(data)
                steps.append("decoded")

            thread = threading.Thread(target=run)
            thread.start()
            begun.wait()
            overtook = not steps
            thread.join()
            if overtook:
                return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("the interpreter was never released")


def random_png(rng):
    """An image of any mode, with transparency of any form, as PIL writes it."""
    mode = str(rng.choice(["1", "L", "LA", "P", "RGB", "RGBA"]))
    pixels = rng.integers(0, 256, (*rng.integers(1, 40, 2), 4), dtype=np.uint8)
    if rng.random() < 0.5:
        pixels = (pixels // 64 * 85).astype(np.uint8)  # so that some pixels are alike
    image, options = Image.fromarray(pixels).convert(mode), {}
    is_transparent = rng.random() < 0.6
    if mode == "P":
        options["bits"] = int(rng.choice([1, 2, 4, 8]))
        image = Image.fromarray(pixels[..., :3]).quantize(2 ** options["bits"])
        colours = int(rng.integers(1, 2 ** options["bits"] + 1))
        alphas = [colours - 1, rng.bytes(colours)]
        options |= {"transparency": alphas[rng.integers(2)]} if is_transparent else {}
    elif is_transparent and mode in {"1", "L", "RGB"}:
        first = tuple(map(int, pixels[0, 0, :3]))
        options["transparency"] = {"1": int(rng.choice([0, 1, 255])), "L": first[0]}.get(
            mode, first
        )
    file = io.BytesIO()
    image.save(file, "PNG", optimize=bool(rng.random() < 0.3), **options)
    return file.getvalue()


def random_jpeg(rng):
    """An image with any options of PIL, and perhaps without its tables if they are standard."""
    mode = str(rng.choice(["L", "RGB", "CMYK"]))
    pixels = rng.integers(0, 256, (*rng.integers(1, 70, 2), 3), dtype=np.uint8)
    options = {
        "quality": int(rng.integers(1, 101)),
        "progressive": bool(rng.random() < 0.4),
        "optimize": bool(rng.random() < 0.4),
        "subsampling": int(rng.integers(3)),
    }
    if rng.random() < 0.4:
        restart = rng.choice(["restart_marker_blocks", "restart_marker_rows"])
        options[str(restart)] = int(rng.integers(1, 5))
    if rng.random() < 0.2 and mode == "RGB":
        options |= {"keep_rgb": True, "subsampling": 0}
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **options)
    data = file.getvalue()
    if rng.random() < 0.5 and not (options["progressive"] or options["optimize"]):
        headers, rest = segments(data)
        data = b"\xff\xd8" + b"".join(part for marker, part in headers if marker != 0xC4) + rest
    return data


def test_random_images_are_those_of_pil():
    for seed in range(SEED, SEED + cases(150, 20_000)):
        rng = np.random.default_rng(seed)
        data = random_png(rng)
        for channels in MODES:
            found = DecodeImage(channels=channels).map(data)
            np.testing.assert_array_equal(found, by_pil(opened(data), channels), f"PNG {seed}")
        data = random_jpeg(rng)
        found = DecodeImage().map(data)
        np.testing.assert_array_equal(found, by_pil(opened(data)), f"JPEG {seed}")


def test_images_that_opencv_wrote_are_those_of_pil():
    """With all samplings, restarts, filters and strategies; `data/opencv_images.py` wrote them."""
    with zipfile.ZipFile(Path(__file__).parent / "data/opencv.zip") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert len(files) == 120
    for name, data in files.items():
        is_gray_16 = opened(data).mode.startswith("I")  # see `LIKE_PIL`
        for channels in MODES:
            if is_gray_16:
                gray = Image.fromarray((np.asarray(opened(data)) >> 8).astype(np.uint8))
                expected = by_pil(gray, channels)
            else:
                expected = by_pil(opened(data), channels)
            found = DecodeImage(channels=channels).map(data)
            np.testing.assert_array_equal(found, expected, f"{name} {channels}")


# --- bad images and arguments --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["baseline_420.jpg", "progressive_420.jpg", "rgb.png", "palette.png"]
)
def test_every_truncation_is_an_error(name):
    data, decode = FILES[name], DecodeImage()
    lenient = DecodeImage(allow_damaged=True)
    expected = decode.map(data)
    for length in range(len(data)):
        # Two bytes end a JPEG; without them it was cut short, too.
        with pytest.raises((_native.GrainmillError, ValueError)) as caught:
            decode.map(data[:length])
        assert "byte" in str(caught.value)
    found = lenient.map(data[: len(data) * 3 // 4])
    assert found.shape == expected.shape
    if "progressive" not in name:
        np.testing.assert_array_equal(found[:8], expected[:8])


def test_truncated_images_are_those_of_pil_if_allowed(monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    data = jpeg(160, 200, quality=90)[:-6000]
    expected, found = by_pil(opened(data)), DecodeImage(allow_damaged=True).map(data)
    # Where the data ends, and where chroma is interpolated, they may differ.
    differs = np.flatnonzero((expected != found).any(axis=(1, 2)))
    assert len(differs) <= 18
    assert (found[-16:] == 128).all()


@pytest.mark.parametrize("name", ["baseline_420.jpg", "progressive_420.jpg", "rgb.png", "rgba.png"])
def test_flipped_bits_are_errors_or_pixels(name):
    data, rng = FILES[name], np.random.default_rng(1)
    decode = DecodeImage(max_pixels=10**7)
    errors = 0
    for place in rng.integers(0, 8 * len(data), 2000):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << (place % 8)
        try:
            assert decode.map(bytes(damaged)).ndim == 3
        except (_native.GrainmillError, ValueError):
            errors += 1
    # A PNG has checksums; in a JPEG most changes of the coded data are pixels.
    assert errors > (1900 if name.endswith("png") else 50)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "it is neither JPEG, PNG, WebP nor GIF: 0 bytes"),
        (b"GIF88a", "neither JPEG, PNG, WebP nor GIF"),
        (b"RIFF\0\0\0\0WEBQ", "neither JPEG, PNG, WebP nor GIF"),
        (b"\xff\xd8", "JPEG image: byte 2: the file ends before the image does"),
        (b"\xff\xd8\xff\xd9", "there is no frame"),
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0\0\0\1\1\1\x11\0", "the image has 1 x 0 pixels"),
        (b"\xff\xd8\xff\xc9\0\x0b\x08\0\1\0\1\1\1\x11\0", "arithmetic coding is not supported"),
        (b"\xff\xd8\xff\xc3\0\x0b\x08\0\1\0\1\1\1\x11\0", "lossless or hierarchical JPEG"),
        (b"\xff\xd8\xff\xc1\0\x0b\x0c\0\1\0\1\1\1\x11\0", "JPEG with 12 bits per sample"),
        (b"\xff\xd8\xff\xc0\0\x0e\x08\0\1\0\1\2\1\x11\0\2\x11\0", "JPEG with 2 components"),
        (b"\x89PNG\r\n\x1a\n", "PNG image: byte 8: the first chunk is not a header"),
    ],
)
def test_what_is_wrong_is_named(data, problem):
    with pytest.raises(_native.GrainmillError) as caught:
        DecodeImage().map(data)
    assert problem in str(caught.value)


def test_images_with_too_many_pixels_are_refused_before_memory_is_taken():
    huge = b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\1\1\x11\0"
    with pytest.raises(ValueError, match=r"65535 x 65535 pixels, more than `max_pixels=178956970`"):
        DecodeImage().map(huge)
    with pytest.raises(ValueError, match=r"2147483647 x 2147483647 pixels"):
        DecodeImage().map(png(np.zeros((1, 1, 3), np.uint8), size=(2**31 - 1, 2**31 - 1)))
    with pytest.raises(ValueError, match=r"21 x 13 pixels, more than `max_pixels=272`"):
        DecodeImage(max_pixels=272).map(png(np.asarray(photo(13, 21))))


def test_pixels_that_cannot_be_in_the_file_are_an_error_before_memory_is_taken():
    data = bytearray(jpeg(16, 16))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = b"\x30\0\x30\0"
    with pytest.raises(_native.GrainmillError, match=r"12288 x 12288 pixels cannot be in"):
        DecodeImage().map(bytes(data))
    with pytest.raises(_native.GrainmillError, match=r"10000 x 10000 pixels cannot be in"):
        DecodeImage().map(png(np.zeros((1, 1, 3), np.uint8), size=(10_000, 10_000)))


@pytest.mark.parametrize("box", [(0, 0, 51, 1), (50, 0, 1, 1), (0, 60, 1, 8), (0, 0, 0, 1)])
def test_crop_outside_of_the_image_is_an_error(box):
    with pytest.raises(ValueError, match="the crop must lie in the image, which is 50 high and 67"):
        DecodeImage(crop=lambda *_: box).map(FILES["baseline_420.jpg"])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"channels": 2}, "`channels` must be 1, 3, 4 or None, got 2"),
        ({"size": (0, 4)}, "`size` must be a height and a width of at least 1"),
        ({"crop": "random", "size": (2, 2)}, "`DecodeRandomCrop` has random crops"),
        ({"crop": "center"}, "needs a `size`"),
        ({"fraction": 0.5}, '`fraction` needs `crop="fit"`'),
        ({"crop": "fit", "size": (2, 2), "fraction": 1.5}, "`fraction` must be above 0"),
        ({"resample": "nearest"}, "`resample` must be one of bilinear"),
        ({"max_pixels": 0}, "`max_pixels` must be at least 1"),
    ],
)
def test_invalid_arguments_fail_when_the_transform_is_made(arguments, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        DecodeImage(**arguments)


@pytest.mark.parametrize("transform", [DecodeImage, DecodeRandomCrop])
@pytest.mark.parametrize(("size", "kind"), [(224, TypeError), ((1, 2, 3), ValueError)])
def test_sizes_that_are_no_pair_are_refused(transform, size, kind):
    with pytest.raises(
        kind, match=re.escape(f"`size` must be a height and a width, as (224, 224), got {size}")
    ):
        transform(size=size)


@pytest.mark.parametrize("arguments", [{"scale": (0.5, 0.1)}, {"scale": (0, 1)}, {"ratio": (0, 1)}])
def test_invalid_ranges_of_random_crops(arguments):
    with pytest.raises(ValueError, match="two growing"):
        DecodeRandomCrop(size=(2, 2), **arguments)
