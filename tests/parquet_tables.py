"""Random tables, how several writers store them, and values to be compared, for Parquet."""

import contextlib
import datetime
import decimal
import importlib
import random
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

EPOCH = datetime.datetime(1970, 1, 1)


def plain(value):  # noqa: PLR0911 - a line for each type
    """A value of an element, or of `to_pylist`, as Python objects; times as nanoseconds."""
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value]
    if isinstance(value, pd.Timestamp | pd.Timedelta):
        return value.as_unit("ns").value
    if isinstance(value, np.datetime64):
        return int(value.astype("datetime64[ns]").astype(np.int64))
    if isinstance(value, np.timedelta64):
        return int(value.astype("timedelta64[ns]").astype(np.int64))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None:
            value = value.astimezone(datetime.UTC).replace(tzinfo=None)
        return plain(value - EPOCH)
    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(microseconds=1) * 1000
    if isinstance(value, datetime.date):
        return plain(datetime.datetime.combine(value, datetime.time()))
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, tuple):
        return tuple(plain(one) for one in value)
    return value


def rows_of(table):
    return [plain(row) for row in table.to_pylist()]


def same_value(ours, theirs):  # noqa: PLR0911 - a line for each type
    """Whether two values are equal, and of the same types."""
    if isinstance(theirs, np.ndarray):
        return (
            ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and all(same_value(a, b) for a, b in zip(ours, theirs, strict=True))
        )
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(
            same_value(ours[name], theirs[name]) for name in theirs
        )
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same_value, ours, theirs))
    if isinstance(theirs, np.generic) and ours.dtype != theirs.dtype:
        return False
    if isinstance(theirs, datetime.datetime) and ours.utcoffset() != theirs.utcoffset():
        return False
    return ours == theirs or (ours != ours and theirs != theirs)  # noqa: PLR0124 - NaN


def value_of(kind, rng):  # noqa: PLR0911, PLR0912 - a line for each type
    """A random value of an Arrow type."""
    if pa.types.is_null(kind):
        return None
    if pa.types.is_integer(kind):
        bits = kind.bit_width
        low = 0 if pa.types.is_unsigned_integer(kind) else -(2 ** (bits - 1))
        return rng.choice([low, low + 2**bits - 1, rng.randrange(0, 100)])
    if pa.types.is_floating(kind):
        return rng.randrange(-64, 64) / 8
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return rng.choice(["", "a", "häß", "long " * rng.randrange(20)])
    if pa.types.is_fixed_size_binary(kind):
        return rng.randbytes(kind.byte_width)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return rng.randbytes(rng.randrange(12))
    if pa.types.is_decimal(kind):
        return decimal.Decimal(rng.randrange(-10000, 10000)).scaleb(-kind.scale)
    if pa.types.is_time(kind):
        return datetime.time(rng.randrange(24), rng.randrange(60), rng.randrange(60))
    if pa.types.is_date(kind):
        return datetime.date(1970, 1, 1) + datetime.timedelta(rng.randrange(-9999, 9999))
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return rng.randrange(-(10**9), 10**9)
    if pa.types.is_struct(kind):
        return {field.name: maybe(field.type, rng, 0.2) for field in kind}
    if pa.types.is_map(kind):
        keys = rng.sample(["a", "b", "c"], rng.randrange(3))
        return [(key, maybe(kind.item_type, rng, 0.2)) for key in keys]
    if pa.types.is_fixed_size_list(kind):
        return [maybe(kind.value_type, rng, 0.1) for _ in range(kind.list_size)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [maybe(kind.value_type, rng, 0.1) for _ in range(rng.randrange(4))]
    raise AssertionError(kind)


def maybe(kind, rng, null_share):
    return None if rng.random() < null_share else value_of(kind, rng)


_TIMES = [pa.timestamp("ms"), pa.timestamp("us", tz="Asia/Tokyo"), pa.timestamp("ns", tz="+01:30")]
KINDS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()),
    *(pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string()),
    *(pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3), pa.decimal128(9, 2)),
    *(pa.decimal128(38, 10), pa.decimal256(60, 3), pa.null()),
    *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.date32(), pa.date64()),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    *(pa.timestamp("us", tz="Europe/Berlin"), pa.duration("ms"), pa.duration("ns")),
    *(pa.list_(pa.int32()), pa.list_(pa.string()), pa.list_(pa.list_(pa.float32()))),
    *(pa.large_list(pa.int64()), pa.list_(pa.float32(), 3), pa.map_(pa.string(), pa.int64())),
    pa.struct([("x", pa.int64()), ("y", pa.string()), ("z", pa.list_(pa.int8()))]),
    pa.list_(pa.struct([("x", pa.int32()), ("y", pa.bool_())])),
    pa.struct([(f"t{number}", kind) for number, kind in enumerate(_TIMES)]),
    pa.struct([(f"l{number}", pa.list_(kind)) for number, kind in enumerate(_TIMES)]),
    *(pa.list_(pa.timestamp("us", tz="UTC")), pa.list_(pa.struct([("t", _TIMES[1])]))),
    *(pa.map_(pa.string(), _TIMES[1]), pa.struct([("s", pa.struct([("t", pa.time32("ms"))]))])),
]


