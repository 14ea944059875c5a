"""`JsonLinesDataSource` and `WebDatasetDataSource` beside slow twins."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import zlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import PIL.Image
import pytest
import record_formats as formats
from effort import cases

import grainmill as grain
from grainmill import _native
from grainmill._tools.main import main


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAINMILL_CACHE_DIR", str(tmp_path / "cache"))


def written(path, data):
    path.write_bytes(data)
    return str(path)


MARK = b"\xef\xbb\xbf"
LINES = [b"", b"{}", b" ", b"\t", b"\r", b"\r\r", b'{"a": 1}', b"x y", b" z", b"\xff\x00", b"\x0b"]
MARKS = [MARK, MARK * 2, MARK + b"{}", MARK + b" ", MARK[:2], MARK[:1], b" " + MARK, MARK + b"\xef"]
LINE = st.sampled_from([*LINES, *MARKS]) | st.binary(max_size=30)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \n"])


@hypothesis.settings(max_examples=cases(60, 3_000))
@hypothesis.given(
    st.lists(st.tuples(LINE, ENDS)),
    LINE,
    st.sampled_from(["none", "gzip", "members", "padded", "zstd", "frames"]),
)
def test_lines_match_the_slow_twin(tmp_path_factory, lines, last, how):
    data = b"".join(line + end for line, end in lines) + last
    expected = formats.json_lines(data)
    path = tmp_path_factory.mktemp("lines") / "data"
    compression = {"none": "none", "zstd": "zstd", "frames": "zstd"}.get(how, "gzip")
    for _ in range(2):
        source = grain.sources.JsonLinesDataSource(
            written(path, formats.compressed(data, how)), compression=compression
        )
        assert list(source) == expected
        backwards = range(len(source))[::-1]
        assert source.__getitems__(backwards) == expected[::-1]
    if formats.is_binary(data) or formats.begins_as_other(data) or how == "none":
        return
    stream = _native.RecordStream(str(path), "jsonl")
    assert [record for block in iter(lambda: stream.read(3), []) for record in block] == expected


def test_marks_at_the_edges_of_what_is_read_at_once(tmp_path):
    """Blanks and marks of all lengths around the 64 KiB that a scan looks at first."""
    for before in range((64 << 10) - 12, (64 << 10) + 2):
        for line in (MARK, MARK[:2], MARK * 2 + b"{}", MARK + b" \n" + MARK + b"[]"):
            for data in (b"x" * before + b"\n" + line, b" " * before + b"\n" + line + b"\n"):
                path = tmp_path / f"{before}.jsonl"
                source = grain.sources.JsonLinesDataSource(written(path, data))
                assert list(source) == formats.json_lines(data)
                stream = _native.RecordStream(str(path), "jsonl")
                assert stream.skip(9) == len(source)


def test_every_reader_of_lines_passes_over_byte_order_marks(tmp_path, capsys):
    lines = [b'{"a": 0}', b'{"a": 1}', b'{"a": 2}']
    # Two files that each began with one, joined.
    path = written(tmp_path / "x", MARK + b"\n".join(lines[:2]) + b"\n" + MARK + lines[2])
    assert list(grain.sources.JsonLinesDataSource(path)) == lines
    parsed = grain.sources.JsonLinesDataSource(path, parse=True)
    fields = grain.MapDataset.source(grain.sources.JsonLinesDataSource(path)).map(
        grain.transforms.ParseJson({"a": "int64"})
    )
    assert list(parsed) == list(fields) == [{"a": 0}, {"a": 1}, {"a": 2}]
    assert main(["verify", path]) == 0
    assert main(["cat", path]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [line.decode() for line in lines]
    for name in ("lines.jsonl", "records.array_record"):
        out = str(tmp_path / name)
        assert main(["convert", "--quiet", path, path, out]) == 0
        back = str(tmp_path / "back.jsonl")
        assert main(["convert", "--quiet", "--force", out, back]) == 0
        assert (tmp_path / "back.jsonl").read_bytes().split(b"\n") == [*lines, *lines, b""]
    # As records of other formats may have it.
    marked = written(tmp_path / "m.tfrecord", formats.tfrecord([MARK + line for line in lines]))
    assert main(["convert", "--quiet", marked, str(tmp_path / "m.jsonl")]) == 0
    assert (tmp_path / "m.jsonl").read_bytes().split(b"\n") == [*lines, b""]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_lines_in_utf_16_are_refused(tmp_path, encoding, capsys):
    path = written(tmp_path / "x.jsonl", '\ufeff{"a": 1}\r\n{"a": 2}\r\n'.encode(encoding))
    with pytest.raises(grain.GrainmillError, match="whole file: text in UTF-16"):
        grain.sources.JsonLinesDataSource(path)
    assert main(["verify", path]) != 0
    assert "UTF-16" in capsys.readouterr().err


def test_gzip_is_padded_with_zeros_and_nothing_else(tmp_path):
    data = b"".join(b'{"n": %d}\n' % n for n in range(200_000))
    cut = len(data) // 2
    for zeros in (1, 511, 300_000):
        packed = gzip.compress(data[:cut], 1) + bytes(zeros) + gzip.compress(data[cut:], 1)
        path = written(tmp_path / f"{zeros}.jsonl.gz", packed + bytes(zeros))
        assert gzip.decompress(packed + bytes(zeros)) == data
        for _ in range(2):
            source = grain.sources.JsonLinesDataSource(path)
            keys = [0, 99_999, 100_000, 199_999]
            assert source.__getitems__(keys) == [b'{"n": %d}' % key for key in keys]
        assert _native.RecordStream(path, "jsonl").skip(1 << 40) == 200_000
        bad = written(tmp_path / "bad.jsonl.gz", packed + bytes(zeros) + b"more")
        with pytest.raises(grain.GrainmillError, match="other data follow the last"):
            grain.sources.JsonLinesDataSource(bad)
        with pytest.raises(grain.GrainmillError, match="other data follow the last"):
            _native.RecordStream(bad, "jsonl").skip(1 << 40)


def test_long_lines_and_compression_of_many_points(tmp_path):
    rng = random.Random(1)
    objects = [{"n": n, "text": "ab" * rng.randrange(400)} for n in range(12_000)]
    objects[500]["text"] = "long" * (1 << 20)
    data = formats.json_text(objects)
    for path in (
        written(tmp_path / "data", data),
        written(tmp_path / "zip", gzip.compress(data, 1, mtime=0)),
        written(tmp_path / "frames", formats.frames(data)),
    ):
        source = grain.sources.JsonLinesDataSource(path, parse=True)
        order = list(range(len(objects)))
        rng.shuffle(order)
        assert [each["n"] for each in source.__getitems__(order)] == order
        assert source[500] == objects[500]
        dataset = grain.MapDataset.source(source).map(lambda each: each["n"])
        assert list(dataset) == list(range(len(objects)))


@pytest.mark.parametrize("window_bits", [15, 31], ids=["zlib", "gzip"])
@pytest.mark.parametrize(
    "blanks", [b" | ", b"\t\n | \r\n ", b" |" + b" " * (3 << 20), b" \n|\n |" * 3]
)
def test_points_within_blanks_before_a_line(tmp_path, blanks, window_bits):
    """`|` is where a block of the compressed data ends."""
    lines = b"".join(b'{"n": %d, "text": "%s"}\n' % (n, b"x" * 1000) for n in range(2000))
    text = lines + blanks + b'{"n": 2000}\n' + lines + blanks + b"7"
    packer = zlib.compressobj(1, wbits=window_bits)
    parts = text.split(b"|")
    data = b"".join(packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH) for part in parts)
    path = written(tmp_path / "data", data + packer.flush())
    expected = formats.json_lines(text.replace(b"|", b""))
    for _ in range(2):  # by a scan, and by its index
        source = grain.sources.JsonLinesDataSource(path)
        assert list(source) == expected
        assert source.__getitems__([4001, 2000, 1999]) == [expected[n] for n in (4001, 2000, 1999)]


def test_invalid_json_names_the_file_and_the_record(tmp_path):
    path = written(tmp_path / "data", b'{"a": 1}\n\n{"a": \n{"a": 3}\n')
    source = grain.sources.JsonLinesDataSource(path, parse=True)
    assert source[0] == {"a": 1}
    assert source[2] == {"a": 3}
    for fails in (lambda: source[1], lambda: source.__getitems__([0, 1])):
        with pytest.raises(ValueError, match=f"{path}: record 1: not valid JSON"):
            fails()
    assert repr(source) != repr(grain.sources.JsonLinesDataSource(path))


def raw_frames(data):
    """Frames of zstd with one block each, which is not compressed."""
    parts = [data[at : at + 90_000] for at in range(0, len(data), 90_000)]
    heads = [b"\x28\xb5\x2f\xfd\xa0" + len(part).to_bytes(4, "little") for part in parts]
    blocks = [(len(part) << 3 | 1).to_bytes(3, "little") + part for part in parts]
    return b"".join(head + block for head, block in zip(heads, blocks, strict=True))


def test_damaged_gzip_of_lines_is_an_error(tmp_path):
    data = gzip.compress(b"".join(b"line %d\n" % n for n in range(3000)), mtime=0)
    rng = random.Random(2)
    expected = [b"line %d" % n for n in range(3000)]
    for _ in range(cases(300, 9_000)):
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        for damaged in (bytes(bad), data[: rng.randrange(1, len(data))]):
            path = written(tmp_path / "data", damaged)
            try:
                found = list(grain.sources.JsonLinesDataSource(path, compression="gzip"))
            except grain.GrainmillError as error:
                assert f"{path}: record " in str(error)  # noqa: PT017
                continue
            assert found == expected, "most bytes of a header say nothing about the data"


@pytest.mark.parametrize("how", ["gzip", "frames"])
def test_a_change_of_compressed_data_behind_their_index_is_noticed(tmp_path, how):
    text = b"".join(b"line %d\n" % n for n in range(30_000))
    path = tmp_path / "data"
    stored = gzip.compress(text, 0, mtime=0) if how == "gzip" else raw_frames(text)
    source = grain.sources.JsonLinesDataSource(written(path, stored))
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:  # the same file, with the same time
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(grain.GrainmillError, match="differ from those that were indexed"):
        list(source)
    if how == "frames":
        assert [source[n] for n in (0, 29_999)] == [b"line 0", b"line 29999"], "other frames"


def test_opening_a_compressed_file_by_its_index_reads_no_more_than_a_plain_one(tmp_path):
    lines = b"".join(b'{"x": %d}\n' % number for number in range(20_000))
    num_reads = []
    for end, compressed in (
        (".jsonl", lines),
        (".gz", gzip.compress(lines)),
        (".zst", formats.zstd(lines)),
    ):
        path = written(tmp_path / f"x{end}", compressed)
        num_reads.append(
            [grain.sources.JsonLinesDataSource(path)._files.read_totals()[0] for _ in range(2)]
        )
    scans, by_index = zip(*num_reads, strict=True)
    assert set(by_index) == {3} < set(scans)  # both ends of the file, and the index


@pytest.mark.parametrize("how", ["zstd", "frames"])
def test_an_index_is_of_one_compression(tmp_path, how):
    lines = [b"line %d" % n for n in range(30_000)]
    text = b"\n".join(lines)
    path = tmp_path / "data"
    for kind in (how, "gzip", how, "none", how, how):
        source = grain.sources.JsonLinesDataSource(written(path, formats.compressed(text, kind)))
        assert source.__getitems__([29_999, 0, 17_000]) == [lines[n] for n in (29_999, 0, 17_000)]
        restored = iter(grain.MapDataset.source(source).shuffle(seed=3).to_iter_dataset())
        expected = list(restored)
        restored.set_state({**restored.get_state(), "next_index": 29_990})
        assert list(restored) == expected[29_990:]


# --- WebDataset -------------------------------------------------------------------------------

NAMES = st.sampled_from(
    ["a", "b/c", "B", "long" * 40, "./d", "e/f" * 60, "ü", "dir.x/y", "caf\udce9", "caf\udce8"]
)
EXTENSIONS = st.sampled_from([".jpg", ".JSON", ".seg.png", "", ".cls"])


@hypothesis.settings(max_examples=cases(60, 3_000))
@hypothesis.given(
    st.lists(st.tuples(NAMES, EXTENSIONS, st.none() | st.binary(max_size=2000)), max_size=20),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.booleans(),
    st.booleans(),
)
def test_samples_match_the_slow_twin(tmp_path_factory, files, tar_format, is_zipped, has_end):
    # A sample may not have two files with one extension; a name tells all files apart.
    named = [(f"{name}{n // 3}{end}", data) for n, (name, end, data) in enumerate(files)]
    unique = {name.lower().removeprefix("./"): (name, data) for name, data in named}
    data = formats.tar(list(unique.values()), tar_format)
    expected = formats.samples(data)
    if not has_end:
        data = formats.without_end(data)
    path = tmp_path_factory.mktemp("tar") / "data.tar"
    written(path, gzip.compress(data, mtime=0) if is_zipped else data)
    for _ in range(2):
        source = grain.sources.WebDatasetDataSource(str(path))
        assert list(source) == expected
        assert [list(sample) for sample in source] == [list(sample) for sample in expected]
        assert source.__getitems__(range(len(source))[::-1]) == expected[::-1]


def shard():
    files = [(f"{n:04d}.{end}", bytes([n]) * 300 * n) for n in range(20) for end in ("a", "b")]
    return formats.tar(files)


def test_samples_go_through_pipelines_and_processes(tmp_path):
    paths = [written(tmp_path / name, shard()) for name in ("0.tar", "1.tar")]
    source = pickle.loads(pickle.dumps(grain.sources.WebDatasetDataSource(paths)))
    assert len(source) == 40
    dataset = grain.MapDataset.source(source).shuffle(seed=1).map(lambda s: len(s["a"]))
    assert sorted(dataset) == sorted([300 * n for n in range(20)] * 2)


def test_large_files_are_skipped_by_the_scan(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for n in range(4):
            info = tarfile.TarInfo(f"{n}.bin")
            info.size = 3 << 20
            archive.addfile(info, io.BytesIO(bytes([n]) * info.size))
    source = grain.sources.WebDatasetDataSource(written(tmp_path / "big.tar", out.getvalue()))
    assert [sample["bin"][:2] for sample in source] == [bytes([n, n]) for n in range(4)]


def test_a_tar_file_that_is_cut_is_an_error_or_ends_with_a_file(tmp_path):
    """As for `tarfile`: between two files, nothing tells a cut file from one without zeros."""
    data = shard()
    end = len(formats.without_end(data))
    whole = list(grain.sources.WebDatasetDataSource(written(tmp_path / "data", data)))
    for cut in range(256, len(data), 256):
        path = written(tmp_path / "data", data[:cut])
        try:
            with tarfile.open(path) as archive:
                expected = formats.samples(data[:cut])
                is_whole = cut >= end or formats.end_of(archive.getmembers()[-1]) == cut
        except tarfile.ReadError:
            is_whole = False
        try:
            found = list(grain.sources.WebDatasetDataSource(path))
        except grain.GrainmillError as error:
            assert f"{path}: record " in str(error)  # noqa: PT017
            # Half a block of zeros is an error here.
            assert not is_whole or cut == end + 256
        else:
            assert is_whole
            assert found == expected
    assert found == whole


def has_gnu_tar():
    if sys.platform != "linux" or shutil.which("tar") is None:
        return False
    shown = subprocess.run(["tar", "--version"], capture_output=True, check=False)
    return b"GNU tar" in shown.stdout


needs_gnu_tar = pytest.mark.skipif(not has_gnu_tar(), reason="there is no GNU tar")


def old_header(name, size, kind=b"0", extra=b""):
    """A header whose checksum counts bytes as signed numbers, where `extra` is at its end."""
    head = bytearray(512)
    head[: len(name)], head[100:107], head[124:135] = name, b"0000644", b"%011o" % size
    head[148:156], head[156:157], head[257:263] = b" " * 8, kind, b"ustar\0"
    head[512 - len(extra) :] = extra
    signed = sum(byte - 256 if byte > 127 else byte for byte in head)
    head[148:155] = b"%06o\0" % signed
    return bytes(head)


def test_checksums_of_signed_bytes_and_solaris_attributes_are_read(tmp_path):
    longer = b"21 path=long/name.txt\n"
    longer = b"%d path=long/name.txt\n" % len(longer)
    data = old_header("é.txt".encode("latin-1"), 1) + b"x".ljust(512, b"\0")
    data += old_header(b"about", len(longer), b"X") + longer.ljust(512, b"\0")
    data += old_header(b"n.txt", 1) + b"y".ljust(512, b"\0")
    found = [{"__key__": "\udce9", "txt": b"x"}, {"__key__": "long/name", "txt": b"y"}]
    assert formats.samples(data) == found
    assert list(grain.sources.WebDatasetDataSource(written(tmp_path / "a.tar", data))) == found


@needs_gnu_tar
@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_archives_of_tar_have_the_files_that_were_packed(tmp_path, tar_format):
    """All kinds of members: long names, names of any bytes, links, a pipe, directories."""
    rng = random.Random(tar_format)
    folder = tmp_path / "in"
    folder.mkdir()
    long = 80 if tar_format in {"v7", "ustar"} else 180
    expected = {}
    for n in range(30):
        stem = b"%04d" % n + rng.choice([b"", b"\xe9", b"\xc3\xa9", b" x", b"z" * long])
        for extension in rng.sample([b"jpg", b"JSON", b"seg.png", b"\xff"], 2):
            content = rng.randbytes(rng.choice([0, 1, 511, 512, 513, 5000]))
            (folder / os.fsdecode(stem + b"." + extension)).write_bytes(content)
            sample = expected.setdefault(os.fsdecode(b"in/" + stem), {})
            sample[os.fsdecode(extension.lower())] = content
    (folder / "0000.link").symlink_to("0000." + "y" * long)
    if tar_format != "v7":  # which has no pipes
        os.mkfifo(folder / "0001.pipe")
    (folder / "0002.directory").mkdir()
    for options in ([], ["--blocking-factor=1"], ["--owner=" + "o" * 30, "--mtime=@-5"]):
        command = ["tar", "--sort=name", f"--format={tar_format}", *options, "-cf", "x.tar", "in"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
        if done.returncode and options:
            continue  # not of this format
        assert not done.returncode, done.stderr
        for name, change in (("x.tar", bytes), ("cut.tar", formats.without_end)):
            data = change((tmp_path / "x.tar").read_bytes())
            source = grain.sources.WebDatasetDataSource(written(tmp_path / name, data))
            assert list(source) == formats.samples(data)
            found = {sample.pop("__key__"): sample for sample in source}
            assert found == expected


SPARSE = ["gnu", "0.0", "0.1", "1.0"]


@needs_gnu_tar
@pytest.mark.parametrize("version", SPARSE)
def test_sparse_files_of_gnu_tar_are_refused_with_their_name(tmp_path, version, capsys):
    (tmp_path / "a.txt").write_bytes(b"a")
    with (tmp_path / "s.bin").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    (tmp_path / "b.txt").write_bytes(b"b")
    how = ["gnu"] if version == "gnu" else ["pax", f"--sparse-version={version}"]
    command = ["tar", "-S", "-cf", "x.tar", f"--format={how[0]}", *how[1:]]
    done = subprocess.run(
        [*command, "a.txt", "s.bin", "b.txt"], cwd=tmp_path, capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"this tar does not write sparse files: {done.stderr.decode()}")
    path = str(tmp_path / "x.tar")
    with tarfile.open(path) as archive:
        if not archive.getmember("s.bin").issparse():
            pytest.skip("the file system keeps no holes")
    problem = "`s.bin` is a sparse file, which is not supported: pack it without `--sparse`"
    with pytest.raises(grain.GrainmillError, match=f"record 1 at byte [0-9]+: {problem}"):
        grain.sources.WebDatasetDataSource(path)
    assert main(["verify", path]) == 4
    assert problem in capsys.readouterr().out


def pax_sparse(version):
    """What `tar --sparse` writes of a file of 20 bytes that ends in `end`, without its holes."""
    own = {
        "0.0": [("size", "20"), ("numblocks", "1"), ("offset", "17"), ("numbytes", "3")],
        "0.1": [("size", "20"), ("numblocks", "1"), ("name", "d/s.bin"), ("map", "17,3")],
        "1.0": [("major", "1"), ("minor", "0"), ("name", "d/s.bin"), ("realsize", "20")],
    }[version]
    info = tarfile.TarInfo("d/s.bin" if version == "0.0" else "d/GNUSparseFile.7/s.bin")
    info.pax_headers = {f"GNU.sparse.{name}": value for name, value in own}
    content = b"1\n17\n3\n".ljust(512, b"\0") + b"end" if version == "1.0" else b"end"
    return info, content


@pytest.mark.parametrize("version", SPARSE[1:])
@pytest.mark.parametrize("at", [0, 2])
def test_sparse_attributes_are_refused(tmp_path, version, at):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for n in range(4):
            info, content = (
                pax_sparse(version) if n == at else (tarfile.TarInfo(f"{n}.bin"), b"%d" % n)
            )
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path = written(tmp_path / "x.tar", out.getvalue())
    with tarfile.open(path) as archive:
        assert archive.extractfile("d/s.bin").read() == bytes(17) + b"end"
    with pytest.raises(
        grain.GrainmillError, match=rf"record {at} at byte {at * 1024}: `d/s.bin` is a sparse file"
    ):
        grain.sources.WebDatasetDataSource(path)


def test_names_that_are_not_utf_8_stay_apart(tmp_path, capsys):
    names = [b"caf\xe9.jpg", b"caf\xe8.jpg", b"caf\xff.t\xe9", b"caf\xff.t\xe8"]
    expected = [
        {"__key__": "caf\udce9", "jpg": b"0"},
        {"__key__": "caf\udce8", "jpg": b"1"},
        {"__key__": "caf\udcff", os.fsdecode(b"t\xe9"): b"2", os.fsdecode(b"t\xe8"): b"3"},
    ]
    for tar_format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        files = [(os.fsdecode(name), b"%d" % n) for n, name in enumerate(names)]
        path = written(tmp_path / f"{tar_format}.tar", formats.tar(files, tar_format))
        source = grain.sources.WebDatasetDataSource(path)
        assert list(source) == formats.samples((tmp_path / path).read_bytes()) == expected
        for command in (["cat"], ["cat", "--json"], ["verify"]):
            assert main([*command, path]) == 0
        capsys.readouterr()
        lines = tmp_path / f"{tar_format}.jsonl"
        assert main(["convert", "--quiet", path, str(lines)]) == 0
        keys = [json.loads(line)["__key__"] for line in lines.read_bytes().splitlines()]
        assert keys == [sample["__key__"] for sample in expected]
        table = str(tmp_path / f"{tar_format}.parquet")
        assert main(["convert", "--quiet", path, table]) == 4
        assert r"record 0: `__key__` is 'caf\udce9'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.__key__", "x.__KEY__", "d/x.__key__"])
def test_files_in_the_place_of_keys_are_refused(tmp_path, name):
    data = formats.tar([("a.txt", b"1"), (name, b"2"), ("y.__key__.txt", b"3")])
    path = written(tmp_path / "x.tar", data)
    source = grain.sources.WebDatasetDataSource(path)
    assert [source[0], source[2]] == [
        {"__key__": "a", "txt": b"1"},
        {"__key__": "y", "__key__.txt": b"3"},
    ]
    with pytest.raises(
        grain.GrainmillError, match=f"record 1 .*: `{name}`: the extension `__key__` is reserved"
    ):
        source[1]
    assert main(["verify", path]) == 4


def test_flipped_bits_of_headers_are_errors(tmp_path):
    data = shard()
    expected = list(grain.sources.WebDatasetDataSource(written(tmp_path / "whole", data)))
    rng = random.Random(3)
    for _ in range(cases(400, 12_000)):
        bad = bytearray(data)
        bad[rng.randrange(512)] ^= 1 << rng.randrange(8)
        path = written(tmp_path / "data", bytes(bad))
        try:  # a space or whatever follows the checksum may be another one
            tarfile.TarInfo.frombuf(bytes(bad[:512]), "utf-8", "strict")
        except tarfile.HeaderError:
            with pytest.raises(grain.GrainmillError, match="record 0 at byte 0"):
                grain.sources.WebDatasetDataSource(path)
        else:
            assert list(grain.sources.WebDatasetDataSource(path)) == expected


def test_two_files_with_one_extension_are_an_error(tmp_path):
    path = written(tmp_path / "data", formats.tar([("a.jpg", b"1"), ("a.JPG", b"2")]))
    with pytest.raises(grain.GrainmillError, match="two files with the extension `jpg`"):
        grain.sources.WebDatasetDataSource(path)[0]


def test_empty_files_have_no_records(tmp_path):
    path = written(tmp_path / "data", b"")
    assert len(grain.sources.WebDatasetDataSource(path)) == 0
    assert len(grain.sources.JsonLinesDataSource(path)) == 0
    assert json.dumps(list(grain.sources.JsonLinesDataSource(path))) == "[]"
    for end in (".gz", ".zst"):  # nothing is not compressed, either
        assert len(grain.sources.JsonLinesDataSource(written(tmp_path / f"data{end}", b""))) == 0


@pytest.mark.parametrize("is_open", [False, True])
def test_stale_offsets_give_lines_or_errors_and_never_parts_of_lines(tmp_path, is_open):
    """A file with other lines, but the length, time and first and last bytes that were indexed."""
    errors, num_read = [], 0
    for seed in range(cases(40, 2_000)):
        rng = random.Random(seed)
        ends = [b"x" * 3000 + b"\n" + b"y" * 70_000, b"z" * 70_000 + b"\n" + b"w" * 3000]
        middle = [b"%d" % rng.randrange(10 ** rng.randint(1, 6)) for _ in range(60)]
        path = tmp_path / f"{seed}.jsonl"
        before = b"\n".join([ends[0], *middle, ends[1]]) + b"\n"
        path.write_bytes(before)
        os.utime(path, ns=(10**18, 10**18))
        source = grain.sources.JsonLinesDataSource(str(path))
        assert len(source) == len(before.split(b"\n")) - 1
        other = [*middle]
        rng.shuffle(other)
        after = b"\n".join([ends[0], *other, ends[1]]) + b"\n"
        assert len(after) == len(before)
        path.write_bytes(after)
        os.utime(path, ns=(10**18, 10**18))
        if not is_open:
            source = grain.sources.JsonLinesDataSource(str(path))
        lines = set(after.split(b"\n"))
        for index in rng.sample(range(len(source)), 25):
            try:
                line = source[index]
            except grain.GrainmillError as error:
                errors.append((str(error), f"{seed}.jsonl: record {index} at byte"))
            else:
                num_read += 1
                assert line in lines
    assert all(place in error for error, place in errors)
    assert all("changed" in error or "blank" in error for error, _ in errors)
    assert len(errors) > num_read / 10


OTHER_KINDS = {
    "xz": (lzma.compress(b'{"a": 1}\n' * 1000), "compressed by xz"),
    "bzip2": (bz2.compress(b'{"a": 1}\n' * 1000), "compressed by bzip2"),
    "lz4": (b"\x04\x22\x4d\x18\x64\x40\xa7" + bytes(100), "compressed by LZ4"),
    "zip": (b"PK\3\4\x14\0" + b"x\n" * 100, "a zip archive"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4" + b"x\n" * 100, "a 7z archive"),
    "parquet": (b"PAR1\x15\4" + b"x\n" * 100, "a Parquet file"),
    "avro": (b"Obj\1\4\x14" + b"x\n" * 100, "an Avro file"),
}
SOURCES = {
    "jsonl": grain.sources.JsonLinesDataSource,
    "tfrecord": grain.sources.TFRecordDataSource,
    "tar": grain.sources.WebDatasetDataSource,
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("name", SOURCES)
def test_files_of_other_kinds_are_named_and_not_read_as_records(tmp_path, kind, name, capsys):
    data, problem = OTHER_KINDS[kind]
    path = written(tmp_path / f"x.{name}", data)
    with pytest.raises(grain.GrainmillError, match=rf"x\.{name}: whole file: {problem}"):
        len(SOURCES[name](path))
    if kind in {"xz", "bzip2"} and name == "jsonl":
        return  # which are read in order
    assert main(["convert", "--quiet", path, str(tmp_path / "out.array_record")]) != 0
    assert (problem in capsys.readouterr().err) == (kind not in {"xz", "bzip2"} or name == "tar")
    assert not (tmp_path / "out.array_record").exists()


def image(kind):
    out = io.BytesIO()
    PIL.Image.new("RGB", (9, 9)).save(out, kind)
    return out.getvalue()


def array_file():
    out = io.BytesIO()
    np.save(out, np.arange(9))
    return out.getvalue()


BINARY = {
    "lzma": lzma.compress(b'{"a": 1}\n' * 1000, format=lzma.FORMAT_ALONE),
    "snappy": b"\xff\x06\x00\x00sNaPpY" + b"x\n" * 100,
    "png": image("PNG"),
    "jpeg": image("JPEG"),
    "gif": image("GIF"),
    "npy": array_file(),
    "pickle": pickle.dumps([b"x\n"] * 9, protocol=4),
    "utf-16": '{"a": 1}\n'.encode("utf-16-le"),
    "utf-32": '{"a": 1}\n'.encode("utf-32-be"),
    "tfrecord": formats.tfrecord([b"one\n", b"two\n"]),
    "bagz": formats.bagz([b"one\n", b"two\n"]),
    "tar": formats.tar([("a.txt", b"one\n" * 2000)]),
    "arrow": b"ARROW1\0\0" + b"x\n" * 100,
    "executable": b"\x7fELF\2\1\1" + b"x\n" * 100,
    "random": np.random.default_rng(0).bytes(300),
    "zeros": bytes(9),
}


@pytest.mark.parametrize("kind", BINARY)
def test_binary_files_are_not_lines(tmp_path, kind, capsys):
    path = written(tmp_path / "x.jsonl", BINARY[kind])
    with pytest.raises(grain.GrainmillError, match=r"x\.jsonl: whole file: .*UTF-16|binary data"):
        len(grain.sources.JsonLinesDataSource(path))
    with pytest.raises(grain.GrainmillError, match=r"x\.jsonl: whole file: .*UTF-16|binary data"):
        _native.RecordStream(path, "jsonl")
    if kind not in {"tfrecord", "tar", "npy", "arrow"}:  # which the commands recognise
        assert main(["convert", "--quiet", path, str(tmp_path / "out.array_record")]) != 0
        assert "whole file" in capsys.readouterr().err
        assert not (tmp_path / "out.array_record").exists()
    lines = grain.sources.JsonLinesDataSource(path, compression="none")
    assert list(lines) == formats.json_lines(BINARY[kind])


OUTER = {"gzip": gzip.compress, "zlib": zlib.compress, "zstd": formats.zstd}
INNER = {**OUTER, "bzip2": bz2.compress, "xz": lzma.compress}
COMMANDS = (["verify"], ["info"], ["cat"], ["convert", "--quiet"])


def check_refused(tmp_path, data, outer, capsys):
    """Checks that `data`, compressed by `outer`, are not read as lines unless that is demanded."""
    end = {"gzip": ".gz", "zlib": "", "zstd": ".zst"}[outer]
    path = written(tmp_path / f"x.jsonl{end}", OUTER[outer](data))
    lines = grain.sources.JsonLinesDataSource(path, compression=outer)
    assert list(lines) == formats.json_lines(data)
    with pytest.raises(grain.GrainmillError, match=r"x\.jsonl.*: decompressed data: "):
        grain.sources.JsonLinesDataSource(path)  # also if there is an index of it
    with pytest.raises(grain.GrainmillError, match=r"x\.jsonl.*: decompressed data: "):
        _native.RecordStream(path, "jsonl")
    for command in COMMANDS:
        out = [str(tmp_path / "out.array_record")] if command[0] == "convert" else []
        assert main([*command, path, *out]) != 0, command
        assert ": decompressed data: " in capsys.readouterr().err
    assert not (tmp_path / "out.array_record").exists()


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("kind", [*INNER, *BINARY])
def test_what_is_not_lines_is_refused_inside_of_a_compression(tmp_path, outer, kind, capsys):
    draw = random.Random(f"{outer} {kind}")
    for num_lines in (0, 1, draw.randrange(2, 3000)):
        lines = [json.dumps({"n": draw.random()}).encode() for _ in range(num_lines)]
        data = b"".join(line + b"\n" for line in lines)
        check_refused(tmp_path, INNER[kind](data) if kind in INNER else BINARY[kind], outer, capsys)
        path = written(tmp_path / "x.jsonl.gz", OUTER["gzip"](data))
        assert list(grain.sources.JsonLinesDataSource(path)) == lines


def test_other_formats_that_are_compressed_twice_are_refused(tmp_path):
    contents = {
        "tfrecord": formats.tfrecord([b"one"]),
        "web_dataset": formats.tar([("a.txt", b"1")]),
    }
    sources = {"tfrecord": grain.sources.TFRecordDataSource}
    sources["web_dataset"] = grain.sources.WebDatasetDataSource
    for kind, source in sources.items():
        data = gzip.compress(gzip.compress(contents[kind]))
        with pytest.raises(grain.GrainmillError, match="decompressed data: compressed, too"):
            source(written(tmp_path / "x", data))


def test_text_of_other_encodings_and_with_control_characters_of_text_is_lines(tmp_path):
    lines = [
        '{"a": "é"}'.encode("latin-1"),
        "日本".encode("shift-jis"),
        b"a\x0cb\x0bc\x1b[0m\x1c\x7f",
    ]
    for line in lines:
        source = grain.sources.JsonLinesDataSource(written(tmp_path / "x.jsonl", line + b"\nnext"))
        assert list(source) == [line, b"next"]


def test_text_that_begins_like_other_kinds_is_text(tmp_path):
    lines = [b"BZh9 and so on", b"PARIS", b"PAR1 is a name", b"7z is a tool", b"Object", b"PK"]
    for line in lines:
        source = grain.sources.JsonLinesDataSource(written(tmp_path / "x.jsonl", line + b"\nnext"))
        assert [source[0], source[1]] == [line, b"next"]
