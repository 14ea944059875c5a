"""Whole files as elements, beside a slow walk over folders."""

import io
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from bucket_server import BucketServer
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from moto_server import use_s3
from PIL import Image

import grainmill as grain
from grainmill.sources import FolderDataSource

# Among them are names that begin alike, are hidden, have characters of patterns, or no UTF-8.
NAMES = (
    "a",
    "b",
    "a-b",
    "a b",
    "A",
    "é",
    "猫",
    "[1]",
    "*",
    ".h",
    "_h",
    "x.jpg",
    "y.jpg",
    "\udcff.jpg",
)
TREES = st.dictionaries(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join),
    st.binary(max_size=20),
    max_size=12,
)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(root, tree):
    """Writes files by their paths; one whose folder is a file, or the reverse, is left out."""
    for name, data in tree.items():
        try:
            (Path(root) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(root) / name).write_bytes(data)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue


def walked(root, depth=None):
    """The visible files below `root`, by a walk; of all depths, or of one."""
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if name[0] not in "._"]
        for name in names:
            parts = Path(folder, name).relative_to(root).parts
            if name[0] not in "._" and depth in (None, len(parts)):
                found.append("/".join((root, *parts)))
    return sorted(found)


def elements_of(paths, name_of):
    classes = sorted({name_of(path) for path in paths})
    return [
        {"data": Path(path).read_bytes(), "label": classes.index(name_of(path)), "path": path}
        for path in paths
    ]


def check(source, expected):
    assert len(source) == len(expected)
    keys = range(len(expected))
    for found in (
        list(source),
        [source[np.int64(key)] for key in keys],
        list(grain.MapDataset.source(source)),
        list(pickle.loads(pickle.dumps(source))),
    ):
        assert found == expected
    for key in (-1, len(expected)):
        with pytest.raises(IndexError, match=f"file {key} was requested"):
            source[key]


@settings(max_examples=cases(60, long=2000))
@given(tree=TREES)
def test_files_are_those_of_a_slow_walk(tree):
    shutil.rmtree("root", ignore_errors=True)
    Path("root").mkdir()
    write("root", tree)
    every, second = walked("root"), walked("root", 2)
    if not every:
        with pytest.raises(FileNotFoundError, match="there are no files below"):
            FolderDataSource("root")
        return
    without = [{"data": element["data"]} for element in elements_of(every, str)]
    check(FolderDataSource("root"), without)
    check(FolderDataSource(every), without)
    if walked("root", 1):
        with pytest.raises(ValueError, match="no folder names the class of this file"):
            FolderDataSource("root", labels="folder")
    else:
        source = FolderDataSource("root", labels="folder", with_paths=True)
        check(source, elements_of(every, lambda path: path.split("/")[1]))
    visible = [path for path in second if not path.startswith("root/_")]
    if visible:  # `glob` takes what begins with `_`
        matched = [path for path in FolderDataSource("root/[!_]*/[!_]*").paths if path in visible]
        assert matched == visible
        source = FolderDataSource(visible, labels="folder", with_paths=True)
        check(source, elements_of(visible, lambda path: path.split("/")[-2]))
        assert source.class_names == sorted({path.split("/")[-2] for path in visible})


def test_a_pattern_takes_the_folder_of_each_file_and_a_function_any_name():
    write("root", {"train/cat/1.jpg": b"1", "train/dog/2.jpg": b"2", "valid/dog/x/3.jpg": b"3"})
    source = FolderDataSource("root/**/*.jpg", labels="folder")
    assert source.class_names == ["cat", "dog", "x"]
    source = FolderDataSource("root", labels=lambda path: path.split("/")[2])
    assert (source.class_names, [each["label"] for each in source]) == (["cat", "dog"], [0, 1, 1])
    both = FolderDataSource(["root/train/*/*", Path("root/valid")], labels="folder")
    assert both.class_names == ["cat", "dog"]