def random_table(rng, kinds, num_rows, max_columns=5):
    """Columns of some of `kinds`, with nulls in some, a few of them encoded by dictionaries."""
    arrays, fields = [], []
    for number in range(rng.randrange(1, max_columns + 1)):
        kind = rng.choice(kinds)
        null_share = rng.choice([0, 0, 0.3, 1])
        array = pa.array([maybe(kind, rng, null_share) for _ in range(num_rows)], kind)
        if pa.types.is_string(kind) and rng.random() < 0.3:
            array = array.dictionary_encode()
        is_required = not array.null_count and kind != pa.null() and rng.random() < 0.5
        fields.append(pa.field(f"c{number}", array.type, nullable=not is_required))
        arrays.append(array)
    return pa.table(arrays, schema=pa.schema(fields))


# --- writers: each returns how it has written the file --------------------------------------------


def _encodings(table, rng):
    """Other encodings than usual, for the columns of a table."""
    found = {}
    for field in table.schema:
        kind, choices = field.type, ["PLAIN"]
        if kind in {pa.int32(), pa.int64()}:
            choices += ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"]
        elif kind in {pa.float32(), pa.float64()}:
            choices.append("BYTE_STREAM_SPLIT")
        elif kind in {pa.string(), pa.binary()}:
            choices += ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"]
        elif kind == pa.bool_():
            choices.append("RLE")
        elif pa.types.is_nested(kind) or pa.types.is_dictionary(kind):
            continue
        found[field.name] = rng.choice(choices)
    return found


def write_by_pyarrow(path, rng, num_rows):
    table = random_table(rng, KINDS, num_rows)
    options = {
        "row_group_size": rng.choice([1, 13, 100, 1000]),
        "data_page_size": rng.choice([64, 300, 1 << 20]),
        "write_batch_size": rng.choice([1, 10, 1024]),
        "use_dictionary": rng.random() < 0.5,
        "dictionary_pagesize_limit": rng.choice([64, 1 << 20]),
        "compression": rng.choice(["none", "snappy", "gzip", "zstd", "lz4", "brotli"]),
        "version": rng.choice(["1.0", "2.4", "2.6"]),
        "data_page_version": rng.choice(["1.0", "2.0"]),
        "write_statistics": rng.random() < 0.5,
        "write_page_index": rng.random() < 0.5,
        "write_page_checksum": rng.random() < 0.5,
        "store_schema": rng.random() < 0.8,
        "use_compliant_nested_type": rng.random() < 0.8,
        "store_decimal_as_integer": rng.random() < 0.3,
        "use_deprecated_int96_timestamps": rng.random() < 0.2,
    }
    if not options["use_dictionary"] and rng.random() < 0.5:
        options["column_encoding"] = _encodings(table, rng)
    try:
        pq.write_table(table, path, **options)
    except pa.lib.ArrowInvalid:  # the older versions have no nanoseconds
        options["version"] = "2.6"
        pq.write_table(table, path, **options)
    return options


