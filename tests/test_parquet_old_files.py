"""Files of old writers of Parquet, times that no type holds, encryption, and false claims."""

import datetime
import json
import random
import subprocess
import sys
import tracemalloc

import grain as real_grain
import numpy as np
import parquet_footers as footers
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from effort import cases
from parquet_footers import BINARY, BYTE, DOUBLE, I32, I64, LIST, NUMBERS, STRUCT, TRUE
from parquet_tables import plain, rows_of

from grainmill._native import GrainmillError
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main
from grainmill.experimental import ParquetIterDataset
from grainmill.sources import ParquetDataSource


def check_rows(path, expected, capsys):
    """Compares the rows of a file by each entrance."""
    source = ParquetDataSource(path)
    assert [plain(row) for row in source.__getitems__(range(len(source)))] == expected
    found = list(ParquetIterDataset(str(path)))
    assert [list(row) for row in found] == [list(row) for row in expected]
    assert main(["verify", str(path)]) == ExitCode.OK
    assert main(["info", "--full", str(path)]) == ExitCode.OK
    capsys.readouterr()


# --- footers --------------------------------------------------------------------------------------

REPEATED = pa.table({"x": ["a", "b", "a"] * 20})
LISTS = pa.table({"x": [["a", "b"], ["c"], []] * 20})


def key_values_with_numbers(footer):  # as fastparquet 0.8 wrote them
    pairs = [{1: (BINARY, b"i"), 2: (I64, 5)}, {1: (BINARY, b"f"), 2: (DOUBLE, 1.5)}]
    pairs += [{1: (BINARY, b"b"), 2: (TRUE, None)}, {1: (BINARY, b"none")}]
    footer[5] = LIST, (STRUCT, pairs)


def empty_lists_of_other_kinds(footer):
    footer[5] = LIST, (I32, [])
    footers.row_group(footer)[4] = LIST, (0, [])
    metadata = footers.column(footer)
    metadata[2] = LIST, (BINARY, [])
    metadata[3] = LIST, (BYTE, [])
    metadata[8] = LIST, (I64, [])
    metadata[13] = LIST, (I32, [])


def nulls_by_converted_type(footer):  # as parquet-cpp before 1.5 wrote columns of nulls
    for element in footer[2][1][1][1:]:
        element[6] = I32, 24


def unknown_numbers(footer):
    footers.column(footer)[2] = LIST, (I32, [0, 77])
    footers.column(footer)[13] = LIST, (STRUCT, [{1: (I32, 99), 2: (I32, 99), 3: (I32, 1)}])
    footer[2][1][1][1][6] = I32, 99
    row = footers.row_group(footer)
    row[7] = I32, 3


def uncounted_dictionary_header(body):  # as parquet-mr before 1.2.9 counted the length of a column
    def edit(footer):
        metadata = footers.column(footer)
        metadata[7] = I64, metadata[7][1] - footers.header_len(body, metadata[11][1])
        footer[6] = BINARY, b"parquet-mr version 1.2.8 (build abc)"

    return edit


def dictionary_offset(offset):
    def edit(footer):
        footers.column(footer)[11] = I64, offset

    return edit


def data_offset_of_the_dictionary(footer):
    metadata = footers.column(footer)
    metadata[9] = metadata.pop(11)


@pytest.mark.parametrize(
    ("table", "options", "edit"),
    [
        (NUMBERS, {}, key_values_with_numbers),
        (NUMBERS, {}, empty_lists_of_other_kinds),
        (pa.table({"x": pa.array([None] * 5, pa.int32())}), {}, nulls_by_converted_type),
        (NUMBERS, {}, unknown_numbers),
        (REPEATED, {}, uncounted_dictionary_header),
        (REPEATED, {"compression": "none"}, uncounted_dictionary_header),
        (LISTS, {"data_page_version": "1.0"}, uncounted_dictionary_header),
        (LISTS, {"data_page_version": "2.0"}, uncounted_dictionary_header),
        (NUMBERS, {"use_dictionary": False}, dictionary_offset(0)),
        (NUMBERS, {"use_dictionary": False}, dictionary_offset(-1)),
        (NUMBERS, {"use_dictionary": False}, dictionary_offset(4)),
        (NUMBERS, {"use_dictionary": False}, dictionary_offset(14)),
        (REPEATED, {}, data_offset_of_the_dictionary),
    ],
)
def test_footers_of_other_writers_are_read(tmp_path, table, options, edit, capsys):
    body, footer = footers.written(table, **options)
    if edit is uncounted_dictionary_header:
        edit = edit(body)
    edit(footer)
    (tmp_path / "x.parquet").write_bytes(footers.joined(body, footer))
    check_rows(tmp_path / "x.parquet", rows_of(table), capsys)


