"""Path arguments of sources, and mixtures given as text."""

import glob
import json
import os
import pickle
import re
import zlib
from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from record_formats import bagz, tar, tfrecord, zstd

import grainmill as grain
from grainmill import _native
from grainmill._files import formats
from grainmill._sources import paths as paths_module
from grainmill._sources import suffixes
from grainmill._sources.paths import expand
from grainmill.array_record import ArrayRecordWriter
from grainmill.experimental import (
    ParquetIterDataset,
    TFRecordIterDataset,
    assert_equal_output_after_checkpoint,
)

parse_mixture = grain.experimental.parse_mixture
mix_from_text = grain.experimental.mix_from_text


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def touch(*names):
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


def record_file(name, *records):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    with ArrayRecordWriter(str(name), "group_size:1") as writer:
        for record in records:
            writer.write(record)


class Instruction:
    def __init__(self, filename, skip, take):
        self.filename, self.skip, self.take, self.examples_in_shard = filename, skip, take, 9


def test_plain_paths_stand_for_themselves_whether_or_not_they_exist():
    touch("a")
    assert expand("a") == ["a"]
    assert expand(["b", Path("a"), "x/y.z"]) == ["b", "a", str(Path("x/y.z"))]
    assert expand(["a[3:5]", Instruction("f", 2, 4)]) == ["a[3:5]", "f[2:6]"]


def test_globs_are_sorted_and_leave_out_directories():
    touch("d/2.x", "d/10.x", "d/1.x", "d/e/3.x", "d/e/f/4.x", "d/.hidden.x", "d/dir.x/5.y")
    assert expand("d/*.x") == ["d/1.x", "d/10.x", "d/2.x"]
    assert expand("d/[12].x") == ["d/1.x", "d/2.x"]
    assert expand("d/**/*.x") == ["d/1.x", "d/10.x", "d/2.x", "d/e/3.x", "d/e/f/4.x"]
    assert expand(["d/e/?.x", "d/1*.x"]) == ["d/e/3.x", "d/1.x", "d/10.x"]


def test_an_existing_file_with_glob_characters_means_itself():
    names = ["a[1].x", "b*.x", "c?.x", "d@3", "a1.x", "b1.x"]
    touch(*names)
    for name in names:
        assert expand(name) == [name]
    Path("a[1].x").unlink()
    assert expand("a[1].x") == ["a1.x"]


def test_numbered_shards():
    assert expand("a/t@3") == [f"a/t-0000{k}-of-00003" for k in range(3)]
    assert expand("t@2.bagz") == ["t-00000-of-00002.bagz", "t-00001-of-00002.bagz"]
    assert expand("t.array_record@1") == ["t.array_record-00000-of-00001"]
    assert expand("t@100000")[-1] == "t-099999-of-100000"
    with pytest.raises(FileNotFoundError, match=r"no shards that match: 't@999999999'"):
        expand("t@999999999")  # their names would take gigabytes
    touch("t-000007-of-999999999", "t-00000-of-00003")
    with pytest.raises(FileNotFoundError, match=r"matches 1 shards out of 999999999"):
        expand("t@999999999")
    assert expand("user@host/a") == ["user@host/a"]
    touch(*expand("s@2.x"), "s-00000-of-00003.y", "s-1-of-2.x")
    assert expand("s@*.x") == expand("s@2.x")
    with pytest.raises(FileNotFoundError, match=r"'s@\*.y' matches 1 shards out of 3"):
        expand("s@*.y")
    with pytest.raises(FileNotFoundError, match=r"no shards that match: 'q@\*'"):
        expand("q@*")
    touch(*expand("s@3.x"))
    with pytest.raises(ValueError, match="shards of several sets, of 00002 and of 00003 shards"):
        expand("s@*.x")
    with pytest.raises(ValueError, match="at least 1"):
        expand("t@0")


