"""Records of files, decoded, shuffled and batched."""

import json
from collections.abc import Sequence
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import grainmill as grain
from grainmill.array_record import ArrayRecordReader, ArrayRecordWriter

Tokens = dict[str, NDArray[np.int32]]


def write(path: str) -> None:
    with ArrayRecordWriter(path, "group_size:1") as writer:
        for n in range(20):
            writer.write(json.dumps({"tokens": list(range(n % 3 + 1))}).encode())


def decode(record: bytes) -> Tokens:
    return {"tokens": np.asarray(json.loads(record)["tokens"], np.int32)}


def first_tokens(example: Tokens) -> np.int32:
    first: np.int32 = example["tokens"][0]
    return first


def long_only(example: Tokens) -> Tokens | None:
    return example if len(example["tokens"]) > 1 else None


def pad(examples: Sequence[Tokens]) -> NDArray[np.int32]:
    rows = np.zeros((len(examples), 3), np.int32)
    for row, example in zip(rows, examples, strict=True):
        row[: len(example["tokens"])] = example["tokens"]
    return rows


def jitter(example: Tokens, rng: np.random.Generator) -> tuple[NDArray[np.int32], float]:
    return example["tokens"], rng.random()


def widest(batches: grain.MapDataset[Tokens], *, width: int) -> grain.MapDataset[Tokens]:
    return batches.filter(lambda batch: batch["tokens"].shape[1] <= width)


def main() -> None:
    write("a.array_record")
    with ArrayRecordReader("a.array_record") as reader:
        assert_type(reader[0], bytes)
        assert_type(reader[0:2], list[bytes])

    source = grain.sources.ArrayRecordDataSource(["a.array_record"])
    assert_type(source[0], bytes)
    ds = grain.MapDataset.source(source)
    assert_type(ds, grain.MapDataset[bytes])
    assert_type(ds[0], bytes | None)
    assert_type(ds[2:4], grain.MapDataset[bytes])
    assert_type(ds.map(json.loads), grain.MapDataset[Any])

    examples = ds.map(decode).shuffle(seed=3).seed(1)
    assert_type(examples, grain.MapDataset[Tokens])
    assert_type(examples.map(first_tokens), grain.MapDataset[np.int32])
    assert_type(examples.map(first_tokens).batch(4), grain.MapDataset[NDArray[Any]])
    # Elements that a function makes `None` of are dropped.
    assert_type(examples.map(long_only), grain.MapDataset[Tokens])
    assert_type(examples.map(long_only).to_iter_dataset(), grain.IterDataset[Tokens])
    with_nones = examples.map(long_only).to_iter_dataset(allow_nones=True)
    assert_type(with_nones, grain.IterDataset[Tokens | None])

    padded = examples.batch(5, batch_fn=pad)
    assert_type(padded, grain.MapDataset[NDArray[np.int32]])
    assert_type(padded.batch(2), grain.MapDataset[NDArray[np.int32]])
    for batch in padded:
        assert_type(batch, NDArray[np.int32])

    pairs = examples.random_map(jitter, seed=1)
    assert_type(pairs, grain.MapDataset[tuple[NDArray[np.int32], float]])
    assert_type(
        pairs.filter(lambda pair: len(pair[0]) == 2).to_iter_dataset().batch(2),
        grain.IterDataset[tuple[NDArray[Any], NDArray[Any]]],
    )
    numbered = examples.map_with_index(lambda index, example: (index, len(example["tokens"])))
    assert_type(numbered, grain.MapDataset[tuple[int, int]])
    assert_type(numbered.batch(2), grain.MapDataset[tuple[NDArray[Any], NDArray[Any]]])

    ones = examples.filter(lambda example: np.all(example["tokens"] >= 0)).slice([0, 3, 6])
    same = ones.map(lambda example: {"tokens": example["tokens"][:1]})
    batches = same.to_iter_dataset(grain.ReadOptions(num_threads=2)).batch(2, drop_remainder=True)
    assert_type(batches, grain.IterDataset[Tokens])
    with iter(batches) as iterator:
        assert_type(iterator, grain.DatasetIterator[Tokens])
        assert_type(next(iterator), Tokens)
    assert_type(padded.pipe(len), int)
    assert_type(widest(examples.slice(slice(0, 1)).batch(1), width=3), grain.MapDataset[Tokens])
    assert_type(
        examples.slice(slice(0, 1)).batch(1).pipe(widest, width=3), grain.MapDataset[Tokens]
    )


if __name__ == "__main__":
    main()