def test_rows_without_columns_are_empty(tmp_path, capsys):
    for num_children in ({5: (I32, 0)}, {}):
        body, footer = footers.written(NUMBERS)
        footer[2] = LIST, (STRUCT, [{4: (BINARY, b"schema"), **num_children}])
        footers.row_group(footer)[1] = LIST, (0, [])
        footer.pop(7)
        (tmp_path / "x.parquet").write_bytes(footers.joined(body, footer))
        check_rows(tmp_path / "x.parquet", [{}, {}, {}], capsys)
    pq.write_table(pa.table({}), tmp_path / "x.parquet")
    check_rows(tmp_path / "x.parquet", [], capsys)


def test_more_row_groups_than_16_bits_count_are_read(tmp_path):
    pq.write_table(pa.table({"x": range(33_000)}), tmp_path / "x.parquet", row_group_size=1)
    source = ParquetDataSource(tmp_path / "x.parquet")
    index = [32_999, 0, 32_768, 32_767]
    assert [row["x"] for row in source.__getitems__(index)] == index


@pytest.mark.parametrize("is_newer", [False, True])
@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("encoding", [0, 2, 5, 6, 7, 8, 9])
def test_pages_of_nulls_need_no_bytes_of_values(tmp_path, kind, encoding, is_newer, capsys):
    """parquet-cpp before 1.5 wrote nothing after their levels."""
    data = footers.one_page(
        kind,
        b"",
        encoding,
        num_rows=5,
        dictionary=(0, b"") if encoding in {2, 8} else None,
        is_newer=is_newer,
    )
    (tmp_path / "x.parquet").write_bytes(data)
    check_rows(tmp_path / "x.parquet", [{"x": None}] * 5, capsys)


def test_pages_whose_values_are_missing_are_an_error(tmp_path):
    for kind in range(7):
        for encoding in (0, 3, 5, 6, 7, 9):
            data = footers.one_page(kind, b"", encoding, num_rows=5, levels=[0, 1, 0, 0, 0])
            (tmp_path / "x.parquet").write_bytes(data)
            with pytest.raises(GrainmillError, match=r"x\.parquet: row group 0, column `x`"):
                ParquetDataSource(tmp_path / "x.parquet")[0]


# --- times ----------------------------------------------------------------------------------------

UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


def nested(values, shape):
    """A column of times, or of something that contains them."""
    kind = pa.timestamp("us")
    if shape == "list":
        return pa.array([[value, value] for value in values], pa.list_(kind))
    if shape == "struct":
        rows = [value and {"n": 1, "t": value} for value in values]
        return pa.array(rows, pa.struct([("n", pa.int8()), ("t", kind)]))
    if shape == "map":
        return pa.array([[("a", value)] for value in values], pa.map_(pa.string(), kind))
    return pa.array(values, kind)