def test_directories():
    touch("d/b", "d/a", "d/.c", "d/_SUCCESS", "d/sub/e", "d/t.x-00000-of-00001", "d/u.x", "d/x")
    for name in ("d", "d/", Path("d")):
        assert [Path(path).name for path in expand(name)] == [
            "a",
            "b",
            "t.x-00000-of-00001",
            "u.x",
            "x",
        ]
    assert expand("d", suffixes=(".x",)) == [
        str(Path("d/t.x-00000-of-00001")),
        str(Path("d/u.x")),
    ]
    assert expand(["d", "d/a"], looks_up=False) == ["d", "d/a"]
    with pytest.raises(FileNotFoundError, match=r"has no file that ends with \.y or \.z: 'd'"):
        expand("d", suffixes=(".y", ".z"))
    Path("empty").mkdir()
    with pytest.raises(FileNotFoundError, match="the directory has no files: 'empty'"):
        expand("empty")


def test_a_directory_has_the_files_that_tools_know(tmp_path):
    """Also those that the source refuses: passing over them would lose records in silence."""
    for name, extensions in suffixes.EXTENSIONS.items():
        folder = tmp_path / name
        known = {f"a{end}" for end in suffixes.suffixes_of(name)}
        known |= {f"b{extensions[0]}-00000-of-00001", f"c-00000-of-00001{extensions[-1]}"}
        known |= {f"D{extensions[0].upper()}"}
        if name == "tfrecord":
            known |= {"e.tfrecord-00000-of-00001.gz", "e.tfrec.zlib-00000-of-00001"}
        touch(*(f"{folder}/{file}" for file in known), f"{folder}/notes.txt", f"{folder}/x.json")
        found = expand(str(folder), suffixes=suffixes.suffixes_of(name))
        assert {Path(path).name for path in found} == known
        assert {path for path in found if formats.of_name(path) is None} == set()
        assert {formats.of_name(path).name for path in found} == {name}


def test_sources_take_every_file_of_their_format(tmp_path):
    for name, content in (
        ("x.tfrec", tfrecord([b"one"])),
        ("y.tfrecord", tfrecord([b"two"])),
        ("z.tfrecord.zlib", zlib.compress(tfrecord([b"three"]))),
    ):
        (tmp_path / name).write_bytes(content)
    assert list(grain.sources.TFRecordDataSource(tmp_path)) == [b"one", b"two", b"three"]
    (tmp_path / "z.tfrecord.zst").write_bytes(zstd(tfrecord([b"four"])))
    assert grain.sources.TFRecordDataSource(tmp_path)[3] == b"four"


