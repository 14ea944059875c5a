"""Elements of every kind of source, and what stacking makes of them."""

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypedDict, assert_type

import numpy as np
from numpy.typing import NDArray

import grainmill as grain


class Words:
    """A source of a user's own."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, record_key: SupportsIndex) -> str:
        return "abc"[record_key]


class Row(TypedDict):
    """An element whose keys have types of their own."""

    name: str
    size: int


def keyed(source: grain.sources.RandomAccessDataSource[str]) -> grain.MapDataset[str]:
    return grain.MapDataset.source(source)


def maybe(elements: Sequence[int | None]) -> grain.MapDataset[int]:
    return grain.MapDataset.source(elements)


def anything(element: int) -> Any:
    return {"n": [element]}


def of_anything(element: int) -> dict[str, Any]:
    return {"n": {"m": element}}


def nested(element: int) -> tuple[Any, int]:
    return {"n": element}, element


def row(element: int) -> Row:
    return {"name": "x", "size": element}


def main() -> None:
    source = grain.MapDataset.source
    assert_type(source([1, 2, 3]), grain.MapDataset[int])
    assert_type(source((1.5, 2.5)), grain.MapDataset[float])
    assert_type(source(range(3)), grain.MapDataset[int])
    assert_type(source("abc"), grain.MapDataset[str])
    assert_type(source(Words()), grain.MapDataset[str])
    assert_type(keyed(Words()), grain.MapDataset[str])
    files: grain.sources.RandomAccessDataSource[int] = grain.sources.RangeDataSource(0, 6, 2)
    assert_type(grain.MapDataset.source(files), grain.MapDataset[int])
    assert_type(maybe([1, None, 3]), grain.MapDataset[int])
    assert_type(source([{"n": 1}, {"n": 2}]), grain.MapDataset[dict[str, int]])
    assert_type(source(np.zeros((3, 2))), grain.MapDataset[Any])
    assert_type(source(grain.sources.RangeDataSource(0, 6, 2)), grain.MapDataset[int])
    shared = grain.sources.SharedMemoryDataSource([1, 2, 3])
    assert_type(source(shared), grain.MapDataset[int])
    shared.close()
    shared.unlink()
    numbers = grain.MapDataset.range(4)
    assert_type(numbers, grain.MapDataset[int])
    assert_type(source(numbers), grain.MapDataset[int])

    assert_type(numbers.batch(2), grain.MapDataset[NDArray[Any]])
    assert_type(numbers.map(float).batch(2), grain.MapDataset[NDArray[Any]])
    assert_type(numbers.map(str).batch(2), grain.MapDataset[NDArray[Any]])
    assert_type(numbers.map(np.float32).batch(2), grain.MapDataset[NDArray[Any]])
    assert_type(numbers.batch(2).batch(2), grain.MapDataset[NDArray[Any]])
    assert_type(numbers.batch(2, batch_fn=sum), grain.MapDataset[int])
    assert_type(source([{"n": 1}, {"n": 2}]).batch(2), grain.MapDataset[dict[str, NDArray[Any]]])
    assert_type(
        numbers.map(lambda n: {"n": np.full(2, n, np.uint8)}).to_iter_dataset().batch(2),
        grain.IterDataset[dict[str, NDArray[np.uint8]]],
    )
    assert_type(
        numbers.map(lambda n: (np.full(2, n, np.uint8), np.float32(n))).batch(2),
        grain.MapDataset[tuple[NDArray[Any], NDArray[Any]]],
    )
    assert_type(
        numbers.map(lambda n: (np.full(2, n, np.uint8), np.ones(n + 1, np.float32))).batch(1),
        grain.MapDataset[tuple[NDArray[np.uint8], NDArray[np.float32]]],
    )
    # Nothing is known of what `Any` stands for, so nothing is claimed of its batches.
    assert_type(numbers.map(anything).batch(2), grain.MapDataset[Any])
    assert_type(numbers.map(of_anything).batch(2), grain.MapDataset[dict[str, Any]])
    assert_type(numbers.map(nested).batch(2), grain.MapDataset[tuple[Any, Any]])
    assert_type(numbers.map(row).batch(2), grain.MapDataset[Any])
    assert_type(numbers.to_iter_dataset().map(anything).batch(2), grain.IterDataset[Any])


if __name__ == "__main__":
    main()