@pytest.mark.parametrize("shape", ["flat", "list", "struct", "map"])
def test_times_of_the_type_int96_are_right_or_refused(tmp_path, shape):
    rng = random.Random(shape)
    path = tmp_path / "x.parquet"
    first, last = (
        int(np.datetime64(day, "us").astype(int)) for day in ("1000-01-01", "9999-12-31")
    )
    for _ in range(cases(30, 1_000)):
        near = [rng.randrange(-9 * 10**15, 9 * 10**15) for _ in range(30)]
        far = [rng.randrange(first, last) for _ in range(rng.choice([0, 0, 1, 5]))]
        values = [*near, *far, None]
        rng.shuffle(values)
        table = pa.table({"n": range(len(values)), "t": nested(values, shape)})
        pq.write_table(
            table,
            path,
            use_deprecated_int96_timestamps=True,
            store_schema=False,
            row_group_size=rng.choice([7, 100]),
            use_dictionary=rng.random() < 0.5,
            data_page_version=rng.choice(["1.0", "2.0"]),
            compression=rng.choice(["none", "zstd"]),
        )
        for unit in UNITS:
            options = {"coerce_int96_timestamp_unit": unit}
            source = ParquetDataSource(path, columns=["t"], **options)
            expected = rows_of(table.select(["t"]))
            beyond = [
                at for at, value in enumerate(values) if value and abs(value) >= 2**63 // 1000
            ]
            if unit == "ns" and beyond:
                # Rows are decoded together.
                with pytest.raises(
                    GrainmillError, match=r"x\.parquet: row \d+, column `t`"
                ) as error:
                    source.__getitems__(range(len(values)))
                row = int(str(error.value).split("row ")[1].split(",")[0])
                assert row == beyond[0]
                with pytest.raises(GrainmillError, match=rf"row {row}, column `t`: a time .*INT96"):
                    list(ParquetIterDataset(str(path)))
                continue
            if unit in {"s", "ms"}:
                # Parts of a second are cut.
                expected = rows_of(pq.ParquetFile(path, **options).read(columns=["t"]))
            found = [plain_times(row) for row in source.__getitems__(range(len(values)))]
            assert found == [plain_times(row) for row in expected]
    assert main(["verify", str(path)]) == ExitCode.OK


def plain_times(value):
    """A row with its times in microseconds, of which 64 bits hold all of the test."""
    if isinstance(value, np.datetime64):
        return int(value.astype("datetime64[us]").astype(np.int64))
    if isinstance(value, np.ndarray | list):
        return [plain_times(one) for one in value]
    if isinstance(value, tuple):
        return tuple(plain_times(one) for one in value)
    if isinstance(value, dict):
        return {name: plain_times(one) for name, one in value.items()}
    return value // 1000 if isinstance(value, int) and abs(value) > 1000 else value


def test_far_times_are_refused_and_those_of_grain_wrong(tmp_path):
    path = str(tmp_path / "x.parquet")
    far = pa.array([datetime.datetime(9999, 12, 31)], pa.timestamp("us"))
    pq.write_table(pa.table({"t": far}), path, use_deprecated_int96_timestamps=True)
    (theirs,) = real_grain.experimental.ParquetIterDataset(path)
    assert theirs["t"] == np.datetime64("1816-03-29T05:56:08.066277376")
    with pytest.raises(GrainmillError, match=r"x\.parquet: row 0, column `t`: a time"):
        list(ParquetIterDataset(path))
    (row,) = ParquetIterDataset(path, coerce_int96_timestamp_unit="us")
    assert row["t"] == np.datetime64("9999-12-31")


@pytest.mark.parametrize("is_newer", [False, True])
def test_times_of_the_type_int96_beyond_all_units_are_refused(tmp_path, is_newer):
    times = [footers.int96(0, 5000), footers.int96(2**31 - 1 - 2_440_588, 0)]
    pages = {"levels": [1, 0, 1], "num_rows": 3, "is_newer": is_newer}
    dictionary = {"dictionary": (2, b"".join(times)), **pages}
    for name, data in {
        "plain": footers.one_page(3, b"".join(times), 0, **pages),
        "dictionary": footers.one_page(3, b"\x01\x03\x02", 8, **dictionary),
    }.items():
        path = tmp_path / f"{name}.parquet"
        path.write_bytes(data)
        for unit in ("ns", "us"):
            source = ParquetDataSource(path, coerce_int96_timestamp_unit=unit)
            with pytest.raises(
                GrainmillError, match=r"row 2, column `x`: a time of the type INT96"
            ):
                source[0]
        source = ParquetDataSource(path, coerce_int96_timestamp_unit="s")
        assert plain_times([row["x"] for row in source][:2]) == [0, None]
        assert source[2]["x"] == np.datetime64((2**31 - 1 - 2_440_588) * 86_400, "s")


