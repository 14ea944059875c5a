"""What is not read is recognised and named, and the error says what to use instead."""

import bz2
import io
import json
import lzma
import pickle
import re
import sqlite3
import struct
import tarfile
import wave
import zipfile

import numpy as np
import pages
import pyarrow as pa
import pyarrow.dataset
import pyarrow.orc
import pytest
from bucket_server import BucketServer
from PIL import Image
from scipy.io import netcdf_file

from grainmill import experimental, files, sources
from grainmill._sources import other_kinds
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main

TABLE = pa.table({"year": [2023, 2024], "sold": [1, 2]})


def hdf5(path):
    with pytest.importorskip("h5py").File(path, "w") as file:
        file["x"] = np.arange(3)


def avro(path):
    fields = [{"name": "x", "type": "long"}]
    with path.open("wb") as file:
        pytest.importorskip("fastavro").writer(
            file, {"type": "record", "name": "r", "fields": fields}, [{"x": 1}]
        )


def orc(path):
    pyarrow.orc.write_table(TABLE, path)


def csv(path):
    path.write_text("x,y\n1,2\n")


def json_array(path):
    path.write_text(json.dumps([{"x": 1}], indent=1))


def tar(mode):
    def make(path):
        with tarfile.open(path, f"w:{mode}") as file:
            member = tarfile.TarInfo("a.txt")
            member.size = 1
            file.addfile(member, io.BytesIO(b"a"))

    return make


def image(kind):
    return lambda path: Image.new("RGB", (4, 4)).save(path, kind)


def wav(path):
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", "none"))
        file.writeframes(bytes(10))


def written(data):
    return lambda path: path.write_bytes(data)


