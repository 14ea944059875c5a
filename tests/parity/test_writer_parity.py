"""Files of the record writer, read and rewritten by array_record itself."""

import random
import struct

import pytest

from grainmill._native import ArrayRecordWriter, RecordFiles

module = pytest.importorskip("array_record.python.array_record_module")

CODECS = ["uncompressed", "snappy", "zstd:1", "zstd:19", "zstd:-5", "brotli:0", "brotli:6"]
LAYOUTS = ["", "transpose", "transpose,transpose_bucket_size:1", "pad_to_block_boundary:true"]
GROUPS = [1, 7, 64, 2147483647]


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def message(rng, depth=0):
    """A protocol buffer message of any shape, with groups and deep nesting."""
    out = b""
    for _ in range(rng.randrange(7)):
        number = rng.choice([1, 2, 3, 15, 16, 2047, 300_000, (1 << 29) - 1])
        wire = rng.choice([0, 0, 1, 2, 2, 3, 5])
        key = varint(number << 3 | wire)
        nested = wire == 3 or (wire == 2 and rng.random() < 0.6)
        inner = message(rng, depth + 1) if nested and depth < 6 else b""
        match wire:
            case 0:
                out += key + varint(rng.choice([0, 1, 4, 127, 128, rng.getrandbits(64)]))
            case 1 | 5:
                out += key + rng.randbytes(8 if wire == 1 else 4)
            case 3:
                out += key + inner + varint(number << 3 | 4)
            case _:
                body = inner if nested else rng.randbytes(rng.randrange(12))
                out += key + varint(len(body)) + body
    return out


def regular(number):
    """A message as programs usually write it: always with the same fields."""
    inner = b"\x0a" + varint(8) + struct.pack("<d", number / 7)
    return b"\x08" + varint(number) + b"\x12" + varint(len(inner)) + inner + b"\x1a\x03abc"


def records_of_all_kinds():
    rng = random.Random(1)
    records = [message(rng) for _ in range(120)]
    records += [regular(number) for number in range(100)]
    records += [rng.randbytes(rng.randrange(40)) for _ in range(60)]
    records += [b"", b"\x00", b"\xff" * 200_000, b"text " * 30_000, b"\x0b" * 300 + b"\x0c" * 300]
    records += [b"\x08\x80\x00", b"\x0a\x81\x00A", b"\x0b\x14", b"\x0a\x02\x08", b""]
    deep = b"\x08\x07"
    for _ in range(150):
        deep = b"\x1a" + varint(len(deep)) + deep
        records.append(deep)
    return records


def write(writer_type, path, options, records):
    writer = writer_type(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_array_record_reads_every_kind_of_file(tmp_path, codec, layout):
    records = records_of_all_kinds()
    for group_size in GROUPS:
        # Padded chunks take 64 KiB each; brotli is slow to start each of many buckets.
        costly = (group_size == 1 and "pad" in layout) or (
            "size:1" in layout and codec == "brotli:6"
        )
        few = records[::10] if costly else records
        options = f"group_size:{group_size},{codec},{layout}"
        write(ArrayRecordWriter, tmp_path / "ours", options, few)
        reader = module.ArrayRecordReader(str(tmp_path / "ours"))
        assert reader.read_all() == few, options
        write(module.ArrayRecordWriter, tmp_path / "theirs", options, few[:1])
        theirs = module.ArrayRecordReader(str(tmp_path / "theirs"))
        assert reader.writer_options_string() == theirs.writer_options_string()


@pytest.mark.parametrize("options", ["brotli:6,window_log:30", "zstd:3,window_log:28"])
def test_array_record_reads_wide_windows(tmp_path, options):
    records = [random.Random(2).randbytes(1 << 20) * 40]
    write(ArrayRecordWriter, tmp_path / "ours", options, records)
    assert module.ArrayRecordReader(str(tmp_path / "ours")).read_all() == records
    assert (tmp_path / "ours").stat().st_size < 4 << 20, "the window reaches back a MiB"


@pytest.mark.parametrize("layout", ["", ",pad_to_block_boundary:true"])
@pytest.mark.parametrize("group_size", [1, 3, 100, 70_000])
def test_plain_files_equal_those_of_array_record(tmp_path, group_size, layout):
    rng = random.Random(group_size)
    options = f"uncompressed,group_size:{group_size}{layout}"
    for lengths in ([], [0] * 70_100, rng.choices(range(300), k=700), [65_400, 70, 200_000, 0]):
        few = 50 if "pad" in layout and group_size < 70_000 else len(lengths)
        records = [rng.randbytes(length) for length in lengths[:few]]
        ours = write(ArrayRecordWriter, tmp_path / "ours", options, records)
        assert ours == write(module.ArrayRecordWriter, tmp_path / "theirs", options, records)


@pytest.mark.parametrize(
    "options",
    [
        "foo", "group_size", "group_size:0", "group_size:2147483648", "group_size:1:2",
        "group_size:1,group_size:1", "group_size:2,default", "default,zstd:23", "zstd,brotli",
        "snappy:3", "brotli:12", "window_log:32", "brotli,window_log:31", "snappy,window_log:20",
        "transpose:1", "transpose_bucket_size:0", "transpose_bucket_size:1KB",
        "pad_to_block_boundary:yes", "max_parallelism:0", "saturation_delay_ms:auto", ":",
        "zstd:99,group_size:0", "zstd,brotli:99", "window_log:99,snappy", "zstd:99,foo",
    ],
)  # fmt: skip
def test_bad_options_are_refused_in_the_same_words(tmp_path, options):
    with pytest.raises(ValueError, match="ption") as theirs:
        module.ArrayRecordWriter(str(tmp_path / "file"), options)
    with pytest.raises(ValueError, match="ption") as ours:
        ArrayRecordWriter(str(tmp_path / "file"), options)
    assert str(ours.value) == str(theirs.value)


def number_records(byte_len):
    """Records whose compressed size depends on the settings of the codec."""
    rng = random.Random(byte_len)
    numbers = [rng.randrange(1000) for _ in range(500_000)]
    data = struct.pack(f"<{len(numbers)}i", *numbers)
    return [data[at : at + byte_len] for at in range(0, len(data), byte_len)]


@pytest.mark.parametrize("byte_len", [30, 1_000, 4_000, 4_200, 16_000, 100_000, 250_000, 400_000])
def test_zstd_files_are_not_longer_than_those_of_array_record(tmp_path, byte_len):
    records = number_records(byte_len)[:20_000]
    stored = []
    for number, writer_type in enumerate((ArrayRecordWriter, module.ArrayRecordWriter)):
        path = tmp_path / f"{number}"
        write(writer_type, path, "zstd:3", records)
        stored.append(RecordFiles([(str(path), 0, None)]).mean_byte_len)
    assert stored[0] / stored[1] < 1.02


def test_transposed_files_are_about_as_short_as_those_of_array_record(tmp_path):
    rng = random.Random(3)
    for records in ([regular(n) for n in range(20_000)], [message(rng) for _ in range(5_000)]):
        options = "transpose,group_size:1000"
        ours = write(ArrayRecordWriter, tmp_path / "ours", options, records)
        theirs = write(module.ArrayRecordWriter, tmp_path / "theirs", options, records)
        assert len(ours) <= 1.05 * len(theirs) + 65536
