"""Images decoded in blocks, into the rows of batches, by several threads: as one by one."""

import io
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_by_one import OneByOne
from PIL import Image

import grainmill as grain
from grainmill import MapDataset, _native
from grainmill._evaluate.compile import compiled
from grainmill._loader.records import MapData
from grainmill.array_record import ArrayRecordWriter
from grainmill.transforms import DecodeImage, DecodeRandomCrop, Tokenize

FILES = [p.read_bytes() for p in sorted((Path(__file__).parent / "data/images").iterdir())]
NUM = 90


def image_of(number, shape=None):
    rng = np.random.default_rng(number)
    height, width = shape or rng.integers(20, 90, 2)
    file = io.BytesIO()
    kind = "PNG" if number % 5 == 0 else "JPEG"
    Image.fromarray(rng.integers(0, 255, (height, width, 3)).astype(np.uint8)).save(file, kind)
    return file.getvalue()


def write(path, records):
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for record in records:
            writer.write(record)
    return grain.sources.ArrayRecordDataSource(str(path))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("images") / "records", map(image_of, range(NUM)))


def with_others(data):
    """An element with all kinds of values beside the image."""
    return {
        "label": len(data),
        "image": data,
        "box": np.array([len(data), 1], np.float32),
        "name": f"{len(data) % 7}",
    }


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    else:
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


CROPS = [None, "center", "fit", lambda height, width: (height // 3, 0, height // 2, width)]


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(FILES), max_size=6),
    st.sampled_from(CROPS),
    st.sampled_from([1, 3, 4, None]),
    st.booleans(),
)
def test_blocks_are_those_of_single_images(files, crop, channels, has_feature):
    size = (9, 12) if crop in {"center", "fit"} else None
    decode = DecodeImage("image" if has_feature else None, size=size, crop=crop, channels=channels)
    elements = [{"n": n, "image": data} for n, data in enumerate(files)] if has_feature else files
    for found, element in zip(decode.map_block(elements), elements, strict=True):
        expected = decode.map(element)
        np.testing.assert_equal(found, expected)


OPTIONS = {
    "list": None,
    "caller": grain.ReadOptions(num_threads=0),
    "threads": grain.ReadOptions(num_threads=4),
    "worker": grain.ReadOptions(num_workers=1),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("upstream", [None, with_others])
def test_batches_are_those_of_single_images(source, upstream, batch_size, options):
    def batches(transform):
        ds = MapDataset.source(source).shuffle(seed=1).map(upstream or (lambda data: data))
        ds = ds.map(transform).batch(batch_size)
        return list(ds if options == "list" else ds.to_iter_dataset(OPTIONS[options]))

    decode = DecodeImage(upstream and "image", size=(24, 32), crop="fit")
    found, expected = batches(decode), batches(OneByOne(decode))
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert_same(batch, other)


@pytest.mark.parametrize("upstream", [None, with_others])
def test_rows_are_written_by_the_engine(source, upstream, monkeypatch):
    """Only images of the first batch become arrays of their own, which show their shape."""
    made = []
    for name in ("map", "map_block"):
        real = getattr(DecodeImage, name)

        def counted(self, given, real=real):
            made.append(1 if type(given) in {bytes, dict} else len(given))
            return real(self, given)

        monkeypatch.setattr(DecodeImage, name, counted)
    ds = MapDataset.source(source).map(upstream or (lambda data: data))
    batches = list(ds.map(DecodeImage(upstream and "image", size=(8, 8))).batch(30))
    assert len(batches) == 3
    assert sum(made) <= 30


class Watched(DecodeImage):
    """Notes which threads write rows, and waits so that several have to."""

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.threads = set()

    def _fill_rows(self, elements, columns, at):
        self.threads.add(threading.current_thread().name)
        time.sleep(0.01 * len(elements))
        return super()._fill_rows(elements, columns, at)


@pytest.mark.parametrize("upstream", [None, with_others])
def test_threads_write_rows_of_one_batch(source, upstream):
    ds = MapDataset.source(source).map(upstream or (lambda data: data))
    decode = Watched(upstream and "image", size=(8, 8))
    expected = list(ds.map(OneByOne(decode)).batch(30))
    many = ds.map(decode).repeat(4).batch(30)
    options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=30)
    for number, batch in enumerate(many.to_iter_dataset(options)):
        assert_same(batch, expected[number % 3])
    assert len(decode.threads) > 1