def test_links_lead_to_files_and_folders():
    write("elsewhere", {"1.jpg": b"1", "2.jpg": b"2"})
    Path("root/cat").mkdir(parents=True)
    Path("root/dog").symlink_to(Path("elsewhere").absolute())
    Path("root/cat/3.jpg").symlink_to(Path("elsewhere/1.jpg").absolute())
    Path("root/cat/gone.jpg").symlink_to("nowhere")
    for paths in ("root", "root/*/*"):
        source = FolderDataSource(paths, labels="folder")
        names = ["cat/3.jpg", "cat/gone.jpg", "dog/1.jpg", "dog/2.jpg"]
        assert source.paths == [f"root/{name}" for name in names]
        assert source[3] == {"data": b"2", "label": 1}
        ds = grain.MapDataset.source(source)
        with pytest.raises(FileNotFoundError) as raised:
            ds[1]
        assert "root/cat/gone.jpg" in "".join(raised.value.__notes__)
        assert ds[0] == {"data": b"1", "label": 0}


def test_what_is_no_file_is_an_error_that_names_it():
    write("root", {"cat/1.jpg": b"1"})
    os.mkfifo("root/cat/2.jpg")
    with pytest.raises(grain.GrainmillError, match=r"root/cat/2\.jpg.*not a regular file"):
        FolderDataSource("root")[1]


WRONG = {
    "no match": (("x/*.jpg",), {}, FileNotFoundError, r"no file matches the pattern: 'x/\*.jpg'"),
    "no file": (("x.jpg",), {}, FileNotFoundError, "no such file or folder: 'x.jpg'"),
    "no path": (([],), {}, ValueError, "Paths sequence can not be of 0 length"),
    "a number": ((3,), {}, ValueError, "Unsupported path format"),
    "a range": (("cat/1.jpg[0:3]",), {}, ValueError, "cat/1.jpg: files are read whole"),
    "a range of a URL": (
        ("https://me:secret@host/1.jpg[0:3]",),
        {},
        ValueError,
        "^https://host/1.jpg: files are read whole",
    ),
    "a name that is taken": (("cat",), {"feature": "label"}, ValueError, "`feature` must differ"),
    "labels": (("cat",), {"labels": "class"}, ValueError, "`labels` must be"),
    "no folder": (("*.jpg",), {"labels": "folder"}, ValueError, "0.jpg: no folder names"),
    "names alone": (("cat",), {"class_names": ["cat"]}, ValueError, "needs `labels`"),
    "a name less": (
        ("*/*.jpg",),
        {"labels": "folder", "class_names": ["cat"]},
        ValueError,
        "dog/1.jpg: its class 'dog' is none of the 1 in `class_names`; add it there",
    ),
    "a name twice": (
        ("*/*.jpg",),
        {"labels": "folder", "class_names": ["cat", "dog", "cat"]},
        ValueError,
        "`class_names` must differ",
    ),
}


@pytest.mark.parametrize(("args", "kwargs", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_errors_when_the_source_is_made(args, kwargs, error, text):
    write(".", {"0.jpg": b"", "cat/1.jpg": b"", "dog/1.jpg": b""})
    with pytest.raises(error, match=text):
        FolderDataSource(*args, **kwargs)


def test_a_validation_set_has_the_labels_of_the_training_set():
    write("root", {"train/cat/1": b"", "train/dog/2": b"", "train/owl/3": b"", "valid/owl/4": b""})
    train = FolderDataSource("root/train", labels="folder")
    assert [each["label"] for each in FolderDataSource("root/valid", labels="folder")] == [0]
    valid = FolderDataSource("root/valid", labels="folder", class_names=train.class_names)
    assert [each["label"] for each in valid] == [2]


def test_repr_tells_what_is_read_apart_and_notices_a_folder_that_changed():
    write("root", {"cat/1": b"", "dog/2": b""})
    makers = [
        lambda: FolderDataSource("root"),
        lambda: FolderDataSource("root", with_paths=True),
        lambda: FolderDataSource("root", feature="image"),
        lambda: FolderDataSource("root", labels="folder"),
        lambda: FolderDataSource("root", labels="folder", class_names=["dog", "cat"]),
        lambda: FolderDataSource("root", labels="folder", class_names=["cat", "dog", "owl"]),
        lambda: FolderDataSource("root", labels=lambda _: "one"),
    ]
    texts = [repr(maker()) for maker in makers]
    assert len(set(texts)) == len(makers)
    assert texts == [repr(pickle.loads(pickle.dumps(maker()))) for maker in makers]
    loaders = [loader_of(makers[3]()) for _ in range(2)]
    iterator = iter(loaders[0])
    next(iterator)
    state = iterator.get_state()
    assert next(iterator) == {"data": b"", "label": 1}
    resumed = iter(loaders[1])
    resumed.set_state(state)
    assert next(resumed) == {"data": b"", "label": 1}
    Path("root/dog/2").rename("root/dog/3")
    with pytest.raises(ValueError, match="ource in checkpoint does not"):
        iter(loader_of(makers[3]())).set_state(state)


def loader_of(source):
    sampler = grain.samplers.SequentialSampler(len(source), grain.sharding.NoSharding())
    return grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)


def test_a_saved_text_stays_the_same():
    write("root", {"cat/1": b"", "dog/2": b""})
    text = repr(FolderDataSource("root", labels="folder"))
    assert text == "FolderDataSource(hash_of_paths=52bf22df43b883d5a338e6f7e45a2b181b8c8f77)"


def jpeg(value):
    file = io.BytesIO()
    Image.fromarray(np.full((40, 60, 3), value, np.uint8)).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["threads", "workers"])