def test_the_unit_of_the_type_int96_is_stated_or_that_of_the_writer(tmp_path):
    path = str(tmp_path / "x.parquet")
    table = pa.table({"t": pa.array([1, None], pa.timestamp("us", tz="UTC"))})
    for store_schema in (True, False):
        pq.write_table(table, path, use_deprecated_int96_timestamps=True, store_schema=store_schema)
        unit = "us" if store_schema else "ns"
        assert ParquetDataSource(path)[0]["t"].dtype == f"datetime64[{unit}]"
        for options in ({}, {"coerce_int96_timestamp_unit": "ms"}):
            rows, theirs = (
                [row["t"] for row in make(path, **options)]
                for make in (ParquetIterDataset, real_grain.experimental.ParquetIterDataset)
            )
            assert rows[0] == theirs[0]
            assert rows[0].dtype == theirs[0].dtype
    assert repr(ParquetDataSource(path, coerce_int96_timestamp_unit="us")).endswith(
        "coerce_int96_timestamp_unit='us')"
    )
    for make in (ParquetDataSource, ParquetIterDataset):
        with pytest.raises(ValueError, match="must be one of 's', 'ms', 'us', 'ns', got 'min'"):
            make(path, coerce_int96_timestamp_unit="min")


@pytest.mark.parametrize(
    "case",
    [
        (pa.time64("us"), -5, "-5 microseconds is not in a day"),
        (pa.time32("ms"), -1, "-1 milliseconds is not in a day"),
        (pa.time64("us"), 86_400_000_000, "86400000000 microseconds is not in a day"),
        (pa.time64("ns"), 123_456_789, "123456789 nanoseconds is no `datetime.time`"),
    ],
)
@pytest.mark.parametrize("shape", ["flat", "list", "struct", "map"])
def test_a_time_of_day_that_is_none_names_its_row(tmp_path, case, shape, capsys):
    kind, value, problem = case
    good = pa.array([0, None, 1000] * 10, kind).to_pylist()
    wrap = {
        "flat": (kind, lambda time: time),
        "list": (pa.list_(kind), lambda time: [time]),
        "struct": (pa.struct([("t", kind)]), lambda time: {"t": time}),
        "map": (pa.map_(pa.string(), kind), lambda time: [("a", time)]),
    }
    of, wrapped = wrap[shape]
    # Arrow takes numbers for times, also those that are none.
    times = [wrapped(time) for time in [*good[:23], value, *good[24:]]]
    table = pa.table({"n": range(30), "t": pa.array(times, of)})
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, row_group_size=10)
    place = rf"x\.parquet: row 23, column `t`: a time of day of {problem}"
    source = ParquetDataSource([path, path])
    for read in (lambda: source[53], lambda: source.__getitems__(range(20, 30))):
        with pytest.raises(GrainmillError, match=place):
            read()
    with pytest.raises(GrainmillError, match=place):
        list(ParquetIterDataset(str(path)))
    assert source[22]["n"] == 22
    assert main(["verify", str(path), "--json"]) == ExitCode.DAMAGED
    (found,) = json.loads(capsys.readouterr().out)["files"]
    assert (found["records"], [one["record"] for one in found["problems"]]) == (29, [23])


def test_a_column_of_a_type_that_cannot_be_read_is_named(tmp_path):
    body, footer = footers.written(
        pa.table({"x": [b"123456789012"]}, pa.schema([("x", pa.binary(12))]))
    )
    footer[2][1][1][1][6] = I32, 21  # an interval
    (tmp_path / "x.parquet").write_bytes(footers.joined(body, footer))
    with pytest.raises(
        NotImplementedError, match=r"x\.parquet: column `x`: columns of type Interval"
    ):
        ParquetDataSource(tmp_path / "x.parquet")[0]


# --- what is encrypted ----------------------------------------------------------------------------


