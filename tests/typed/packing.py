"""Sequences packed into rows of one length."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import grainmill as grain
from grainmill import experimental

Rows = dict[str, NDArray[Any]]


def main() -> None:
    sequences = grain.MapDataset.range(1, 9).map(
        lambda n: {"tokens": np.full(n, n, np.int32), "id": np.full(1, n, np.int32)}
    )
    lengths = {"tokens": 8, "id": 8}
    first = experimental.FirstFitPackIterDataset(
        sequences.to_iter_dataset(), length_struct=lengths, num_packing_bins=2, seed=1
    )
    assert_type(first.map(lambda row: row), grain.IterDataset[Rows])
    best = experimental.BestFitPackIterDataset(
        sequences.to_iter_dataset(),
        length_struct=lengths,
        num_packing_bins=2,
        meta_features=["id"],
        max_sequences_per_bin=8,
    )
    batches = best.batch(2, drop_remainder=True)
    assert_type(batches, grain.IterDataset[Rows])
    for batch in batches:
        assert_type(batch["tokens_segment_ids"], NDArray[Any])
    split = experimental.ConcatThenSplitIterDataset(
        sequences.to_iter_dataset(),
        length_struct=lengths,
        bos_handling=experimental.BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS,
        bos_features=["tokens"],
        bos_token_id=0,
    )
    assert_type(split.batch(2), grain.IterDataset[Rows])
    assert_type(experimental.RebatchIterDataset(batches, 3), experimental.RebatchIterDataset[Rows])
    operation: experimental.PackAndBatchOperation[Rows] = experimental.PackAndBatchOperation(
        length_struct=lengths, batch_size=2
    )
    loader = grain.DataLoader(
        data_source=sequences,
        sampler=grain.samplers.SequentialSampler(8, grain.sharding.NoSharding()),
        operations=[operation],
    )
    for values, segment_ids, positions in loader:
        assert values["tokens"].shape == segment_ids["tokens"].shape == positions["tokens"].shape


if __name__ == "__main__":
    main()
