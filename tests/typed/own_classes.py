"""Transforms, datasets and iterators of a user's own."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, assert_type, overload

import numpy as np
from numpy.typing import NDArray

import grainmill as grain
from grainmill import transforms

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Tokenize(transforms.Map):
    """A map from texts."""

    length: int

    def map(self, element: str) -> NDArray[np.int32]:
        return np.resize(np.frombuffer(element.encode(), np.uint8), self.length).astype(np.int32)


class Untyped(transforms.Map):
    """A map that says nothing of its types."""

    def map(self, element: Any) -> Any:
        return element


class Noise(transforms.RandomMap):
    """A random map."""

    def random_map(self, element: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int32]:
        return element + rng.integers(2, dtype=np.int32)


class Number(transforms.MapWithIndex):
    """A map with the index."""

    def map_with_index(self, index: int, element: str) -> tuple[int, str]:
        return index, element


class Long(transforms.Filter):
    """A filter of texts."""

    def filter(self, element: str) -> bool:
        return len(element) > 1


class Letters(grain.experimental.FlatMapTransform):
    """A text becomes its letters."""

    max_fan_out = 3

    def flat_map(self, element: str) -> Sequence[str]:
        return list(element)


class Evens(grain.MapDataset[T]):
    """Every second element."""

    def __init__(self, parent: grain.MapDataset[T]) -> None:
        super().__init__(parent)

    def __len__(self) -> int:
        return (len(self._parent) + 1) // 2

    @overload
    def __getitem__(self, index: slice) -> grain.MapDataset[T]: ...
    @overload
    def __getitem__(self, index: int) -> T | None: ...
    def __getitem__(self, index: slice | int) -> grain.MapDataset[T] | T | None:
        if isinstance(index, slice):
            return self.slice(index)
        element: T | None = self._parent[2 * index]
        return element


class Lengths(grain.MapDataset[int]):
    """The shorter way to write it."""

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: slice | int) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        text: str | None = self._parent[index]
        return None if text is None else len(text)


class Counted(grain.IterDataset[tuple[int, str]]):
    """Elements with their number."""

    def __init__(self, parent: grain.IterDataset[str]) -> None:
        super().__init__(parent)

    def __iter__(self) -> grain.DatasetIterator[tuple[int, str]]:
        return CountedIterator(self._parent.__iter__())


class CountedIterator(grain.DatasetIterator[tuple[int, str]]):
    """Counts, and keeps the count in its state."""

    def __init__(self, parent: grain.DatasetIterator[str]) -> None:
        super().__init__(parent)
        self._count = 0

    def __next__(self) -> tuple[int, str]:
        element: str = next(self._parent)
        self._count += 1
        return self._count, element

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._parent.get_state(), "count": self._count}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._count = state["count"]


def applied(
    ds: grain.MapDataset[str], given: Sequence[transforms.Transformation]
) -> grain.MapDataset[Any]:
    result: grain.MapDataset[Any] = ds
    for transform in given:
        result = result.apply(transform)
    return result


def main() -> None:
    texts = grain.MapDataset.source(["abc", "de", "f", "ghi"])
    assert_type(texts, grain.MapDataset[str])
    assert_type(texts.map(Tokenize(4)), grain.MapDataset[NDArray[np.int32]])
    assert_type(texts.map(Tokenize(4)).batch(2), grain.MapDataset[NDArray[np.int32]])
    assert_type(texts.map(Untyped()), grain.MapDataset[Any])
    noisy = texts.map(Tokenize(4)).random_map(Noise(), seed=1)
    assert_type(noisy, grain.MapDataset[NDArray[np.int32]])
    assert_type(texts.map_with_index(Number()), grain.MapDataset[tuple[int, str]])
    assert_type(texts.filter(Long()), grain.MapDataset[str])
    assert_type(texts.apply(Tokenize(4)), grain.MapDataset[NDArray[np.int32]])
    assert_type(texts.apply(Long()), grain.MapDataset[str])
    assert_type(texts.apply(Number()), grain.MapDataset[tuple[int, str]])
    assert_type(texts.apply(Letters()), grain.MapDataset[str])
    assert_type(texts.apply(transforms.Batch(2)), grain.MapDataset[Any])
    assert_type(texts.apply([Long(), Tokenize(4)]), grain.MapDataset[Any])
    assert_type(applied(texts, [Long(), Tokenize(4)]), grain.MapDataset[Any])
    assert_type(grain.experimental.apply_transformations(texts, [Long()]), grain.MapDataset[Any])
    assert_type(
        grain.experimental.FlatMapMapDataset(texts, Letters()),
        grain.experimental.FlatMapMapDataset[str],
    )

    stream = texts.to_iter_dataset()
    assert_type(stream.map(Tokenize(4)), grain.IterDataset[NDArray[np.int32]])
    assert_type(stream.map_with_index(Number()), grain.IterDataset[tuple[int, str]])
    assert_type(
        stream.map(Tokenize(4)).random_map(Noise(), seed=1), grain.IterDataset[NDArray[np.int32]]
    )
    assert_type(stream.filter(Long()), grain.IterDataset[str])
    assert_type(stream.apply(Tokenize(4)), grain.IterDataset[NDArray[np.int32]])
    assert_type(
        grain.experimental.FlatMapIterDataset(stream, Letters()),
        grain.experimental.FlatMapIterDataset[str],
    )

    assert_type(Evens(texts), Evens[str])
    assert_type(Evens(texts)[1], str | None)
    assert_type(Evens(texts)[:1], grain.MapDataset[str])
    assert_type(Evens(texts).map(len), grain.MapDataset[int])
    assert_type(Lengths(texts).batch(2), grain.MapDataset[NDArray[Any]])
    counted = Counted(stream)
    assert_type(counted.map(lambda pair: pair[1]), grain.IterDataset[str])
    for pair in counted:
        assert_type(pair, tuple[int, str])
    grain.experimental.assert_equal_output_after_checkpoint(counted)


if __name__ == "__main__":
    main()