def test_no_match_says_what_was_looked_for_and_where(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        expand("nothing/*.x")
    assert (
        str(caught.value) == f"no file matches the pattern: 'nothing/*.x', relative to {tmp_path}"
    )


def test_ranges_are_of_one_file():
    touch("a1", "a2")
    assert expand("a[1][3:7]") == ["a1[3:7]"]
    with pytest.raises(ValueError, match=r"'a\*\[3:7\]' matches 2 files"):
        expand("a*[3:7]")
    with pytest.raises(ValueError, match="must not end before it starts"):
        expand("a[7:3]")


@pytest.mark.parametrize("paths", [[], (), 3, None, [3], b"a", {"a": 1}.keys()])
def test_bad_arguments_are_refused_as_by_the_source(paths):
    with pytest.raises(ValueError, match=r"[Pp]ath") as expected:
        grain.sources.ArrayRecordDataSource(paths)
    with pytest.raises(ValueError, match=re.escape(str(expected.value))):
        expand(paths)


# --- URLs, with a store that is a list -----------------------------------------------------------


@pytest.fixture
def store(monkeypatch):
    objects = [
        *("gs://b/a/1.x", "gs://b/a/2.x", "gs://b/a/c/3.x", "gs://b/a/c/d/4.x", "gs://b/a/[5].x"),
        *(f"gs://b/s-0000{k}-of-00002" for k in range(2)),
        *("gs://b/dir/_SUCCESS", "gs://b/dir/t.x", "gs://b/dir/u.y", "gs://b/dir/sub/v.x"),
    ]
    asked = []

    def list_objects(prefix):
        asked.append(prefix)
        return [(url, 1) for url in sorted(objects) if url.startswith(prefix)]

    monkeypatch.setattr(_native, "list_objects", list_objects, raising=False)
    return asked


def test_urls(store):
    assert expand("gs://b/a/1.x") == ["gs://b/a/1.x"]
    assert expand("https://h:80/a?b=c") == ["https://h:80/a?b=c"]
    assert expand("s3://b/t@2") == ["s3://b/t-00000-of-00002", "s3://b/t-00001-of-00002"]
    assert expand("s3://user@2/a") == ["s3://user@2/a"]
    assert store == []
    assert expand("gs://b/a/?.x") == ["gs://b/a/1.x", "gs://b/a/2.x"]
    assert expand("gs://b/a/**/*.x") == [
        *("gs://b/a/1.x", "gs://b/a/2.x", "gs://b/a/[5].x", "gs://b/a/c/3.x", "gs://b/a/c/d/4.x")
    ]
    assert expand("gs://b/a/[!1].x[2:3]") == ["gs://b/a/2.x[2:3]"]
    assert expand("gs://b/a/[5].x") == ["gs://b/a/[5].x"]
    assert expand("gs://b/s@*") == expand("gs://b/s@2")
    assert expand("gs://b/dir/") == ["gs://b/dir/t.x", "gs://b/dir/u.y"]
    assert expand("gs://b/dir/", suffixes=(".y",)) == ["gs://b/dir/u.y"]
    with pytest.raises(FileNotFoundError, match=r"no object matches the pattern: 'gs://b/q/\*'"):
        expand("gs://b/q/*")
    with pytest.raises(FileNotFoundError, match="there is no files in: 'gs://b/q/'"):
        expand("gs://b/q/")
    assert set(store) >= {"gs://b/a/", "gs://b/q/"}


def test_a_build_without_stores_says_so(monkeypatch):
    monkeypatch.setattr(_native, "list_objects", None, raising=False)
    with pytest.raises(ValueError, match="cannot list 'gs://b/'"):
        expand("gs://b/*")


@settings(max_examples=cases(100, 5_000))
@given(
    st.lists(st.sampled_from(["a", "b", "*", "?", "[ab]", "[!a]", "/", "**/"]), max_size=6).map(
        "".join
    )
)
def test_patterns_of_urls_mean_what_they_mean_for_files(tmp_path_factory, pattern):
    root = tmp_path_factory.getbasetemp() / "tree"
    names = ["a", "b", "ab", "b.a", "c/a", "c/b", "c/d/a", "c/d/bb", "ba/ab", "ba/c/a"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    if "//" not in pattern and not pattern.startswith("/"):
        found = glob.glob(pattern, root_dir=root, recursive=True)  # noqa: PTH207 - the oracle
        matches = re.compile(paths_module._regex(pattern), re.DOTALL).fullmatch
        expected = {name for name in found if (root / name).is_file()}
        assert {name for name in names if matches(name)} == expected


# --- ArrayRecordDataSource -----------------------------------------------------------------------


def test_array_record_source_takes_patterns_shards_and_directories():
    names = [f"d/t.array_record-0000{k}-of-00003" for k in range(3)]
    for k, name in enumerate(names):
        record_file(name, b"%d" % k, b"%d'" % k)
    touch("d/features.json")
    expected = grain.sources.ArrayRecordDataSource(names)
    for paths in ["d/t*", "d/t.array_record@3", "d/t.array_record@*", "d", Path("d"), ["d/t*"]]:
        source = grain.sources.ArrayRecordDataSource(paths)
        assert [path.replace(os.sep, "/") for path in source.paths] == names
        assert list(source) == list(expected)
        assert os.sep != "/" or repr(source) == repr(expected)
    source = grain.sources.ArrayRecordDataSource(["d/t*", "d/t.array_record-00001-of-00003[1:2]"])
    assert list(source)[-1] == b"1'"
    with pytest.raises(FileNotFoundError, match="no file matches the pattern: 'd/x"):
        grain.sources.ArrayRecordDataSource("d/x*")
    with pytest.raises(FileNotFoundError):
        grain.sources.ArrayRecordDataSource("d/x")
    indexed = grain.sources.ArrayRecordDataSource("d/t*", index="counts.index")
    assert list(indexed) == list(expected)


NUMBERED = [b'{"n": %d}' % n for n in range(10)]
FILES = {
    "TFRecordDataSource": tfrecord(NUMBERED),
    "JsonLinesDataSource": b"\n".join(NUMBERED),
    "BagzDataSource": bagz(NUMBERED),
    "WebDatasetDataSource": tar((f"{n}.json", record) for n, record in enumerate(NUMBERED)),
}


@pytest.mark.parametrize("name", FILES)
def test_every_source_of_records_takes_ranges(name):
    for path in ("a", "b"):
        Path(path).write_bytes(FILES[name])
    make = getattr(grain.sources, name)
    whole = list(make("a"))
    assert len(whole) == 10
    source = make(["a[2:5]", "b", Instruction("a", 8, 1)])
    expected = [*whole[2:5], *whole, whole[8]]
    assert (len(source), list(source)) == (14, expected)
    assert source.paths == ["a", "b", "a"]
    assert list(pickle.loads(pickle.dumps(source))) == expected
    assert source._record_location(1) == (str(Path("a").absolute()), 3)
    assert list(grain.MapDataset.source(make("a[2:5]"))) == whole[2:5]
    reprs = {repr(make(paths)) for paths in ("a", "a[2:5]", "a[2:6]", ["a", "a"], ["a[2:5]", "a"])}
    assert len(reprs) == 5
    with pytest.raises(IndexError):
        source[14]
    assert repr(make("a")) == repr(make("a")) != repr(make("b"))


# --- mixtures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:0.3;b:0.7", {"a": "3/10", "b": "7/10"}),
        ("a,1;b,2;c,1", {"a": "1/4", "b": "1/2", "c": "1/4"}),
        (" a : 1 ;; b , 3 ; ", {"a": "1/4", "b": "3/4"}),
        ("a;b", {"a": "1/2", "b": "1/2"}),
        ("a*[0:5]", {"a*[0:5]": "1"}),
        ("gs://b/x:1e-1;s3://b/y:.9", {"gs://b/x": "1/10", "s3://b/y": "9/10"}),
        ("http://h:80/x;http://h:80/y", {"http://h:80/x": "1/2", "http://h:80/y": "1/2"}),
        ("C:\\d\\x:2;D:/y,2", {"C:\\d\\x": "1/2", "D:/y": "1/2"}),
        ("a,b:1;c@8:1", {"a,b": "1/2", "c@8": "1/2"}),
        ("x:5:2", {"x:5": "1"}),
        ("a:0.1;b:0.2;c:0.7", {"a": "1/10", "b": "1/5", "c": "7/10"}),
    ],
)
def test_mixture_text(text, expected):
    found = parse_mixture(text)
    assert found == {path: Fraction(weight) for path, weight in expected.items()}
    assert list(found) == list(expected)
    assert sum(found.values()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no entry"),
        (" ; ", "has no entry"),
        ("a:1;b", "has no weight for 'b'"),
        ("a:1;a:2", "'a' occurs twice"),
        ("a:0;b:1", "weight of 'a' must be positive, got 0"),
        ("a:-1;b:1", "weight of 'a' must be positive, got -1"),
        ("a:nan;b:1", "weight of 'a:nan' must be a positive number, got nan"),
        ("a:1;b, -Infinity", "weight of 'b, -Infinity' must be a positive number, got -Infinity"),
    ],
)
def test_bad_mixtures_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mixture(text)


