"""Several datasets in one."""

from typing import Any, assert_type

from numpy.typing import NDArray

import grainmill as grain
from grainmill import experimental


class Alternate(grain.transforms.DatasetSelectionMap):
    """One element of each of two datasets in turn."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index % 2, index // 2


def main() -> None:
    numbers = grain.MapDataset.range(6)
    texts = numbers.map(str)

    mixed = grain.MapDataset.mix([numbers, numbers.shuffle(seed=1)], weights=[0.25, 0.75])
    assert_type(mixed, grain.MapDataset[int])
    either: list[grain.MapDataset[int | str]] = [numbers, texts]
    assert_type(grain.MapDataset.mix(either), grain.MapDataset[int | str])
    assert_type(grain.MapDataset.concatenate([numbers, numbers]), grain.MapDataset[int])
    assert_type(
        grain.MapDataset.select_from_datasets([numbers, numbers], Alternate()),
        grain.MapDataset[int],
    )

    streams = [numbers.to_iter_dataset(), numbers.to_iter_dataset()]
    assert_type(grain.IterDataset.mix(streams, [1, 2]), grain.IterDataset[int])
    named = {"a": texts.to_iter_dataset(), "b": texts.to_iter_dataset()}
    assert_type(grain.IterDataset.mix(named, {"a": 1, "b": 2}), grain.IterDataset[str])

    assert_type(
        experimental.ZipMapDataset((numbers, texts)), experimental.ZipMapDataset[tuple[int, str]]
    )
    pairs = experimental.ZipMapDataset((numbers, texts)).map(lambda pair: pair[1])
    assert_type(pairs, grain.MapDataset[str])
    assert_type(
        experimental.ZipMapDataset((numbers, texts)).batch(2),
        grain.MapDataset[tuple[NDArray[Any], NDArray[Any]]],
    )
    assert_type(
        experimental.ZipMapDataset([numbers, texts]),
        experimental.ZipMapDataset[tuple[Any, ...]],
    )
    assert_type(
        experimental.ZipIterDataset((streams[0], named["a"], streams[1]), strict=False),
        experimental.ZipIterDataset[tuple[int, str, int]],
    )
    assert_type(experimental.ZipIterDataset(streams), experimental.ZipIterDataset[tuple[Any, ...]])

    assert_type(
        experimental.InterleaveIterDataset([numbers, numbers], cycle_length=2),
        experimental.InterleaveIterDataset[int],
    )
    files = numbers.map(lambda n: grain.MapDataset.range(n + 1).map(str).to_iter_dataset())
    assert_type(
        experimental.InterleaveIterDataset(files, cycle_length=2),
        experimental.InterleaveIterDataset[str],
    )


if __name__ == "__main__":
    main()