def write_encrypted(path, *, plaintext_footer):
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):
        def wrap_key(self, key_bytes, master_key_identifier):
            return master_key_identifier.encode() + key_bytes.hex().encode()

        def unwrap_key(self, wrapped_key, master_key_identifier):
            return bytes.fromhex(wrapped_key.removeprefix(master_key_identifier))

    factory = encryption.CryptoFactory(lambda _: Keys())
    config = encryption.EncryptionConfiguration(
        footer_key="footer", column_keys={"key": ["y"]}, plaintext_footer=plaintext_footer
    )
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, NUMBERS.schema, encryption_properties=properties) as writer:
        writer.write_table(NUMBERS)


def test_what_is_encrypted_is_said_to_be_and_the_rest_is_read(tmp_path, capsys):
    path = tmp_path / "x.parquet"
    write_encrypted(path, plaintext_footer=True)
    for columns in (None, ["y"], ["x", "y"]):
        with pytest.raises(GrainmillError, match=r"x\.parquet: column `y`: encrypted, .*`columns`"):
            ParquetDataSource(path, columns=columns)
    assert plain(ParquetDataSource(path, columns=["x"])[2]) == {"x": 3}
    with pytest.raises(GrainmillError, match="column `y`: encrypted"):
        iter(ParquetIterDataset(str(path)))
    assert main(["verify", str(path)]) == ExitCode.DAMAGED
    assert "column `y`: encrypted" in capsys.readouterr().out
    # As parquet-mr has it, without metadata of the column.
    body, footer = footers.written(NUMBERS)
    chunk = footers.row_group(footer)[1][1][1][1]
    chunk.pop(3)
    chunk |= {8: (STRUCT, {1: (STRUCT, {})}), 9: (BINARY, b"secret")}
    path.write_bytes(footers.joined(body, footer))
    with pytest.raises(GrainmillError, match="column `y`: encrypted"):
        ParquetDataSource(path)
    assert plain(ParquetDataSource(path, columns=["x"])[2]) == {"x": 3}
    write_encrypted(path, plaintext_footer=False)
    with pytest.raises(GrainmillError, match=r"x\.parquet: .*encrypted"):
        ParquetDataSource(path)


# --- work for what is there -----------------------------------------------------------------------


def test_a_page_that_compresses_well_is_read_if_the_limit_is_raised(tmp_path, monkeypatch, capsys):
    path = tmp_path / "x.parquet"
    mask = bytes(20 << 20)
    pq.write_table(pa.table({"x": [mask, b"x"]}), path, compression="zstd", use_dictionary=False)
    with pytest.raises(
        GrainmillError,
        match=r"more than is plausible; `max_page_bytes`, or `GRAINMILL_MAX_PAGE_BYTES`",
    ):
        ParquetDataSource(path)[1]
    assert ParquetDataSource(path, max_page_bytes=21 << 20)[0]["x"] == mask
    assert [len(row["x"]) for row in ParquetIterDataset(str(path), max_page_bytes=21 << 20)] == [
        len(mask),
        1,
    ]
    with pytest.raises(ValueError, match="`max_page_bytes` must be in"):
        ParquetDataSource(path, max_page_bytes=-1)
    commands = {
        "verify": [],
        "cat": [],
        "info": ["--full"],
        "convert": ["--quiet", "--force", str(tmp_path / "x.array_record")],
    }
    for limit, allowed in (("1000", False), (str(21 << 20), True)):
        monkeypatch.setenv("GRAINMILL_MAX_PAGE_BYTES", limit)
        for command, more in commands.items():
            code = main([command, str(path), *more])
            assert code == (ExitCode.OK if allowed else ExitCode.DAMAGED), command
        capsys.readouterr()
    monkeypatch.setenv("GRAINMILL_MAX_PAGE_BYTES", "much")
    with pytest.raises(ValueError, match="`GRAINMILL_MAX_PAGE_BYTES` must be a number of bytes"):
        ParquetDataSource(path)[0]


