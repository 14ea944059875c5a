"""Random files of several writers of Parquet, by each entrance, beside pyarrow and Grain."""

import importlib.util
import json

import grain as real_grain
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from effort import SEED, cases
from parquet_tables import WRITERS, numbered, plain, rows_of, same_value

from grainmill._tools.main import main
from grainmill.experimental import ParquetIterDataset
from grainmill.files import as_json
from grainmill.sources import ParquetDataSource

# So that files of other writers are few where these are many.
NUM_FILES = {
    "pyarrow": cases(60, 3_000),
    "polars": cases(15, 1_500),
    "duckdb": cases(15, 1_500),
    "fastparquet": cases(15, 1_500),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_rows_are_those_of_pyarrow_by_each_entrance(tmp_path, writer, capsys):
    if importlib.util.find_spec(writer) is None:
        pytest.skip(f"{writer} is not installed")
    for number in range(SEED, SEED + NUM_FILES[writer]):
        rng = numbered(writer, number)
        num_rows = rng.choice([0, 1, 7, 120])
        path = tmp_path / f"{number}.parquet"
        options = WRITERS[writer](path, rng, num_rows)
        try:
            check(path, rng, capsys)
        except (Exception, pytest.fail.Exception) as failure:
            failure.add_note(f"file {number} of {writer}: {options}, {pq.read_schema(path)}")
            raise
        path.unlink()


def check(path, rng, capsys):
    try:
        table = pq.read_table(path)
    except (OSError, pa.lib.ArrowException):
        # pyarrow writes lists in tiny pages, and DuckDB differences of more than 32 bits, that only
        # itself can read, if at all.
        return
    expected = rows_of(table)
    count = len(expected)
    source = ParquetDataSource(path, cache_bytes=rng.choice([0, 3000, 1 << 29]))
    assert len(source) == count
    rows = source.__getitems__(range(count))
    assert [plain(row) for row in rows] == expected
    index = [rng.randrange(count) for _ in range(min(count, 20))]
    assert [plain(row) for row in source.__getitems__(index)] == [expected[at] for at in index]
    for at in index[:2]:
        assert plain(source[at]) == expected[at]
    check_sequential(path, table)
    # What the commands read.
    assert main(["verify", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["files"]
    assert (found["records"], found["problems"]) == (count, [])
    lines = path.with_suffix(".jsonl")
    assert main(["convert", "--quiet", "--force", str(path), str(lines)]) == 0
    capsys.readouterr()
    found = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    assert found == [json.loads(json.dumps(as_json(row))) for row in rows]
    lines.unlink()


def check_sequential(path, table):
    """Compares with Grain, unless it refuses a file or has other values for it."""
    ours = list(ParquetIterDataset(str(path)))
    is_odd = [pa.types.is_dictionary(one.type) and one.null_count > 0 for one in table.columns]
    if not table.num_rows or any(is_odd):
        assert len(ours) == table.num_rows
        return
    theirs = list(real_grain.experimental.ParquetIterDataset(str(path)))
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in b:
            assert same_value(a[name], b[name]), (number, name, a[name], b[name])