def test_proportions_are_exact_unless_grains_are_asked_for():
    def count(ds):
        return [sum(x < 10**6 for x in ds), sum(x >= 10**6 for x in ds)]

    parts = {"a": grain.MapDataset.range(300), "b": grain.MapDataset.range(10**6, 10**6 + 700)}
    exact = mix_from_text("a:0.3;b:0.7", parts.get)
    assert len(exact) == 1000
    assert count(exact) == [300, 700]
    rounded = mix_from_text("a:0.3;b:0.7", parts.get, exact=False)
    assert list(rounded) == list(grain.MapDataset.mix(list(parts.values()), [0.3, 0.7]))
    assert count(rounded[:1000]) != [300, 700]
    assert "proportions=(3, 7)" in repr(exact._node)


def test_mixture_of_sequential_datasets_has_states_by_path():
    parts = {
        name: grain.MapDataset.range(start, start + 50).to_iter_dataset()
        for name, start in (("b", 100), ("a", 0))
    }
    mixed = mix_from_text("b:0.25;a:0.75", parts.get)
    elements = list(mixed)
    assert elements == list(grain.IterDataset.mix(parts, {"a": 3, "b": 1}))
    iterator = iter(mixed)
    for k in range(len(elements)):
        state = iterator.get_state()
        assert set(state["parents"]) == {"a", "b"}
        again = iter(mixed)
        again.set_state(state)
        assert list(again) == elements[k:]
        next(iterator)


