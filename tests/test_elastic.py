"""`ElasticIterator`: another number of processes continues, and no element is lost or repeated."""

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import effort
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from under_test import INLINE, IS_GRAIN, experimental, grain

MapDataset, IterDataset = grain.MapDataset, grain.IterDataset
READ = {"read_options": INLINE}


def shard(index, count):
    return grain.sharding.ShardOptions(shard_index=index, shard_count=count)


def elastic(dataset, size, index, count, **options):
    return experimental.ElasticIterator(dataset, size, shard(index, count), **options)


def plain(element):
    """An element with lists in place of arrays."""
    if isinstance(element, dict):
        return {key: plain(value) for key, value in element.items()}
    if isinstance(element, tuple | list):
        return [plain(value) for value in element]
    return np.asarray(element).tolist()


def elements(iterator, count=None):
    """The next `count` elements as plain values, or all of them."""
    return [plain(element) for element in itertools.islice(iterator, count)]


def all_of(dataset, size, index, count, **options):
    return elements(elastic(dataset, size, index, count, **options))


# --- a `MapDataset`: the position is one number --------------------------------------------------

TABLE = [
    (10, 4, 1, [[[0, 1, 2, 3], [4, 5, 6, 7]]]),
    (10, 4, 2, [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
    (10, 4, 4, [[[0], [4], [8]], [[1], [5], [9]], [[2], [6]], [[3], [7]]]),
    (10, 6, 3, [[[0, 3], [6, 9]], [[1, 4]], [[2, 5]]]),
    (3, 4, 1, [[]]),
    (0, 2, 2, [[], []]),
]


@pytest.mark.parametrize("options", [{}, READ])
@pytest.mark.parametrize(("length", "size", "count", "expected"), TABLE)
def test_processes_share_global_batches(length, size, count, expected, options):
    dataset = MapDataset.range(length)
    assert [all_of(dataset, size, k, count, **options) for k in range(count)] == expected


def test_batches_cross_epochs_of_repeat():
    dataset = MapDataset.range(5).repeat(2)
    assert [all_of(dataset, 4, k, 2) for k in range(2)] == [[[0, 2], [4, 1]], [[1, 3], [0, 2]]]
    endless = elastic(MapDataset.range(5).repeat(), 4, 1, 2)
    assert elements(endless, 3) == [[1, 3], [0, 2], [4, 1]]
    endless.close()


def test_any_state_continues_under_another_size_and_count():
    iterator = elastic(MapDataset.range(20), 4, 1, 2)
    assert iterator.get_state() == {"global_next_index": 0}
    assert elements(iterator, 2) == [[1, 3], [5, 7]]
    state = iterator.get_state()
    assert state == {"global_next_index": 8}
    other = elastic(MapDataset.range(20), 6, 1, 3)
    other.set_state(json.loads(json.dumps(state)))
    assert elements(other, 1) == [[9, 12]]
    assert other.get_state() == {"global_next_index": 14}
    assert elements(other, 1) == [[15, 18]]
    assert other.get_state() == {"global_next_index": 20}
    assert elements(other) == []
    assert other.get_state() == {"global_next_index": 20}


@pytest.mark.parametrize(
    ("position", "expected"),
    [(3, [[3, 4], [5, 6]]), (8, []), (99, []), (-4, [[4, 5], [6, 7]])],
)
def test_any_position_can_be_restored(position, expected):
    iterator = elastic(MapDataset.range(8), 2, 0, 1)
    next(iterator)
    iterator.set_state({"global_next_index": position})
    assert elements(iterator) == expected


def test_state_without_position_is_refused():
    with pytest.raises((ValueError, KeyError), match="global_next_index"):
        elastic(MapDataset.range(8), 2, 0, 1).set_state({})


def test_elements_do_not_depend_on_the_number_of_processes():
    dataset = MapDataset.range(24).seed(5).shuffle()
    dataset = dataset.random_map(lambda x, rng: (x, int(rng.integers(1000))))
    whole, even, odd = all_of(dataset, 8, 0, 1), all_of(dataset, 8, 0, 2), all_of(dataset, 8, 1, 2)
    assert len(whole) == len(even) == len(odd) == 3
    for step in range(3):
        for leaf in range(2):
            assert whole[step][leaf][::2] == even[step][leaf]
            assert whole[step][leaf][1::2] == odd[step][leaf]


@pytest.mark.parametrize(
    "dataset",
    [
        MapDataset.range(24).batch(2),
        MapDataset.mix([MapDataset.range(20), MapDataset.range(100, 120)], [1, 2]),
        experimental.ZipMapDataset([MapDataset.range(20), MapDataset.range(20).shuffle(1)]),
        MapDataset.concatenate([MapDataset.range(7), MapDataset.range(50, 60)]).shuffle(2),
    ],
)
def test_random_access_stages_upstream(dataset):
    for count in (1, 2, 4):
        for index in range(count):
            expected = dataset[index::count].batch(4 // count, drop_remainder=True)
            assert all_of(dataset, 4, index, count) == elements(iter(expected))


@pytest.mark.parametrize("size", [5, 1])
def test_size_must_be_a_multiple_of_the_count(size):
    iterator = elastic(MapDataset.range(8), size, 0, 2)
    assert iterator.get_state() == {"global_next_index": 0}
    text = f"Global batch size {size} is not divisible by shard count 2."
    with pytest.raises(ValueError, match=text):
        next(iterator)


@pytest.mark.parametrize("size", [0, -2])
def test_size_must_be_positive(size):
    iterator = elastic(MapDataset.range(8), size, 0, 2)
    with pytest.raises(ValueError, match=r"batch_size must be positive\."):
        next(iterator)


def test_worker_processes_change_neither_elements_nor_states():
    if IS_GRAIN:
        from absl import flags  # noqa: PLC0415

        flags.FLAGS(sys.argv[:1])
    options = grain.MultiprocessingOptions(num_workers=2)
    iterator = elastic(MapDataset.range(20), 4, 0, 2, multiprocessing_options=options)
    assert elements(iterator, 2) == [[0, 2], [4, 6]]
    assert iterator.get_state() == {"global_next_index": 8}
    assert elements(iterator) == [[8, 10], [12, 14], [16, 18]]
    iterator.close()


def test_it_is_a_dataset_whose_position_others_share():
    iterator = elastic(MapDataset.range(12), 4, 0, 2)
    assert isinstance(iterator, IterDataset)
    mapped = iter(iterator.map(lambda batch: batch * 10))
    assert next(mapped).tolist() == [0, 20]
    assert mapped.get_state() == iterator.get_state() == {"global_next_index": 4}
    assert next(iterator).tolist() == [4, 6]
    assert iterator.parents == ()


def test_checkpoints_of_it_are_exact():
    iterator = elastic(MapDataset.range(20), 4, 1, 2)
    states, batches = [iterator.get_state()], []
    for batch in iterator:
        batches.append(batch.tolist())
        states.append(iterator.get_state())
    for done, state in enumerate(states):
        iterator.set_state(state)
        assert elements(iterator) == batches[done:]


def test_it_cannot_be_split_among_threads():
    with pytest.raises(ValueError, match=r"Cannot slice `IterDataset` source\. .*ElasticIterator"):
        list(experimental.multithread_prefetch(elastic(MapDataset.range(8), 2, 0, 1), 2, 1))


@pytest.mark.parametrize("by_index", [True, False])
@pytest.mark.parametrize("restored", [True, False])
def test_closing_an_iterator_derived_from_it_keeps_it_open(by_index, restored):
    parts = [grain.MapDataset.range(10 * k, 10 * k + 4) for k in range(3)]
    if by_index:
        dataset = grain.MapDataset.concatenate(parts)
    else:
        parts = [part.to_iter_dataset(INLINE) for part in parts]
        dataset = experimental.InterleaveIterDataset(parts, cycle_length=2)
    expected = all_of(dataset, 2, 0, 1)
    iterator = elastic(dataset, 2, 0, 1)
    found = []
    while len(found) < len(expected):
        with iter(iterator.map(lambda x: x)) as derived:
            found.append(plain(next(derived)))
        if restored:
            iterator.set_state(iterator.get_state())
    assert found == expected


def test_close_ends_it():
    iterator = elastic(MapDataset.range(100), 2, 0, 1)
    next(iterator)
    iterator.close()
    iterator.close()
    with pytest.raises(ValueError, match="Trying to advance a closed iterator"):
        next(iterator)
    assert iterator.get_state() == {"global_next_index": 2}


# --- other datasets: shards with states of their own ---------------------------------------------

if not IS_GRAIN:  # Grain 0.2.18 takes a `MapDataset` without filters only

    def interleaved(count=5, cycle_length=2, length=3):
        parts = [MapDataset.range(10 * k, 10 * k + length).to_iter_dataset() for k in range(count)]
        return experimental.InterleaveIterDataset(parts, cycle_length=cycle_length)

    @pytest.mark.parametrize(
        ("size", "index", "count", "expected"),
        [
            (0, 0, 1, [0, 10, 1, 11, 2, 12, 20, 30, 21, 31, 22, 32, 40, 41, 42]),
            (0, 0, 2, [0, 20, 1, 21, 2, 22, 40, 41, 42]),
            (0, 1, 2, [10, 30, 11, 31, 12, 32]),
            (-1, 1, 2, [10, 30, 11, 31, 12, 32]),
            (4, 0, 2, [[0, 20], [1, 21], [2, 22], [40, 41], [42]]),
            (0, 2, 3, [20, 21, 22]),
        ],
    )
    def test_processes_share_the_datasets_of_an_interleave(size, index, count, expected):
        assert all_of(interleaved(), size, index, count) == expected

    @pytest.mark.parametrize("size", [0, 8])
    def test_a_mixture_has_as_many_shards_as_the_shortest_interleave_has_datasets(size):
        mixture = grain.IterDataset.mix([interleaved(4), interleaved(6)])
        shards = elastic(mixture, size, 0, 1).get_shard_states()
        assert len(shards) == 4

    def test_states_of_an_interleave():
        iterator = elastic(interleaved(), 0, 0, 2)
        assert elements(iterator, 7) == [0, 20, 1, 21, 2, 22, 40]
        assert iterator.get_state() == {
            "next_index_in_cycle": 1,
            "next_index_in_datasets": 3,
            "iterators_in_use_indices": [2, 1],
            "iterators_in_use_states": [{"next_index": 1}, {"next_index": 3}],
            "exhausted": [0, 1],
            "future_states": {},
        }
        assert iterator.get_shard_states() == {
            0: {"exhausted": 1, "state": {"next_index": 0}},
            2: {"exhausted": 1, "state": {"next_index": 3}},
            4: {"exhausted": 0, "state": {"next_index": 1}},
        }
        restored = elastic(interleaved(), 0, 0, 2)
        restored.set_state(iterator.get_state())
        assert elements(restored) == elements(iterator) == [41, 42]

    def after_steps(dataset, size, steps):
        """Iterators of as many processes as there are numbers of steps, and what they returned."""
        iterators = [elastic(dataset, size, k, len(steps)) for k in range(len(steps))]
        return iterators, [elements(it, n) for it, n in zip(iterators, steps, strict=True)]

    def all_shards(iterators):
        """The states of all shards, through JSON, as from files of all processes."""
        states = {}
        for iterator in iterators:
            states |= iterator.get_shard_states()
        return json.loads(json.dumps(states))

    def test_more_and_fewer_processes_continue_an_interleave():
        iterators, found = after_steps(interleaved(), 0, [2, 1])
        assert found == [[0, 20], [10]]
        states = all_shards(iterators)
        assert states["3"] == {"exhausted": 0, "state": {"next_index": 0}}
        three = [elastic(interleaved(), 0, k, 3) for k in range(3)]
        for iterator in three:
            iterator.set_shard_states(states)
        assert [elements(it) for it in three] == [
            [1, 30, 2, 31, 32],
            [11, 40, 12, 41, 42],
            [21, 22],
        ]
        one = elastic(interleaved(), 0, 0, 1)
        one.set_shard_states(states)
        assert one.get_state() == {
            "next_index_in_cycle": 0,
            "next_index_in_datasets": 2,
            "iterators_in_use_indices": [0, 1],
            "iterators_in_use_states": [{"next_index": 1}, {"next_index": 1}],
            "exhausted": [0, 0],
            "future_states": {
                "2": {"next_index": 1},
                "3": {"next_index": 0},
                "4": {"next_index": 0},
            },
        }
        assert elements(one) == [1, 11, 2, 12, 21, 30, 22, 31, 32, 40, 41, 42]

    def test_uneven_progress():
        iterators, _ = after_steps(interleaved(), 0, [9, 0])
        one = elastic(interleaved(), 0, 0, 1)
        one.set_shard_states(all_shards(iterators))
        assert elements(one) == [10, 30, 11, 31, 12, 32]

    def test_own_shards_or_all_shards_are_taken():
        iterators, _ = after_steps(interleaved(), 0, [2, 1])
        own = iterators[1].get_shard_states()
        restored = elastic(interleaved(), 0, 1, 2)
        restored.set_shard_states(own)
        again = elastic(interleaved(), 0, 1, 2)
        again.set_shard_states(all_shards(iterators))
        assert (
            restored.get_state()
            == again.get_state()
            == iterators[1].get_state()
            | {
                "next_index_in_cycle": 0,
                "future_states": {},
            }
        )

    def test_finished_shard_after_the_running_ones_is_not_read_again():
        iterators, found = after_steps(interleaved(count=6), 0, [1, 99])
        one = elastic(interleaved(count=6), 0, 0, 1)
        one.set_shard_states(all_shards(iterators))
        rest = elements(one)
        assert sorted(found[0] + found[1] + rest) == [
            10 * k + i for k in range(6) for i in range(3)
        ]

    def test_finished_shards_stay_finished():
        iterators, _ = after_steps(interleaved(), 0, [99, 99])
        for count in (1, 2, 3):
            for index in range(count):
                iterator = elastic(interleaved(), 0, index, count)
                iterator.set_shard_states(all_shards(iterators))
                assert elements(iterator) == []
                assert elements(iterator) == []

    @pytest.mark.parametrize(
        "states",
        [
            {},
            {0: {"exhausted": 0, "state": {"next_index": 0}}},
            {k: {"exhausted": 0, "state": {"next_index": 0}} for k in range(4)},
            {k: {"exhausted": 0, "state": {"next_index": 0}} for k in range(6)},
            {k: {"exhausted": 0, "state": {"next_index": 0}} for k in (1, 3)},
        ],
    )
    def test_missing_and_unknown_shards_are_refused(states):
        iterator = elastic(interleaved(), 0, 0, 2)
        next(iterator)
        before = iterator.get_state()
        with pytest.raises(ValueError, match="shard states"):
            iterator.set_shard_states(states)
        assert iterator.get_state() == before

    def test_shard_state_that_does_not_fit_is_refused():
        iterator = elastic(interleaved(count=1), 0, 0, 1)
        with pytest.raises(IndexError, match="out of range"):
            iterator.set_shard_states({0: {"exhausted": 0, "state": {"next_index": 77}}})
        assert elements(iterator) == [0, 1, 2]

    def test_map_dataset_has_no_shard_states():
        iterator = elastic(MapDataset.range(4), 2, 0, 1)
        text = "_shard_states is only supported for IterDataset-based ElasticIterator."
        with pytest.raises(NotImplementedError, match=f"^get{text}"):
            iterator.get_shard_states()
        with pytest.raises(NotImplementedError, match=f"^set{text}"):
            iterator.set_shard_states({})

    def test_process_without_a_dataset_is_an_error():
        iterator = elastic(interleaved(), 0, 5, 7)
        with pytest.raises(IndexError, match="5 shards"):
            next(iterator)

    def test_worker_processes_of_a_sequential_dataset_are_refused():
        options = grain.MultiprocessingOptions(num_workers=0)
        text = "ElasticIterator does not support multiprocess prefetching for IterDataset."
        with pytest.raises(NotImplementedError, match=text):
            elastic(interleaved(), 4, 0, 1, multiprocessing_options=options)

    def test_source_that_cannot_be_split_is_refused():
        class Source(IterDataset):
            def __iter__(self):
                return iter(MapDataset.range(3).to_iter_dataset())

        with pytest.raises(ValueError, match="Cannot slice `IterDataset` source"):
            elastic(Source(), 2, 0, 1)

    def test_size_of_a_sequential_dataset_must_be_a_multiple_of_the_count():
        with pytest.raises(ValueError, match=r"Global batch size 5 is not divisible by shard cou"):
            next(elastic(interleaved(), 5, 0, 2))

    def test_shards_of_workers():
        def workers(share):
            return share(interleaved(count=6))

        for share in (
            lambda ds: experimental.multithread_prefetch(ds, 2, 1),
            lambda ds: ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)),
        ):
            assert all_of(workers(share), 0, 1, 2) == [10, 30, 11, 31, 12, 32, 50, 51, 52]
            iterators, found = after_steps(workers(share), 0, [3, 5])
            one = elastic(workers(share), 0, 0, 1)
            one.set_shard_states(all_shards(iterators))
            rest = elements(one)
            expected = [10 * k + i for k in range(6) for i in range(3)]
            assert sorted(found[0] + found[1] + rest) == expected
            one.close()
            for iterator in iterators:
                iterator.close()
            with pytest.raises(IndexError, match="2 shards"):
                next(elastic(workers(share), 0, 2, 3))

    # --- any pipeline, any topology --------------------------------------------------------------

    class Twice(experimental.FlatMapTransform):
        max_fan_out = 2

        def flat_map(self, element):
            return [element, element + 1000]

    def numbers(length=40):
        return MapDataset.range(length).seed(9).shuffle().to_iter_dataset(INLINE)

    def with_noise(x, rng):
        return x + int(rng.integers(1, 100)) * 10_000

    def sequences():
        records = [{"x": np.full(1 + (7 * i) % 5, i + 1)} for i in range(40)]
        return MapDataset.source(records).to_iter_dataset(INLINE)

    def tokens(row):
        """The tokens of a packed row, without padding."""
        return [int(x) for x in row["x"] if x]

    def as_tokens(dataset):
        return dataset.map(tokens)

    PIPELINES = {
        "filter": lambda: MapDataset.range(40).shuffle(1).filter(lambda x: x % 3),
        "flat map": lambda: experimental.FlatMapMapDataset(MapDataset.range(15), Twice()),
        "iter filter": lambda: numbers().filter(lambda x: x % 3),
        "random map": lambda: numbers().random_map(with_noise, seed=4),
        "limit": lambda: experimental.LimitIterDataset(numbers(), 4),
        "window": lambda: experimental.WindowShuffleIterDataset(numbers(), window_size=4, seed=1),
        "repeat": lambda: experimental.RepeatIterDataset(numbers(12), 2),
        "flat": lambda: experimental.FlatMapIterDataset(numbers(14), Twice()),
        "mix": lambda: IterDataset.mix([numbers(24), numbers(48).map(lambda x: x + 100)], [1, 2]),
        "zip": lambda: experimental.ZipIterDataset([numbers(), numbers().map(lambda x: -x)]),
        "first fit": lambda: as_tokens(
            experimental.FirstFitPackIterDataset(
                sequences(), length_struct={"x": 6}, num_packing_bins=2
            )
        ),
        "best fit": lambda: as_tokens(
            experimental.BestFitPackIterDataset(
                sequences(), length_struct={"x": 6}, num_packing_bins=2
            )
        ),
        "concat": lambda: as_tokens(
            experimental.ConcatThenSplitIterDataset(sequences(), length_struct={"x": 6})
        ),
        "interleave": interleaved,
        "interleave, noise": lambda: interleaved().random_map(with_noise, seed=4),
        "interleave, limit": lambda: experimental.LimitIterDataset(interleaved(), 2),
        "interleave, window": lambda: experimental.WindowShuffleIterDataset(
            interleaved(length=9), window_size=4, seed=2
        ),
        "interleave, repeat": lambda: experimental.RepeatIterDataset(interleaved(), 2),
        "interleave, prefetch": lambda: experimental.ThreadPrefetchIterDataset(
            interleaved(), prefetch_buffer_size=3
        ).map(lambda x: x + 1),
        "interleave, numbered": lambda: interleaved().map_with_index(lambda i, x: x + 1000 * i),
        "interleave, filter": lambda: interleaved(length=8).filter(lambda x: x % 3),
        "mix of interleaves": lambda: IterDataset.mix([interleaved(4), interleaved(6)]),
        "threads": lambda: experimental.multithread_prefetch(
            numbers().filter(lambda x: x % 3), 4, 2
        ),
    }

    def hash_of(element):
        return hash(json.dumps(plain(element))) % 2**62

    def flat(batches):
        return [row for batch in batches for row in (batch if isinstance(batch, list) else [batch])]

    @pytest.mark.parametrize("name", PIPELINES)
    @settings(max_examples=effort.cases(3, 200))
    @given(data=st.data())
    def test_no_element_is_lost_or_repeated(name, data):
        """Several numbers of processes in turn, each from the states of the one before."""
        dataset = PIPELINES[name]().map(hash_of)
        size = data.draw(st.sampled_from([0, 4, 8]), label="size")
        whole = sorted(flat(all_of(dataset, size, 0, 1)))
        states, seen, iterators = None, [], []
        for _ in range(data.draw(st.integers(1, 3), label="restarts")):
            count = data.draw(st.sampled_from([1, 2, 4]), label="processes")
            iterators = [elastic(dataset, size, k, count) for k in range(count)]
            for iterator in iterators:
                if states is not None:
                    iterator.set_shard_states(states)
                steps = data.draw(st.integers(0, 8 if size == 0 else 3), label="steps")
                seen += flat(elements(iterator, steps))
            states = all_shards(iterators)
        for iterator in iterators:
            seen += flat(elements(iterator))
        assert sorted(seen) == whole

    ROWS = [name for name in PIPELINES if "interleave" not in name and name != "threads"]

    @pytest.mark.parametrize("name", ROWS)
    def test_global_batches_do_not_depend_on_the_number_of_processes(name):
        dataset = PIPELINES[name]().map(hash_of)
        whole = all_of(dataset, 4, 0, 1)
        for count in (2, 4):
            parts = [all_of(dataset, 4, k, count) for k in range(count)]
            steps = 2 if name != "limit" else 4
            for step in range(steps):
                joined = [[] for _ in range(4)]
                for index, batches in enumerate(parts):
                    joined[index::count] = batches[step]
                assert joined == whole[step], (count, step)

    def test_rows_of_a_filter_that_drops_nothing_are_those_of_plain_reading():
        dataset = MapDataset.range(24).shuffle(3)
        for count in (1, 2, 4):
            for index in range(count):
                kept = all_of(dataset.filter(lambda _: True), 4, index, count)
                assert kept == all_of(dataset, 4, index, count)

    def test_each_process_computes_only_its_own_elements():
        calls = []
        dataset = MapDataset.range(40).filter(lambda x: calls.append(x) or x % 4 < 3)
        all_of(dataset, 4, 1, 2, **READ)
        assert sorted(calls) == list(range(1, 40, 2))

    def test_state_of_rows_of_another_process_is_refused():
        state = elastic(numbers(), 4, 0, 2).get_state()
        assert json.loads(json.dumps(state)) == state
        elastic(numbers(), 4, 0, 2).set_state(state)
        for index, count in ((1, 2), (0, 1), (0, 4)):
            with pytest.raises(ValueError, match=r"`shard_(index|count)` must be"):
                elastic(numbers(), 4, index, count).set_state(state)

    @pytest.mark.parametrize("name", PIPELINES)
    def test_state_of_one_process_continues_exactly(name):
        dataset = PIPELINES[name]().map(hash_of)
        iterator = elastic(dataset, 4, 1, 2)
        states, found = [iterator.get_state()], []
        for batch in iterator:
            found.append(plain(batch))
            states.append(json.loads(json.dumps(iterator.get_state())))
        for done, state in enumerate(states):
            restored = elastic(dataset, 4, 1, 2)
            restored.set_state(state)
            assert elements(restored) == found[done:], done
            restored.close()

    def test_datasets_that_repeat_without_end_all_have_a_turn():
        dataset = experimental.RepeatIterDataset(interleaved())
        iterator = elastic(dataset, 0, 0, 1)
        assert elements(iterator, 15) == [10 * k + i for i in range(3) for k in range(5)]
        states = iterator.get_shard_states()
        assert elements(iterator, 3) == [0, 10, 20]
        other = elastic(dataset, 0, 1, 2)
        other.set_shard_states(states)
        assert elements(other, 7) == [10, 30, 11, 31, 12, 32, 10]

    def test_options_upstream_reach_the_shards():
        options = experimental.DatasetOptions(filter_raise_threshold_ratio=0.9)
        parts = [MapDataset.range(3000).to_iter_dataset()] * 2
        dataset = experimental.InterleaveIterDataset(parts, cycle_length=2).filter(lambda _: False)
        dataset = experimental.WithOptionsIterDataset(dataset, options)
        with pytest.raises(ValueError, match=r"skipped 100\.00 %"):
            next(elastic(dataset, 2, 0, 1))

    def test_it_is_its_own_iterator():
        iterator = elastic(interleaved(), 0, 0, 2)
        assert isinstance(iterator, grain.DatasetIterator)
        assert iter(iterator) is iterator
        assert iterator.shard_options == shard(0, 2)
        assert next(iterator.base_iterator) == 0
        assert next(iterator) == 20

    def test_closing_another_thread_wakes_the_one_that_waits():
        release = threading.Event()
        iterator = elastic(interleaved().map(lambda x: release.wait(60) or x), 0, 0, 1)
        closer = threading.Timer(0.2, lambda: (iterator.close(), release.set()))
        closer.start()
        with pytest.raises(ValueError, match="closed"):
            list(iterator)
        closer.join()

    def test_prefetching_starts_before_the_first_element():
        started = threading.Event()
        dataset = MapDataset.range(8).map(lambda x: started.set() or x)
        iterator = elastic(dataset, 2, 0, 1)
        iterator.start_prefetch()
        assert started.wait(60)
        iterator.close()

    def test_fresh_processes_continue(tmp_path):
        """Two processes, then three, then one, each a new interpreter."""
        whole = sorted(flat(all_of(PIPELINES["first fit"]().map(sum), 6, 0, 1)))
        seen = []
        for count, steps in ((2, 1), (3, 1), (1, 99)):
            found = [run_process(tmp_path, count, index, steps) for index in range(count)]
            states = {}
            for rows, its_states in found:
                seen += rows
                states |= its_states
            (tmp_path / "states.json").write_text(json.dumps(states))
        assert sorted(seen) == whole

    def run_process(directory, count, index, steps):
        code = f"""
import json, sys
sys.path[:0] = {sys.path!r}
import test_elastic as test
states = test.Path({str(directory / "states.json")!r})
it = test.elastic(test.PIPELINES["first fit"]().map(sum), 6, {index}, {count})
if states.exists():
    it.set_shard_states(json.loads(states.read_text()))
rows = test.flat(test.elements(it, {steps}))
print(json.dumps([rows, it.get_shard_states()]))
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            cwd=Path(__file__).parent,
        )
        return json.loads(done.stdout)

    # --- users' own shards -----------------------------------------------------------------------

    class Files(IterDataset):
        """Files that are read one after another, each of which is a shard."""

        def __init__(self, files):
            super().__init__()
            self.files = files

        def set_slice(self, sl, sequential_slice=False):  # noqa: FBT002 - the protocol
            assert not sequential_slice
            self.files = self.files[sl]

        def __iter__(self):
            return FilesIterator(self.files)

    class FilesIterator(grain.DatasetIterator):
        def __init__(self, files):
            super().__init__()
            self.files = files
            self.counts = [0] * len(files)

        def __next__(self):
            for number, (file, count) in enumerate(zip(self.files, self.counts, strict=True)):
                if count < len(file):
                    self.counts[number] += 1
                    return file[count]
            raise StopIteration

        def get_state(self):
            return {"counts": list(self.counts)}

        def set_state(self, state):
            self.counts = list(state["counts"])

        def get_shard_states(self):
            pairs = zip(self.files, self.counts, strict=True)
            return [{"exhausted": int(n == len(f)), "state": {"count": n}} for f, n in pairs]

        def set_shard_states(self, states):
            self.counts = [shard["state"]["count"] for shard in states]

    FILES = ["abc", "de", "fghi", "j", "klm"]

    def test_own_dataset_with_states_by_shard():
        dataset = Files(FILES).map(str.upper)
        assert all_of(dataset, 0, 1, 2) == list("DEJ")
        iterators, found = after_steps(dataset, 0, [4, 1])
        assert found == [list("ABCF"), ["D"]]
        states = all_shards(iterators)
        assert states["2"] == {"exhausted": 0, "state": {"count": 1}}
        rest = []
        for index in range(3):
            iterator = elastic(dataset, 0, index, 3)
            iterator.set_shard_states(states)
            own = iterator.get_shard_states()
            assert sorted(own) == [k for k in range(5) if k % 3 == index]
            again = elastic(dataset, 0, index, 3)
            again.set_shard_states(own)
            rest.append(elements(again))
        assert rest == [["J"], list("EKLM"), list("GHI")]

    def test_own_shards_are_batched_and_checked():
        dataset = Files(FILES).filter(lambda x: x != "b")
        iterator = elastic(dataset, 4, 0, 2)
        assert elements(iterator, 2) == [["a", "c"], ["f", "g"]]
        states = iterator.get_shard_states()
        for wrong in ({}, {0: states[0]}, {**states, 6: states[4]}, {1: states[0], 3: states[0]}):
            with pytest.raises(ValueError, match="shard states"):
                iterator.set_shard_states(wrong)
        assert elements(iterator) == [["h", "i"], ["k", "l"], ["m"]]
        iterator.set_shard_states(states)
        assert elements(iterator) == [["h", "i"], ["k", "l"], ["m"]]

    def test_own_dataset_without_states_by_shard_is_split_into_rows():
        class Rows(Files):
            def __iter__(self):
                return MapDataset.source("".join(self.files) or []).__iter__()

        dataset = Rows(FILES)
        whole = sorted(flat(all_of(dataset, 4, 0, 1)))
        iterators, found = after_steps(dataset, 4, [1, 2])
        one = elastic(dataset, 4, 0, 1)
        one.set_shard_states(all_shards(iterators))
        assert sorted(flat(found[0]) + flat(found[1]) + flat(elements(one))) == whole
        assert whole == sorted("".join(FILES))

    # --- threads and worker processes of rows ----------------------------------------------------

    @pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 8])
    def test_worker_processes_of_a_filter_change_neither_elements_nor_states(num_workers):
        dataset = MapDataset.range(120).shuffle(1).filter(lambda x: x % 3)
        options = grain.MultiprocessingOptions(num_workers=num_workers)
        plainly = elastic(dataset, 12, 1, 2)
        found = elastic(dataset, 12, 1, 2, multiprocessing_options=options)
        assert elements(found, 2) == elements(plainly, 2)
        assert found.get_shard_states() == plainly.get_shard_states()
        restored = elastic(dataset, 12, 1, 2, multiprocessing_options=options)
        restored.set_shard_states(json.loads(json.dumps(plainly.get_shard_states())))
        rest = sorted(flat(elements(plainly)))
        assert sorted(flat(elements(found))) == sorted(flat(elements(restored))) == rest
        found.close()
        restored.close()

    def test_workers_of_read_options_run_rows():
        options = grain.ReadOptions(num_workers=2)
        dataset = MapDataset.range(120).shuffle(1).map(lambda x: [x, os.getpid()])
        dataset = dataset.filter(lambda x: x[0] % 3)
        iterator = elastic(dataset, 12, 0, 1, read_options=options)
        numbers, processes = next(iterator)
        expected = elastic(dataset, 12, 0, 1, **READ)
        assert numbers.tolist() == next(expected)[0].tolist()
        assert len(set(processes.tolist())) == 2
        assert os.getpid() not in processes
        iterator.close()

    def test_threads_are_bounded_by_the_options():
        before = threading.active_count()
        dataset = MapDataset.range(4000).map(lambda x: x).filter(lambda x: x % 2)
        options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=64)
        iterator = elastic(dataset, 256, 0, 1, read_options=options)
        assert len(elements(iterator, 3)) == 3
        assert threading.active_count() - before <= 4
        iterator.close()

    @pytest.mark.parametrize("options", [{}, READ])
    @pytest.mark.parametrize("size", [2, 7, 34])
    def test_options_change_neither_rows_nor_states(options, size):
        dataset = MapDataset.range(150).filter(lambda x: x % 5)
        usual = grain.ReadOptions(num_threads=3, prefetch_buffer_size=5)
        one = elastic(dataset, size, 0, 1, read_options=usual)
        other = elastic(dataset, size, 0, 1, **options)
        assert elements(one, 3) == elements(other, 3)
        assert one.get_shard_states() == other.get_shard_states()
        assert sorted(flat(elements(one))) == sorted(flat(elements(other)))