# Types that a package does not take are left out.
_NO_POLARS = (
    r"halffloat|\+01:30|map|large_list|null|decimal256|decimal128\(38|fixed_size_b|time32|date64"
)
_NO_DUCKDB = (
    r"halffloat|null|decimal256|time32|date64|large_list|fixed_size|duration|\+01:30|ns, tz"
)


def _kinds_without(pattern):
    return [kind for kind in KINDS if not re.search(pattern, str(kind))]


def write_by_polars(path, rng, num_rows):
    polars = importlib.import_module("polars")
    table = random_table(rng, _kinds_without(_NO_POLARS), num_rows)
    options = {
        "compression": rng.choice(["uncompressed", "snappy", "gzip", "zstd", "lz4", "brotli"]),
        "statistics": rng.choice([True, False, "full"]),
        "row_group_size": rng.choice([None, 13, 100]),
        "data_page_size": rng.choice([None, 64, 300]),
    }
    polars.from_arrow(table).write_parquet(path, **options)
    return options


def write_by_duckdb(path, rng, num_rows):
    duckdb = importlib.import_module("duckdb")
    table = random_table(rng, _kinds_without(_NO_DUCKDB), num_rows)
    options = {
        "COMPRESSION": rng.choice(["uncompressed", "snappy", "gzip", "zstd", "lz4", "brotli"]),
        "ROW_GROUP_SIZE": rng.choice([2048, 122880]),
        "PARQUET_VERSION": rng.choice(["V1", "V2"]),
        "DICTIONARY_SIZE_LIMIT": rng.choice([1, 1 << 20]),
    }
    text = ", ".join(f"{name} {value}" for name, value in options.items())
    with contextlib.closing(duckdb.connect()) as connection:
        connection.register("input", table)
        connection.sql(f"COPY (SELECT * FROM input) TO '{path}' (FORMAT parquet, {text})")
    return options


def write_by_fastparquet(path, rng, num_rows):
    fastparquet = importlib.import_module("fastparquet")
    numbers = np.random.default_rng(rng.randrange(2**32))
    columns = {
        "i": numbers.integers(-100, 100, num_rows),
        "u": numbers.integers(0, 2**16, num_rows).astype(np.uint16),
        "f": numbers.normal(size=num_rows).astype(np.float32),
        "b": numbers.integers(0, 2, num_rows).astype(bool),
        "t": (numbers.integers(0, 10**9, num_rows) * 10**9).astype("datetime64[ns]"),
        "s": [rng.choice(["", "a", "häß"]) for _ in range(num_rows)],
        "n": pd.array([rng.choice([None, 1, 2]) for _ in range(num_rows)], dtype="Int64"),
        "c": pd.Categorical([rng.choice("xyz") for _ in range(num_rows)]),
    }
    names = rng.sample(sorted(columns), rng.randrange(1, len(columns) + 1))
    options = {
        "compression": rng.choice(["UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "LZ4", "BROTLI"]),
        "row_group_offsets": rng.choice([13, 100, 10**6]),
        "times": rng.choice(["int64", "int96"]),
        "stats": rng.random() < 0.5,
        "custom_metadata": rng.choice([{}, {"a": "text"}]),
    }
    frame = pd.DataFrame({name: columns[name] for name in names})
    fastparquet.write(str(path), frame, write_index=False, **options)
    return options


WRITERS = {
    "pyarrow": write_by_pyarrow,
    "polars": write_by_polars,
    "duckdb": write_by_duckdb,
    "fastparquet": write_by_fastparquet,
}


def numbered(seed, number):
    return random.Random(f"{seed} {number}")
