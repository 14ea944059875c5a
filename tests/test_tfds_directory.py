"""Directories of TensorFlow Datasets in the format ArrayRecord.

Their form is that of the JSON of its `DatasetInfo` message, as in the directories that users
publish: 64-bit numbers as texts, names in camel case, one entry for each split.
"""

import itertools
import json
import pickle

import pytest

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter

SPLITS = {"train": [4, 0, 3, 5], "validation": [6]}


@pytest.fixture
def directory(tmp_path):
    return make(tmp_path / "words" / "1.0.0")


def make(path, template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}", **changed):
    path.mkdir(parents=True)
    splits = []
    for split, lengths in SPLITS.items():
        splits.append(
            {
                "filepathTemplate": template,
                "name": split,
                "numBytes": "100",
                "shardLengths": [str(length) for length in lengths],
            }
        )
        first = 0
        for number, length in enumerate(lengths):
            values = {
                "{DATASET}": "words",
                "{SPLIT}": split,
                "{FILEFORMAT}": "array_record",
                "{SHARD_X_OF_Y}": f"{number:05}-of-{len(lengths):05}",
                "{SHARD_INDEX}": f"{number:05}",
                "{NUM_SHARDS}": f"{len(lengths):05}",
            }
            name = template
            for key, value in values.items():
                name = name.replace(key, value)
            with ArrayRecordWriter(str(path / name), "group_size:1") as writer:
                for record in range(first, first + length):
                    writer.write(f"{split}{record}".encode())
            first += length
    info = {"name": "words", "version": "1.0.0", "fileFormat": "array_record", "splits": splits}
    (path / "dataset_info.json").write_text(json.dumps({**info, **changed}))
    features = {"pythonClassName": "FeaturesDict", "featuresDict": {"features": {"text": {}}}}
    (path / "features.json").write_text(json.dumps(features))
    return path


def read(path, split):
    return [r.decode() for r in grain.sources.ArrayRecordDataSource.from_tfds_dir(path, split)]


TRAIN = [f"train{k}" for k in range(12)]
VALIDATION = [f"validation{k}" for k in range(6)]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", TRAIN),
        ("validation", VALIDATION),
        ("train+validation", TRAIN + VALIDATION),
        (" validation + train ", VALIDATION + TRAIN),
        ("all", TRAIN + VALIDATION),
        ("train[:10%]", TRAIN[:1]),
        ("train[10%:]", TRAIN[1:]),
        ("train[-25%:]", TRAIN[-3:]),
        ("train[12.5%:50%]", TRAIN[2:6]),
        ("train[3:8]", TRAIN[3:8]),
        ("train[-5:]", TRAIN[-5:]),
        ("train[:-5]", TRAIN[:-5]),
        ("train[:]", TRAIN),
        ("train[1_0:]", TRAIN[10:]),
        ("train[2shard]", TRAIN[4:7]),
        ("train[0_2_shard]", TRAIN[4:7]),
        ("train[-1shard]", TRAIN[7:]),
        ("train[1shard:3shard]", TRAIN[4:7]),
        ("train[:1]+validation[50%:]+train[-1:]", TRAIN[:1] + VALIDATION[3:] + TRAIN[-1:]),
    ],
)
def test_splits(directory, split, expected):
    assert read(directory, split) == expected
    source = grain.sources.ArrayRecordDataSource.from_tfds_dir(str(directory), split)
    assert list(pickle.loads(pickle.dumps(source))) == [text.encode() for text in expected]
    assert sorted(grain.MapDataset.source(source).shuffle(seed=1)) == sorted(source)


def test_parts_of_a_split_have_their_own_text(directory):
    splits = ["train", "train[:50%]", "train[50%:]", "train[2:3]", "train[2:4]"]
    made = grain.sources.ArrayRecordDataSource.from_tfds_dir
    texts = [repr(made(directory, split)) for split in splits]
    assert texts == [repr(pickle.loads(pickle.dumps(made(directory, split)))) for split in splits]
    assert len(set(texts)) == len(splits)


@pytest.mark.parametrize("bounds", [[0, 33, 66, 100], [0, 10, 90, 100], [0, 50, 100]])
def test_percentages_of_parts_cover_a_split_exactly(directory, bounds):
    found = [read(directory, f"train[{a}%:{b}%]") for a, b in itertools.pairwise(bounds)]
    assert [record for part in found for record in part] == TRAIN


def test_no_file_is_opened_before_it_is_read(directory):
    for file in directory.glob("*array_record*"):
        file.unlink()
    source = grain.sources.ArrayRecordDataSource.from_tfds_dir(directory, "train+validation")
    assert len(source) == 18
    assert source.features["pythonClassName"] == "FeaturesDict"
    with pytest.raises(FileNotFoundError, match="words-train"):
        source[0]


def test_templates_of_file_names(tmp_path):
    path = make(tmp_path / "a", "{SPLIT}_{SHARD_INDEX}_{NUM_SHARDS}.{FILEFORMAT}")
    assert read(path, "train") == TRAIN


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("test", r"has no split 'test'; it has \['train', 'validation'\]"),
        ("train[", "must be like 'train'"),
        ("", "must be like 'train'"),
        ("train+", "must be like 'train'"),
        ("train[5]", "must have a range"),
        ("train[a:]", "has the bound 'a', expected a number"),
        ("train[1.5:]", "expected an integer"),
        ("train[:13]", "exceeds 12"),
        ("train[:101%]", "exceeds 100"),
        ("train[4shard]", "must be one of 4 shards"),
        ("train[-5shard]", "must be one of 4 shards"),
        ("train[1.5shard]", r"'train\[1.5shard\]' must be one of 4 shards"),
        ("train[1.5shard:]", "has the bound '1.5shard', expected an integer"),
        ("train[_:]", r"'train\[_:\]' has the bound '_', expected a number"),
        ("train[_shard]", "must have a range"),
        (f"train[{'9' * 5000}shard]", "must be one of 4 shards"),
        ("train[5:5]", "has no records"),
        ("train[1shard]", "has no records"),
    ],
)
def test_bad_splits_are_refused(directory, split, message):
    with pytest.raises(ValueError, match=message):
        read(directory, split)


def test_bad_directories_are_refused(directory, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"no dataset_info.json in .*; there is one in .*1.0.0"
    ):
        read(directory.parent, "train")
    with pytest.raises(FileNotFoundError, match=r"no dataset_info\.json in"):
        read(tmp_path / "nothing", "train")
    with pytest.raises(ValueError, match="format 'tfrecord', expected 'array_record'"):
        read(make(tmp_path / "b", fileFormat="tfrecord"), "train")
    for number, splits in enumerate([None, [{}], [{"name": "a", "shardLengths": ["x"]}], [3]]):
        with pytest.raises(ValueError, match="not as TensorFlow Datasets writes it"):
            read(make(tmp_path / f"c{number}", splits=splits), "train")
    for text, message in [("{", "not JSON"), ("[]", "expected a JSON object, got list")]:
        (directory / "dataset_info.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read(directory, "train")
    escaping = [{"name": "train", "shardLengths": ["1"], "filepathTemplate": "../x"}]
    with pytest.raises(ValueError, match="contains a directory"):
        read(make(tmp_path / "d", splits=escaping), "train")
