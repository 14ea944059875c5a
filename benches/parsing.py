"""CPU time of parsing records, beside the loops in Python that it replaces, in one process.

    python benches/parsing.py

Needs `protobuf`, `orjson` and `tokenizers`. Prints a table for `benches/record`: microseconds of
CPU per record, the median of alternating rounds.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson

import grainmill as grain
from grainmill.array_record import ArrayRecordWriter
from grainmill.transforms import Feature, JsonField, ParseExample, ParseJson

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracle_example import Example, bytes_list, example, float_list, int64_list

NUM = 500
ROUNDS = 15


def examples():
    """Messages with four features, one of them 512 token ids."""
    rng = np.random.default_rng(0)
    return [
        example(
            id=bytes_list([b"doc%d" % number]),
            label=int64_list([number]),
            tokens=int64_list(rng.integers(0, 50_000, 512).tolist()),
            weight=float_list([number / 2]),
        )
        for number in range(NUM)
    ]


FEATURES = {"id": bytes, "label": "int64", "tokens": Feature("int64", (512,)), "weight": "float32"}


def by_protobuf(records):
    found = []
    for record in records:
        features = Example.FromString(record).features.feature
        found.append(
            {
                "id": features["id"].bytes_list.value[0],
                "label": np.int64(features["label"].int64_list.value[0]),
                "tokens": np.array(features["tokens"].int64_list.value, np.int64),
                "weight": np.float32(features["weight"].float_list.value[0]),
            }
        )
    return found


def texts():
    """JSON objects of ten fields and about 1 KiB."""
    return [
        json.dumps(
            {
                "id": number,
                "text": "word " * 70,
                "url": "https://example.org/" + "a" * 60,
                "title": "t" * 80,
                "lang": "en",
                "score": number * 0.37,
                "tags": ["a", "b", "c"],
                "meta": {"a": 1, "b": [1, 2, 3], "note": "x" * 190},
                "date": "2026-11-23",
                "body": "b" * 150,
            }
        ).encode()
        for number in range(NUM)
    ]


FIELDS = {"text": str, "id": "int64", "score": JsonField("float32")}


def by_orjson(records):
    found = []
    for record in records:
        fields = orjson.loads(record)
        found.append(
            {
                "text": fields["text"],
                "id": np.int64(fields["id"]),
                "score": np.float32(fields["score"]),
            }
        )
    return found


def cases():
    """(name, records, function) of each line."""
    records, objects = examples(), texts()
    parse, parse_json = ParseExample(FEATURES), ParseJson(FIELDS)
    dtypes = {"label": np.int64, "tokens": np.int64, "weight": np.float32}
    shapes = {"tokens": (512,)}
    rows = {name: np.empty((NUM, *shapes.get(name, ())), dtype) for name, dtype in dtypes.items()}
    numbers = ParseExample({name: FEATURES[name] for name in rows})
    folder = tempfile.mkdtemp()
    with ArrayRecordWriter(f"{folder}/records", "group_size:1,uncompressed") as writer:
        for record in records:
            writer.write(record)
    source = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(f"{folder}/records"))
    raw, batched = source.shuffle(seed=1), source.shuffle(seed=1).map(parse).batch(100)
    return [
        ("Example, 4 features: protobuf loop", records, by_protobuf),
        ("Example, 4 features: ParseExample", records, parse.map_block),
        ("Example, 4 features: one by one", records, lambda all_: list(map(parse.map, all_))),
        (
            "Example, 3 features: into the rows of a batch",
            records,
            lambda all_: numbers._fill_rows(all_, list(rows.items()), 0),
        ),
        ("records read, shuffled", None, lambda _: list(raw)),
        ("records read, shuffled, parsed, batched", None, lambda _: list(batched)),
        ("JSON, 3 of 10 fields: orjson loop", objects, by_orjson),
        ("JSON, 3 of 10 fields: ParseJson", objects, parse_json.map_block),
    ]


def main(all_cases):
    times = {}
    for _ in range(ROUNDS):
        for name, records, function in all_cases:
            started_s = time.process_time()
            function(records)
            times.setdefault(name, []).append((time.process_time() - started_s) / NUM * 1e6)
    print("| case | us CPU per record |")
    print("| --- | --- |")
    for name, all_us in times.items():
        print(f"| {name} | {statistics.median(all_us):.2f} |")


if __name__ == "__main__":
    main(cases())