@pytest.mark.parametrize("at", [0, 1, 40, NUM - 1])
@pytest.mark.parametrize("options", ["list", "threads"])
def test_a_damaged_image_fails_at_its_place(tmp_path, at, options):
    records = [image_of(number) for number in range(NUM)]
    records[at] = records[at][: len(records[at]) // 2]
    decode = Watched(size=(8, 8)) if options == "threads" else DecodeImage(size=(8, 8))
    ds = MapDataset.source(write(tmp_path / "records", records)).map(decode).batch(30)
    batches = iter(ds if options == "list" else ds.to_iter_dataset(OPTIONS[options]))
    for _ in range(at // 30):
        assert next(batches).shape == (30, 8, 8, 3)
    with pytest.raises(_native.GrainmillError, match="image: byte") as failed:
        next(batches)
    assert any(f"while computing element {at} of" in note for note in failed.value.__notes__)


def test_images_of_several_sizes_make_no_batch(source):
    texts = []
    for transform in (DecodeImage(), OneByOne(DecodeImage())):
        with pytest.raises(ValueError, match="same structure") as failed:
            list(MapDataset.source(source).map(transform).batch(30))
        texts.append(str(failed.value))
    assert texts[0] == texts[1]


def test_images_of_one_size_make_batches_without_a_size(tmp_path):
    source = write(tmp_path / "records", (image_of(number, (12, 10)) for number in range(NUM)))
    ds = MapDataset.source(source)
    decode = DecodeImage()
    for batch, other in zip(
        ds.map(decode).batch(30), ds.map(OneByOne(decode)).batch(30), strict=True
    ):
        assert_same(batch, other)


def test_a_derived_class_that_maps_otherwise_is_asked_for_each_image(source):
    class Scaled(DecodeImage):
        def map(self, element):
            return super().map(element) / np.float32(255)

    class ScaledBlocks(Scaled):
        def map_block(self, elements):
            return [self.map(element) for element in elements]

    expected = np.stack([Scaled(size=(8, 8)).map(source[n]) for n in range(NUM)])
    for transform in (Scaled(size=(8, 8)), ScaledBlocks(size=(8, 8))):
        batch = MapDataset.source(source).map(transform).batch(NUM)[0]
        assert_same(batch, expected)
        assert_same(np.stack(list(MapDataset.source(source).map(transform))), expected)


def test_blocks_of_large_images_are_small(tmp_path):
    """As without blocks: elements are computed by time and bytes, not by number."""
    source = write(tmp_path / "records", (image_of(number, (300, 400)) for number in range(NUM)))
    lengths = []

    class Counted(DecodeImage):
        def map(self, element):
            lengths.append(1)
            return super().map(element)

        def map_block(self, elements):
            lengths.append(len(elements))
            return super().map_block(elements)

    for options in ("caller", "threads"):
        for _ in MapDataset.source(source).map(Counted()).to_iter_dataset(OPTIONS[options]):
            pass
    assert sum(lengths) == 2 * NUM
    assert max(lengths) <= 16


def test_longer_blocks_are_not_tried(source):
    """Images cost the same in blocks of any length, so elements should not wait for each other."""
    ds = MapDataset.source(source)
    decode, other = DecodeImage(size=(8, 8)), DecodeImage(size=(9, 9))
    mixed = MapDataset.mix([ds.map(decode), ds.map(other), ds.map(other)])
    for images in (ds.map(decode), mixed, ds.map(MapData(decode.map, decode))):
        program = compiled(images._plan_node())
        assert not program.maps_blocks
        assert not program.reads_lists
    assert compiled(ds.map(Tokenize(list)).map(decode)._plan_node()).maps_blocks


def test_random_crops_keep_their_generators(source):
    decode = DecodeRandomCrop(size=(8, 8))
    ds = MapDataset.source(source).random_map(decode, seed=4)
    batches = list(ds.batch(30))
    assert_same(np.concatenate(batches), np.stack([ds[n] for n in range(NUM)]))