LONG = "long " * 200_000
# Reads rows of a file in a process of its own, and prints what that took in megabytes.
READER = """
import resource, sys
import numpy
from grainmill.experimental import ParquetIterDataset
from grainmill.sources import ParquetDataSource
from grainmill._tools.main import main
LONG = "long " * 200_000
def parts(value):
    values = value.values() if isinstance(value, dict) else value
    is_nested = isinstance(value, (dict, list, tuple, numpy.ndarray))
    return [part for other in values for part in parts(other)] if is_nested else [value]
def check(row):
    found = parts(row)
    assert found and all(value in (LONG, LONG.encode(), b"short", "short") for value in found)
    return len(found)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
source = ParquetDataSource(sys.argv[1])
assert check(source[len(source) // 2]) and check(source[len(source) - 1])
assert sum(map(check, source.__getitems__([0, 7, len(source) - 2]))) >= 3
assert check(next(iter(ParquetIterDataset(sys.argv[1]))))
assert main(["verify", sys.argv[1]]) == 0
print(peak() - before)
"""


def repeated(kind, shape, num_rows):
    """A column with many rows of one long value, and few of a short one."""
    words = pa.array([LONG, "short"]).cast(kind)
    indices = np.zeros(num_rows, np.int32)
    indices[::100] = 1
    values = pa.DictionaryArray.from_arrays(indices, words)
    match shape:
        case "list":
            return pa.ListArray.from_arrays(np.arange(0, num_rows + 1, 2, np.int32), values)
        case "struct":
            return pa.StructArray.from_arrays([values, values], ["a", "b"])
        case "map":
            offsets = np.arange(0, num_rows + 1, 2, np.int32)
            return pa.MapArray.from_arrays(offsets, values, values)
    return values