def test_mixture_of_files(tmp_path):
    for name in "ab":
        record_file(tmp_path / name / "0.array_record", *[name.encode()] * 4)
        record_file(tmp_path / name / "1.array_record", *[name.encode()] * 4)
    mixed = mix_from_text(
        f"{tmp_path}/a/*.array_record:0.5;{tmp_path}/b,0.5",
        lambda paths: grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths)),
    )
    assert sorted(mixed) == [b"a"] * 8 + [b"b"] * 8


def test_bad_datasets_of_a_mixture_are_refused():
    ds = grain.MapDataset.range(3)
    with pytest.raises(TypeError, match=r"got \[\] for 'a'"):
        mix_from_text("a", lambda _: [])
    with pytest.raises(TypeError, match="of one kind, got MapDataset for 'a', IterDataset for 'b'"):
        mix_from_text("a;b", {"a": ds, "b": ds.to_iter_dataset()}.get)
    with pytest.raises(ValueError, match="too many digits for exact proportions"):
        mix_from_text("a:1e-30;b:1", lambda _: ds)
    with pytest.raises(TypeError, match="a mixture must be a text"):
        parse_mixture(["a"])


# --- sequential datasets of files -----------------------------------------------------------------


def parquet_file(name, values):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": values}), name, row_group_size=2)


def tfrecord_file(name, records):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(tfrecord(records))


def test_parquet_dataset_takes_any_path_argument():
    parquet_file("d/a-00000-of-00002.parquet", [1, 2, 3])
    parquet_file("d/a-00001-of-00002.parquet", [4])
    parquet_file("d/b[1].parquet", [5])
    touch("d/_SUCCESS", "d/notes.txt")
    files = [f"d/{name}" for name in ("a-00000-of-00002.parquet", "a-00001-of-00002.parquet")]

    def rows(paths):
        return [int(row["x"]) for row in ParquetIterDataset(paths)]

    expected = rows(files)
    assert sorted(expected) == [1, 2, 3, 4]
    for paths in ("d/a*.parq*", "d/a@2.parquet", "d/a@*.parquet", ["d/a*1-of*", files[0]][::-1]):
        assert rows(paths) == expected
    assert sorted(rows("d")) == sorted(rows(["d"])) == [1, 2, 3, 4, 5]
    assert rows("d/b[1].parquet") == rows(Path("d/b[1].parquet")) == [5]
    # Files are not expanded for a second time.
    parquet_file("d/b1.parquet", [6])
    assert sorted(rows("d/b*")) == [5, 6]
    assert rows([]) == []
    assert rows(iter(files)) == expected
    with pytest.raises(FileNotFoundError, match=r"no file matches the pattern: 'd/c\*'"):
        ParquetIterDataset("d/c*")
    ds = ParquetIterDataset("missing.parquet")  # as in Grain
    with pytest.raises(FileNotFoundError, match=r"missing\.parquet"):
        iter(ds)


