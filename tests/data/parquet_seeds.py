"""Writes the small files of `tests/data/parquet`, which the fuzzer of Parquet files starts from."""

import datetime
import decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).parent / "parquet"


def main() -> None:
    """Writes them."""
    flat = pa.table(
        {
            "i": pa.array([*range(30), None], pa.int32()),
            "s": [f"text {k % 5}" for k in range(31)],
            "b": [k % 3 == 0 for k in range(31)],
            "d": [decimal.Decimal(k) for k in range(31)],
            "t": [datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)] * 31,
        }
    )
    nested = pa.table(
        {
            "l": [list(range(k % 4)) for k in range(20)],
            "st": [{"x": k, "y": [str(k)]} if k % 5 else None for k in range(20)],
            "m": pa.array([[("a", k)] for k in range(20)], pa.map_(pa.string(), pa.int64())),
        }
    )
    options = {"row_group_size": 12, "data_page_size": 40, "write_batch_size": 4}
    for codec in ("none", "snappy", "gzip", "zstd", "lz4", "brotli"):
        path = FOLDER / f"flat_{codec}.parquet"
        pq.write_table(flat, path, compression=codec, **options)
    pq.write_table(flat, FOLDER / "flat_index.parquet", write_page_index=True, **options)
    for version in ("1.0", "2.0"):
        path = FOLDER / f"nested_{version[0]}.parquet"
        pq.write_table(
            nested, path, data_page_version=version, write_page_index=version == "2.0", **options
        )
    times = pa.array([*range(0, 10**15, 10**14), None], pa.timestamp("us"))
    lists = pa.array([[time, time] for time in times.to_pylist()], pa.list_(times.type))
    pq.write_table(
        pa.table({"t": times, "l": lists}),
        FOLDER / "int96.parquet",
        use_deprecated_int96_timestamps=True,
        use_dictionary=["t"],
        store_schema=False,
        **options,
    )
    encodings = {"i": "DELTA_BINARY_PACKED", "s": "DELTA_BYTE_ARRAY"}
    pq.write_table(
        flat.select(["i", "s"]),
        FOLDER / "delta.parquet",
        use_dictionary=False,
        column_encoding=encodings,
        data_page_version="2.0",
        **options,
    )


if __name__ == "__main__":
    main()