def zipped(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")


def sqlite(path):
    with sqlite3.connect(path) as database:
        database.execute("create table a (b)")
    database.close()


def netcdf(path):
    with netcdf_file(str(path), "w") as file:
        file.createDimension("x", 2)


def lz4(path):
    with pa.output_stream(path, compression="lz4") as file:
        file.write(b"text")


# The title that is expected, the name of a file, and what makes it.
FILES = [
    ("an HDF5 file", "a", hdf5),
    ("an Avro file", "a", avro),
    ("a Feather file of version 1", "a.feather", written(b"FEA1" + bytes(60) + b"FEA1")),
    ("an ORC file", "a", orc),
    ("a CSV file", "A.CSV", csv),
    ("a CSV file", "a.csv.gz", written(b"\x1f\x8b\x08")),
    ("a JSON array", "a", json_array),
    ("a JSON array", "a.json", written(b"\xef\xbb\xbf \n[]")),
    ("a compressed tar file", "a.tar.xz", tar("xz")),
    ("a compressed tar file", "a.tar.bz2", tar("bz2")),
    ("an image", "a.jpg", image("JPEG")),
    ("an image", "a", image("PNG")),
    ("an image", "a", image("GIF")),
    ("an image", "a", image("WEBP")),
    ("a sound or video file", "a", wav),
    ("a sound or video file", "a.mp4", written(struct.pack(">I8s", 32, b"ftypisom"))),
    ("a sound or video file", "a.mp3", written(b"ID3\x04\x00")),
    ("a file of PyTorch", "a.pt", zipped),
    ("a file of tensors", "a", written(struct.pack("<Q", 40) + b'{"weight": {')),
    ("a pickle", "a", written(pickle.dumps([1, 2]))),
    ("an SQLite database", "a.db", sqlite),
    ("an LMDB database", "data.mdb", written(bytes(16) + struct.pack("<I", 0xBEEFC0DE))),
    ("a NetCDF file", "a", netcdf),
    ("a spreadsheet", "a.xlsx", zipped),
    ("a zip archive", "a", zipped),
    ("a 7z archive", "a", written(b"7z\xbc\xaf\x27\x1c\x00\x04")),
    ("compressed by xz", "a", written(lzma.compress(b"text"))),
    ("compressed by bzip2", "a", written(bz2.compress(b"text"))),
    ("compressed by LZ4", "a", lz4),
    # In place of a file of any name.
    (
        "a pointer of Git LFS",
        "a.array_record",
        written(b"version https://git-lfs.github.com/spec/v1\n"),
    ),
    ("a page of HTML", "a.jsonl", written(b"<!DOCTYPE html>\n<html>404")),
]


@pytest.mark.parametrize(("title", "name", "make"), FILES)
def test_file_is_named_with_what_to_use(title, name, make, tmp_path, capsys):
    path = tmp_path / name
    make(path)
    (kind,) = (kind for kind in other_kinds.KINDS if kind.title.startswith(title))
    assert main(["info", str(path)]) == ExitCode.USAGE
    message = capsys.readouterr().err
    assert message.startswith(f"grainmill info: {path}: {title}")
    assert kind.do in message
    assert f'"{kind.section}" on the page *{kind.page}*' in message or not kind.section
    with pytest.raises(ValueError, match=re.escape(kind.do)):
        files.detect_format(path)


def delta(path):
    (path / "_delta_log").mkdir(parents=True)
    (path / "_delta_log/00000000000000000000.json").write_text("{}")
    (path / "part-0.parquet").write_bytes(b"")


def iceberg(path):
    (path / "metadata").mkdir(parents=True)
    (path / "metadata/00000-ab.metadata.json").write_text("{}")


def zarr(path):
    module = pytest.importorskip("zarr")
    module.create_array(path, data=np.arange(4))


def lit_data(path):
    path.mkdir()
    (path / "index.json").write_text('{"chunks": [], "config": {}}')
    (path / "chunk-0-0.bin").write_bytes(b"")


def hive(path):
    partitioning = pyarrow.dataset.partitioning(pa.schema({"year": pa.int64()}), flavor="hive")
    pyarrow.dataset.write_dataset(TABLE, path, format="parquet", partitioning=partitioning)
    (path / "_SUCCESS").touch()


def hugging_face(path):
    pytest.importorskip("datasets").Dataset.from_dict({"a": [1]}).save_to_disk(path)


DIRECTORIES = {
    "a table of Delta Lake": delta,
    "an Iceberg table": iceberg,
    "a Zarr array or group": zarr,
    "a data set of LitData": lit_data,
    "a directory of Hive partitions": hive,
    "a data set that Hugging Face saved": hugging_face,
}


@pytest.mark.parametrize("title", DIRECTORIES)
def test_directory_is_named_with_what_to_use(title, tmp_path, capsys):
    path = tmp_path / "found"
    DIRECTORIES[title](path)
    capsys.readouterr()
    (kind,) = (kind for kind in other_kinds.KINDS if kind.title == title)
    assert main(["verify", str(path)]) == ExitCode.USAGE
    message = capsys.readouterr().err
    assert message.startswith(f"grainmill verify: {path}: {title}, ")
    assert kind.do in message
    for call in (files.detect_format, files.find_files):
        with pytest.raises(ValueError, match=re.escape(kind.do)):
            call(path)


MISLEADING = [
    kind for kind in other_kinds.KINDS if kind.title in DIRECTORIES and not kind.has_own_reader
]
SOURCES = [
    sources.ParquetDataSource,
    sources.ArrowDataSource,
    sources.ArrayRecordDataSource,
    sources.NpyDataSource,
    lambda path: sources.TokensDataSource(path, dtype=np.uint16, length=4),
    experimental.ParquetIterDataset,
]


@pytest.mark.parametrize("kind", MISLEADING, ids=lambda kind: kind.title)
def test_sources_refuse_directories_whose_files_are_not_what_they_have(kind, tmp_path):
    path = tmp_path / "found"
    DIRECTORIES[kind.title](path)
    for source in SOURCES:
        for given in (path, f"{path}/", [path]):
            with pytest.raises(ValueError, match=re.escape(f"{path}")) as refused:
                source(given)
            assert f"{kind.title}, which is not read as records: {kind.do}" in str(refused.value)
    # A pattern says which files are meant.
    if kind.title == "a directory of Hive partitions":
        assert len(sources.ParquetDataSource(f"{path}/*/*.parquet")) == TABLE.num_rows


@pytest.mark.parametrize(
    "kind", [kind for kind in MISLEADING if not kind.key_of_index], ids=lambda kind: kind.title
)
def test_sources_refuse_such_directories_in_buckets(kind, tmp_path, monkeypatch):
    path = tmp_path / "found"
    DIRECTORIES[kind.title](path)
    with BucketServer() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        for file in path.rglob("*"):
            if file.is_file():
                server.put(f"/bucket/found/{file.relative_to(path)}", file.read_bytes())
        with pytest.raises(ValueError, match=re.escape(kind.do)):
            sources.ParquetDataSource("s3://bucket/found/")


def test_names_beside_each_other_are_no_such_directory():
    for names in ([], ["a.parquet"], ["year=1/a", "b.parquet"], ["metadata/a.json"], ["x/.zarray"]):
        assert other_kinds.of_names(names) is None, names


def test_every_kind_is_tried():
    tried = [title for title, _, _ in FILES] + list(DIRECTORIES)
    assert all(any(kind.title.startswith(t) for t in tried) for kind in other_kinds.KINDS)


def test_pages_that_are_named_exist():
    headings = {}
    for path in pages.DOCS.glob("*.md"):
        found = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
        headings.setdefault(found[0] if found else "", []).extend(found)
    for kind in other_kinds.KINDS:
        if kind.page:
            assert kind.page in headings
            assert not kind.section or kind.section in headings[kind.page]


def test_what_looks_like_it_and_is_read_stays_so(tmp_path):
    """Files of formats without a mark begin with their first record, whatever it is."""
    for name, data in (("a.bagz", b"<html>"), ("b.bag", b"\xff\xd8\xff"), ("c.bin", b"Obj\x01")):
        (tmp_path / name).write_bytes(data)
        assert files.detect_format(tmp_path / name).name in {"bagz", "megatron"}
    lines = tmp_path / "a.jsonl"
    lines.write_text("[1, 2]\n[3]\n")
    assert files.detect_format(lines).name == "jsonl"
    # Runs of an experiment beside a file of records.
    (tmp_path / "lr=0.1").mkdir()
    assert str(lines) in files.find_files(tmp_path)


def test_file_of_a_server_is_named_without_its_secrets():
    with BucketServer() as server:
        server.put("/data/a", b"\x89HDF\r\n\x1a\n" + bytes(600))
        url = f"{server.url}/data/a?signature=hidden"
        with pytest.raises(ValueError, match="an HDF5 file") as refused:
            files.detect_format(url)
    assert "hidden" not in str(refused.value)


def test_empty_file_is_called_so(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match="it is empty, and its format is not known"):
        files.detect_format(tmp_path / "a")