@pytest.mark.parametrize("shape", ["flat", "list", "struct", "map"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (pa.string(), {}),
        (pa.binary(), {"data_page_version": "2.0", "write_page_index": True}),
        (pa.large_string(), {"compression": "none", "store_schema": False}),
    ],
)
def test_a_value_that_is_repeated_takes_its_memory_once(tmp_path, shape, kind, options):
    """Ten thousand rows of a megabyte, in one page, are ten gigabytes."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": repeated(kind, shape, 10_000)}), path, **options)
    command = [sys.executable, "-c", READER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 200


@pytest.mark.parametrize("is_list", [False, True])
def test_values_that_repeat_the_one_before_are_limited_as_pages_are(tmp_path, is_list):
    path = tmp_path / "x.parquet"
    text = "text" * 5000
    rows = [[text, text]] * 500 if is_list else [text] * 1000
    name = "x.list.element" if is_list else "x"
    options = {"use_dictionary": False, "column_encoding": {name: "DELTA_BYTE_ARRAY"}}
    pq.write_table(pa.table({"x": rows}), path, **options)
    limit = r"decoded to 20\d{6}, which is more than is plausible; `max_page_bytes`, or `GRAINMILL"
    with pytest.raises(GrainmillError, match=rf"^{path}: row group 0, column `{name}`: .*{limit}"):
        ParquetDataSource(path)[7]
    source = ParquetDataSource(path, max_page_bytes=21 << 20)
    assert [plain(row)["x"] for row in source.__getitems__(range(len(source)))] == rows


@pytest.mark.parametrize("shape", ["flat", "list", "struct"])
def test_strings_that_are_no_text_are_an_error_whatever_they_are_called(tmp_path, shape):
    path = tmp_path / "x.parquet"
    json_type = pa.json_()
    for kind, byte in [
        (pa.string(), b"a"),
        (json_type, b"a"),
        (pa.string(), b"\xff"),
        (json_type, b"\xff"),
    ]:
        texts = pa.array(['{"long enough": "to be seen"}'] * 4)
        values = texts if kind == pa.string() else pa.ExtensionArray.from_storage(kind, texts)
        match shape:
            case "list":
                values = pa.ListArray.from_arrays([0, 2, 4], values)
            case "struct":
                values = pa.StructArray.from_arrays([values], ["a"])
        table = pa.table({"x": values})
        options = {"use_dictionary": False, "write_statistics": False}
        pq.write_table(table, path, compression="none", **options)
        bytes_of_file = path.read_bytes()
        path.write_bytes(bytes_of_file.replace(b"enough", byte * 6))
        source = ParquetDataSource(path)
        if byte == b"a":
            assert "aaaaaa" in str(source[1]["x"])
        else:
            with pytest.raises(GrainmillError, match=r"x\.parquet: row group 0, column `x`"):
                source[1]


def test_commands_work_in_proportion_to_what_is_there(tmp_path, capsys):
    """A file of some hundred bytes that claims 2^31 rows, three times."""
    body, footer = footers.written(pa.table({"x": [1, 2, 3]}), use_dictionary=False)
    group = footers.row_group(footer)
    group[3] = I64, 2**31 - 1
    footers.column(footer)[5] = I64, 2**31 - 1
    footer[4] = LIST, (STRUCT, [group] * 3)
    footer[3] = I64, 3 * (2**31 - 1)
    path = tmp_path / "x.parquet"
    path.write_bytes(footers.joined(body, footer))
    tracemalloc.start()
    for command in (["verify"], ["info"], ["info", "--full"], ["cat"], ["convert", "--quiet"]):
        output = [str(tmp_path / "out.jsonl")] if command[0] == "convert" else []
        assert main([*command, str(path), *output]) == ExitCode.DAMAGED
        assert "its pages have 3 rows of 2147483647" in "".join(capsys.readouterr())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20


def test_rows_that_repeat_one_value_are_verified_without_objects(tmp_path, capsys):
    path = tmp_path / "x.parquet"
    # Ten million rows in a few kilobytes.
    array = pa.DictionaryArray.from_arrays(np.zeros(10**7, np.int8), ["a"])
    pq.write_table(pa.table({"x": array}), path, store_schema=False, row_group_size=10**7)
    assert path.stat().st_size < 50_000
    assert main(["verify", str(path), "--json"]) == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)["files"]
    assert found["records"] == 10**7


def test_dates_of_python_are_those_of_the_file(tmp_path):
    """Structures have dates and times of Python where Grain's have."""
    path = str(tmp_path / "x.parquet")
    when = datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC)
    for unit in ("ms", "us", "s"):
        kind = pa.struct([("t", pa.timestamp(unit, tz="Europe/Berlin"))])
        pq.write_table(pa.table({"s": pa.array([{"t": when}], kind)}), path)
        (row,) = ParquetIterDataset(path)
        (theirs,) = real_grain.experimental.ParquetIterDataset(path)
        assert row["s"]["t"] == theirs["s"]["t"] == when
        assert row["s"]["t"].utcoffset() == theirs["s"]["t"].utcoffset()
        assert row["s"]["t"].utcoffset() == datetime.timedelta(hours=1)


def test_verify_counts_the_rows_that_can_be_read_and_names_each_damage_once(tmp_path, capsys):
    rng = random.Random(0)
    path = tmp_path / "x.parquet"
    table = pa.table({name: [f"{name} {k}" for k in range(1000)] for name in "abc"})
    options = {"use_dictionary": False, "compression": "none", "row_group_size": 130}
    pq.write_table(table, path, write_page_checksum=True, data_page_size=200, **options)
    whole = path.read_bytes()
    for _ in range(cases(6, 500)):
        damaged = bytearray(whole)
        texts = [f"{rng.choice('abc')} {rng.randrange(1000)}".encode() for _ in range(3)]
        for text in texts[: rng.randrange(1, 4)]:
            damaged[damaged.index(text)] ^= 2
        path.write_bytes(damaged)
        intact, problems = 0, set()
        source = ParquetDataSource(path, cache_bytes=0)
        for row in range(1000):
            try:
                source[row]
                intact += 1
            except GrainmillError as error:
                problems.add(str(error).removeprefix(f"{path}: "))
        # The header of a page has its smallest and largest value, too, which nobody reads.
        expected = ExitCode.DAMAGED if problems else ExitCode.OK
        assert main(["verify", str(path), "--json"]) == expected
        (found,) = json.loads(capsys.readouterr().out)["files"]
        assert found["records"] == intact
        listed = [one["problem"] for one in found["problems"]]
        assert len(listed) == len(set(listed))
        assert problems <= set(listed)