def test_tfrecord_dataset_reads_files_one_after_another():
    contents = {"d/a-0.tfrecord": [b"0", b"1"], "d/a-1.tfrecord": [], "d/b.tfrecord.gz": [b"2"]}
    for name, records in contents.items():
        tfrecord_file(name, records)
    touch("d/_SUCCESS", "d/notes.txt")
    every = [b"0", b"1", b"2"]
    for paths in ("d", "d/*tfrecord*", list(contents), ("d/a*", Path("d/b.tfrecord.gz"))):
        ds = TFRecordIterDataset(paths)
        assert list(ds) == every
        assert ds._path == paths  # which programs read
    assert list(TFRecordIterDataset(["d/a-0.tfrecord"])) == list(
        TFRecordIterDataset(b"d/a-0.tfrecord")
    )
    with pytest.raises(FileNotFoundError, match="no file matches the pattern"):
        TFRecordIterDataset("c*")
    with pytest.raises(ValueError, match="0 length"):
        TFRecordIterDataset([])


def test_states_of_several_tfrecord_files_are_exact():
    files = {"a": [b"0", b"1"], "b": [], "c": [b"2", b"3", b"4"], "d": []}
    for name, records in files.items():
        tfrecord_file(name, records)
    every = [b"%d" % n for n in range(5)]
    ds = TFRecordIterDataset(list(files))
    iterator = iter(ds)
    states = [iterator.get_state()]
    for element in every:
        assert next(iterator) == element
        states.append(json.loads(json.dumps(iterator.get_state())))
    assert states[0] == {"file_index": 0, "reader_offset": 0}
    with pytest.raises(StopIteration):
        next(iterator)
    for used in (iterator, iter(ds)):
        for number in (5, 0, 3, 1, 4, 2):
            used.set_state(states[number])
            assert used.get_state() == states[number]
            assert list(used) == every[number:]
    assert_equal_output_after_checkpoint(ds.map(int).batch(2))
    for state in ({"reader_offset": 0}, {"file_index": 4, "reader_offset": 0}):
        with pytest.raises(ValueError, match="restore needs the same file"):
            iterator.set_state(state)
    with pytest.raises(ValueError, match="several files"):
        iter(TFRecordIterDataset("a")).set_state(states[0])


def test_file_that_is_missing_among_several_is_named_and_costs_no_record():
    tfrecord_file("a", [b"0"])
    iterator = iter(TFRecordIterDataset(["a", "b"]))
    assert next(iterator) == b"0"
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="b"):
            next(iterator)
    tfrecord_file("b", [b"1"])
    assert list(iterator) == [b"1"]


def test_sequential_datasets_name_their_files():
    parquet_file("a.parquet", [1])
    assert repr(ParquetIterDataset("a*")) == "ParquetIterDataset(paths=['a.parquet'])"
    ds = ParquetIterDataset("a.parquet", columns=["x"])
    assert repr(ds) == "ParquetIterDataset(paths=['a.parquet'], columns=['x'])"
    ds = TFRecordIterDataset(["a", "b"])
    assert repr(ds) == "TFRecordIterDataset(paths=['a', 'b'])"
    start = [f"x-{k:05}-of-01000" for k in range(4)]
    assert repr(TFRecordIterDataset("x@1000")) == (
        f"TFRecordIterDataset(paths=[{', '.join(map(repr, start))}, ... 1,000 in all])"
    )
    assert str(ds) == "TFRecordIterDataset"
