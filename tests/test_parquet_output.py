"""Parquet files that `grainmill convert` writes: columns, types, and records that do not fit."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from grainmill import GrainmillError
from grainmill._files import parquet_output, tf_example
from grainmill._files.parquet_output import ParquetOutput
from grainmill._tools.console import ExitCode
from grainmill._tools.main import main
from grainmill.array_record import ArrayRecordWriter
from grainmill.sources import ParquetDataSource


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(records, options="", schema=None):
    """The table of a file of these records, `out.parquet`."""
    Path("out.parquet").unlink(missing_ok=True)
    output = ParquetOutput("out.parquet", "out.parquet", options, schema)
    try:
        output.copy_list(records)
        output.close()
    finally:
        output.abort()
    return pq.read_table("out.parquet")


def lines(*rows):
    return [json.dumps(row).encode() for row in rows]


def test_fields_become_columns():
    rows = [
        {"n": 1, "x": 1, "s": "a", "l": [1, 2], "d": {"k": True}},
        {"x": 2.5, "s": None, "l": [], "d": None, "late": "b"},
    ]
    table = written(lines(*rows))
    kinds = ["int64", "double", "string", "list<element: int64>", "struct<k: bool>", "string"]
    assert [str(kind) for kind in table.schema.types] == kinds
    assert table.to_pylist() == [
        rows[0] | {"late": None},
        {"n": None, "x": 2.5, "s": None, "l": [], "d": None, "late": "b"},
    ]


def test_features_become_columns():
    examples = [
        {"n": [1], "l": [1, 2], "b": [b"\xff"], "f": [0.5], "e": {"float_list": []}},
        {"n": [2], "l": [], "b": [b"y"]},
    ]
    table = written([tf_example.encode(example) for example in examples])
    assert dict(zip(table.schema.names, map(str, table.schema.types), strict=True)) == {
        "n": "int64",
        "l": "list<element: int64>",
        "b": "binary",
        "f": "float",
        "e": "list<element: float>",
    }
    assert table.to_pylist() == [
        {"b": b"\xff", "e": [], "f": 0.5, "l": [1, 2], "n": 1},
        {"b": b"y", "e": None, "f": None, "l": [], "n": 2},
    ]


KINDS = {
    "bytes_list": st.binary(max_size=9) | st.text(max_size=9).map(str.encode),
    "float_list": st.floats(width=32, allow_nan=False),
    "int64_list": st.integers(-(1 << 63), (1 << 63) - 1),
}
# Each feature has one kind in all examples of a data set.
FEATURES = st.dictionaries(st.text(max_size=4), st.sampled_from(list(KINDS)), min_size=1)


@given(FEATURES, st.data())
@settings(max_examples=cases(60, 3_000))
def test_examples_come_back_from_columns_and_json_with_their_kinds(features, data):
    examples = [
        {name: {kind: data.draw(st.lists(KINDS[kind], max_size=3))} for name, kind in drawn.items()}
        for drawn in data.draw(
            st.lists(
                st.lists(st.sampled_from(sorted(features)), min_size=1, unique=True).map(
                    lambda names: {name: features[name] for name in names}
                ),
                min_size=1,
                max_size=5,
            )
        )
    ]
    records = list(map(tf_example.encode, examples))
    for record, example in zip(records, examples, strict=True):
        shown = json.loads(json.dumps(tf_example.example_as_json(record)))
        assert tf_example.encode(shown) == record
        ((kind, values),) = next(iter(example.values())).items()
        name = next(iter(example))
        assert tf_example.decode_kinds(record)[name] == (list(KINDS).index(kind) + 1, values)
    written(records)
    types = {"bytes_list": pa.binary(), "float_list": pa.float32(), "int64_list": pa.int64()}
    for field in pq.read_schema("out.parquet"):
        kind = field.type.value_type if pa.types.is_list(field.type) else field.type
        assert kind == types[features[field.name]]
    rows = ParquetDataSource("out.parquet")
    for row, record in zip(rows, records, strict=True):
        present = {name: value for name, value in row.items() if value is not None}
        assert tf_example.encode(present) == record


def test_numbers_that_no_float_of_an_example_holds_are_named():
    with pytest.raises(ValueError, match="`x`: a number is too large for 32 bits"):
        tf_example.encode({"x": [1e300]})
    with pytest.raises(ValueError, match="`x`: a `int64_list` was expected, got float and int"):
        tf_example.encode({"x": {"int64_list": [1, 2.5]}})
    first = [tf_example.encode({"x": [0.5]}), tf_example.encode({"x": [(1 << 24) + 1]})]
    with pytest.raises(GrainmillError, match=r"record 1 does not fit .*`x` is 16777217, not float"):
        written(first)


@pytest.mark.parametrize("at", [0, 1, 17])
def test_half_a_surrogate_pair_is_named_where_it_is(at):
    rows = [{"t": "ok", "n": 1}] * 20
    records = lines(*rows)
    records[at] = b'{"t": "\\ud800", "n": 1}'
    with pytest.raises(
        GrainmillError, match=rf"record {at}: `t` is '\\ud800', which no column has"
    ):
        written(records)
    with pytest.raises(GrainmillError, match=rf"record {at} does not fit .*`t` is '\\ud800'"):
        written(records, schema="t:string,n:int8")


@pytest.mark.parametrize(
    "records",
    [[b"\x00\xff", b""], [b'{"a": 1}', b"no JSON"], [b"[1]"], [b"7", b"null"]],
)
def test_other_records_are_one_column(records):
    table = written(records)
    assert table.schema == pa.schema([("record", pa.binary())])
    assert table.column("record").to_pylist() == records


def test_records_stay_bytes_on_request():
    records = lines({"a": 1}, {"b": 2})
    assert written(records, "record,snappy").column("record").to_pylist() == records


def test_no_records_have_a_schema():
    assert written([]).schema.names == ["record"]
    assert str(written([], schema="a:int32, b:list<float>").schema.types[1]) == (
        "list<element: float>"
    )


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "n": st.integers(-(1 << 63), (1 << 63) - 1),
                "x": st.floats(allow_nan=False),
                "s": st.text(),
                "l": st.lists(st.integers(0, 9)),
            },
        ),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=cases(60, 3_000))
def test_values_are_those_of_the_records(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "out.parquet"
    output = ParquetOutput(str(path), "x", schema="n:int64,x:double,s:string,l:list<int64>")
    output.copy_list(lines(*rows))
    output.close()
    names = ["n", "x", "s", "l"]
    assert pq.read_table(path).to_pylist() == [
        {name: row.get(name) for name in names} for row in rows
    ]


FIRST = [{"n": 1, "x": 0.5, "s": "a", "l": [1], "d": {"k": 1}}] * 5000
MISFITS = [
    ({"n": 1.5}, "`n` is 1.5, not int64"),
    ({"n": "1"}, "`n` is '1', not int64"),
    ({"n": True}, "`n` is True, not int64"),
    ({"n": 1 << 63}, "`n` is 9223372036854775808, not int64"),
    ({"s": 1}, "`s` is 1, not string"),
    ({"l": ["a"]}, "`l` is ['a'], not list<"),
    ({"l": 3}, "`l` is 3, not list<"),
    ({"d": {"k": 1, "z": 2}}, "`d` is {'k': 1, 'z': 2}, not struct<k: int64>"),
    ({"other": 1}, "`other` is no column"),
]


@pytest.mark.parametrize(("row", "problem"), MISFITS)
def test_record_that_does_not_fit_is_named(row, problem):
    """Nothing is dropped, cut or turned into another type."""
    with pytest.raises(GrainmillError) as raised:
        written(lines(*FIRST, row, {"n": 2}))
    assert str(raised.value).startswith(
        f"out.parquet: record 5000 does not fit the schema: {problem}"
    )
    assert "it follows from the first 4096 records; `schema` states it" in str(raised.value)


@pytest.mark.parametrize("kind", ["float", "halffloat", "time32[s]"])
def test_values_that_a_stated_type_would_change(kind):
    value = "03:04:05" if kind == "time32[s]" else 1e300
    for row, of in (({"x": value}, "{}"), ({"x": [value]}, "list<{}>")):
        with pytest.raises(GrainmillError, match=r"record 1 does not fit .*: `x` is .*, not "):
            written(lines({"x": None}, row), schema=f"x:{of.format(kind)}")


def test_infinite_values_stay_infinite():
    rows = [{"x": float("inf"), "l": [0.5, float("-inf")]}, {"x": None, "l": None}]
    table = written(lines(*rows), schema="x:float,l:list<float>")
    assert table.to_pylist() == rows


def test_records_without_fields_are_refused():
    with pytest.raises(GrainmillError, match="the first 2 records have no fields"):
        written(lines({}, {}))
    assert written(lines({}, {}), schema="a:int8").num_rows == 2


def test_types_that_differ_in_the_first_records_are_named():
    with pytest.raises(GrainmillError, match="record 2: `a` has another type than before"):
        written(lines({"a": 1}, {"a": 2.5}, {"a": "x"}, {"a": []}))


def test_example_that_does_not_fit_is_named():
    first = [tf_example.encode({"n": [1]})] * 4096
    with pytest.raises(GrainmillError, match=r"record 4096 .*: `n` has 2 values, not one"):
        written([*first, tf_example.encode({"n": [1, 2]})])
    with pytest.raises(GrainmillError, match=r"record 4096 .*schema"):
        written([*first, b"no example"])


def test_stated_types_hold():
    schema = "n:int8,x:float,s:binary,t:timestamp[us, tz=UTC],l:list<uint16>"
    row = {"n": 1, "x": 1, "s": "a", "t": "2020-01-02T03:04:05Z", "l": [7]}
    table = written(lines(row), schema=schema)
    assert [str(kind) for kind in table.schema.types] == [
        "int8",
        "float",
        "binary",
        "timestamp[us, tz=UTC]",
        "list<element: uint16>",
    ]
    assert table.to_pylist()[0]["t"].isoformat() == "2020-01-02T03:04:05+00:00"
    with pytest.raises(GrainmillError, match="`n` is 300, not int8"):
        written(lines({"n": 300}), schema=schema)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--schema", "a"], "--schema must be `name:type,...`, got `a`"),
        (["--schema", "a:int65"], "there is no type `int65`"),
        (["--schema", "a:int8,a:int8"], "--schema names a column twice"),
        (["--options", "zst"], "unknown option `zst`, valid options: zstd:LEVEL"),
        (["--options", "row_group_bytes:0"], "`row_group_bytes:0` must have a positive number"),
        (["--options", "snappy:3"], "unknown option `snappy:3`"),
        (["--options", "gzip:99"], "levels of gzip are from 1 to 9, got 99"),
        (["--options", "zstd:99"], "levels of zstd are from 1 to 22, got 99"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(capsys, arguments, problem):
    Path("in.jsonl").write_text('{"a": 1}\n')
    assert main(["convert", "in.jsonl", "out.parquet", *arguments]) == ExitCode.USAGE
    assert problem in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_schema_is_of_parquet_only(capsys):
    Path("in.jsonl").write_text('{"a": 1}\n')
    assert main(["convert", "in.jsonl", "out.tfrecord", "--schema", "a:int8"]) == ExitCode.USAGE
    assert "--schema states the columns of Parquet files" in capsys.readouterr().err


def test_a_misfit_leaves_nothing(capsys):
    Path("in.jsonl").write_bytes(b"\n".join(lines(*FIRST, {"n": "x"})))
    assert main(["convert", "in.jsonl", "out.parquet"]) == ExitCode.DAMAGED
    assert "out.parquet: record 5000 does not fit" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("shuffle", [[], ["--shuffle"]])
def test_shards_have_one_schema(shuffle):
    rows = [{"a": None if n < 50 else 0.5, "b": n} for n in range(100)] + [{"b": 1, "c": [1]}]
    Path("in.jsonl").write_bytes(b"\n".join(lines(*rows)))
    assert main(["convert", "in.jsonl", "out@200.parquet", *shuffle]) == 0  # also empty ones
    paths = sorted(Path().glob("out-*.parquet"))
    schemas = {str(pq.read_schema(path)) for path in paths}
    assert len(paths) == 200
    assert len(schemas) == 1
    assert len(ParquetDataSource(list(map(str, paths)))) == 101


def test_row_groups_have_bounded_bytes():
    rows = lines(*({"s": base64.b64encode(bytes(900)).decode()} for _ in range(20_000)))
    written(rows, f"row_group_bytes:{4 << 20},uncompressed")
    meta = pq.ParquetFile("out.parquet").metadata
    sizes = [meta.row_group(at).num_rows for at in range(meta.num_row_groups)]
    assert len(sizes) > 3
    assert max(sizes) <= 4096 * 2
    assert sum(sizes) == 20_000


def test_rows_keep_their_types():
    table = pa.table(
        {
            "b": pa.array([b"\xff\x00", None]),
            "l": pa.array([[1.5], []], pa.list_(pa.float32())),
            "s": pa.array(["a", "b"]),
            "t": pa.array(np.array(["2020-01-01", "2021-01-01"], "datetime64[us]")),
            "u": pa.array([1, 2], pa.uint8()),
        }
    )
    pq.write_table(table, "in.parquet")
    assert main(["convert", "in.parquet", "out@2.parquet", "--options", "gzip:3"]) == 0
    paths = ["out-00000-of-00002.parquet", "out-00001-of-00002.parquet"]
    found = pa.concat_tables([pq.read_table(path) for path in paths])
    assert found.to_pylist() == table.to_pylist()
    assert [str(kind) for kind in found.schema.types] == [
        "binary",
        "list<element: float>",
        "string",
        "timestamp[us]",
        "uint8",
    ]


def test_memory_does_not_grow_with_the_file():
    with ArrayRecordWriter("in.array_record", "group_size:1,uncompressed") as writer:
        for number in range(192):
            writer.write(np.random.default_rng(number).bytes(1 << 20))
    code = (
        "import resource, sys\n"
        "from grainmill._tools.main import main\n"
        "import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert main(['convert', 'in.array_record', 'out.parquet', '--threads', '1',\n"
        "             '--options', 'row_group_bytes:16777216,uncompressed']) == 0\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout.split()[-1]) < 130 << 10
    assert len(ParquetDataSource("out.parquet")) == 192


def test_missing_package_is_named(monkeypatch, capsys):
    Path("in.jsonl").write_text('{"a": 1}\n')

    import_module = parquet_output.importlib.import_module

    def fails(name):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return import_module(name)

    monkeypatch.setattr(parquet_output.importlib, "import_module", fails)
    assert main(["convert", "in.jsonl", "out.parquet"]) == ExitCode.USAGE
    assert "`pip install 'grainmill[parquet]'`" in capsys.readouterr().err