def test_images_are_decoded_from_another_directory_too(options, tmp_path, monkeypatch):
    write("images", {f"{k % 3}/{k:02}.jpg": jpeg(8 * k) for k in range(30)})
    source = FolderDataSource("images/*/*.jpg", labels="folder", feature="image")
    monkeypatch.chdir("/")
    ds = grain.MapDataset.source(source).shuffle(seed=1).repeat(2)
    ds = ds.map(grain.transforms.DecodeImage("image", size=(16, 16), crop="center")).batch(8)
    seen = {}
    for batch in ds.to_iter_dataset(grain.ReadOptions(**options)):
        assert batch["image"].shape[1:] == (16, 16, 3)
        for image, label in zip(batch["image"], batch["label"], strict=True):
            assert np.ptp(image) == 0
            seen.setdefault(int(image[0, 0, 0]), set()).add(int(label))
    assert len(seen) == 30
    assert all(len(labels) == 1 for labels in seen.values())
    Path(tmp_path / "images/1/01.jpg").write_bytes(b"")
    with pytest.raises(RuntimeError, match="image") as raised:
        list(ds.to_iter_dataset(grain.ReadOptions(**options)))
    assert re.search(r"images/1/01\.jpg", "".join(raised.value.__notes__))


def test_files_in_a_bucket_are_those_of_a_folder(monkeypatch):
    tree = {f"{name}/{k}.jpg": bytes([k]) * k for name in ("cat", "dog") for k in range(5)}
    write("root", tree)
    hidden = {".x/1.jpg": b"", "cat/.y.jpg": b"", "_z/2.jpg": b"", "cat/": b""}
    local = list(FolderDataSource("root", labels="folder"))
    with BucketServer() as server:
        for name, data in (tree | hidden).items():
            server.put(f"/bucket/root/{name}", data)
        use_s3(monkeypatch, server.port)
        for paths in ("s3://bucket/root/", "s3://bucket/root/[cd]*/[0-9].jpg"):
            source = FolderDataSource(paths, labels="folder", with_paths=True)
            assert source.class_names == ["cat", "dog"]
            assert [{**each, "path": None} for each in source] == [
                {**each, "path": None} for each in local
            ]
            assert source.paths == [f"s3://bucket/root/{name}" for name in sorted(tree)]
            assert list(grain.MapDataset.source(source).to_iter_dataset()) == list(source)
        with pytest.raises(FileNotFoundError, match="there are no files below"):
            FolderDataSource("s3://bucket/nothing/")
        query = f"{server.url}/bucket/root/cat/3.jpg?secret=1/2"
        source = FolderDataSource(query, labels="folder")
        assert (source.class_names, source[0]["data"]) == (["cat"], b"\3\3\3")
        assert repr(source) == repr(FolderDataSource(query.replace("1/2", "3"), labels="folder"))
