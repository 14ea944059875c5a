"""Sequential stages return exact elements, order and states however they are pulled from."""

import itertools

import numpy as np
import pytest
from driven import Driven, bare
from stage_harness import Boom, ListStage, check_stage, drain, plain, source

from grainmill._iterators.flat_map import FlatMap, FlatMapStage
from grainmill._iterators.interleave import Interleave, InterleaveStage
from grainmill._iterators.mix import Mix, MixStage
from grainmill._iterators.thread_prefetch import ThreadPrefetch, ThreadPrefetchStage
from grainmill._plan import transforms
from grainmill._stages.cache import Cache, CacheStage
from grainmill._stages.limit import Limit, LimitStage
from grainmill._stages.rebatch import Rebatch, RebatchStage
from grainmill._stages.repeat import Repeat, RepeatStage
from grainmill._stages.window_shuffle import WindowShuffle, WindowShuffleStage
from grainmill._stages.zip import Zip, ZipStage


class Copies(transforms.FlatMap):
    """As many copies of a number as its remainder modulo 3."""

    max_fan_out = 3

    def flat_map(self, element):
        return [element] * (element % 3)


def zipped(stages, *, strict=True):
    return Driven(ZipStage(Zip((), strict), *map(bare, stages)))


def mixed(stages, proportions, names=None):
    parents = [bare(stage) for stage in stages]
    return Driven(MixStage(Mix((), proportions, names), *parents))


def repeated(stage, num_epochs):
    return Driven(RepeatStage(Repeat((), num_epochs), bare(stage)))


def cached(stage):
    return Driven(CacheStage(Cache(()), bare(stage)))


def limited(stage, count):
    return Driven(LimitStage(Limit((), count), bare(stage)))


def flat_mapped(stage, transform=None):
    return Driven(FlatMapStage(FlatMap((), transform or Copies()), bare(stage)))


def window_shuffled(stage, window_size, seed=1):
    return Driven(WindowShuffleStage(WindowShuffle((), window_size, seed), bare(stage)))


def rebatched(stage, batch_size, *, drop_remainder=False):
    return Driven(RebatchStage(Rebatch((), batch_size, drop_remainder), bare(stage)))


def prefetched(stage, size=3):
    return Driven(ThreadPrefetchStage(ThreadPrefetch((), size), bare(stage)))


def interleaved(open_dataset, num_datasets, cycle_length, ahead=1):
    node = Interleave((), (), cycle_length, 1, ahead, 1)
    return Driven(InterleaveStage(node, lambda index: bare(open_dataset(index)), num_datasets))


def interleaved_ranges(make, lengths, cycle_length):
    return interleaved(
        lambda i: make(range(10 * i, 10 * i + lengths[i])), len(lengths), cycle_length
    )


def arrays(total, size):
    return [np.arange(at, min(at + size, total)) for at in range(0, total, size)]


STAGES = {
    "limit": (lambda s: limited(s(range(9)), 5), [0, 1, 2, 3, 4]),
    "limit_beyond_the_end": (lambda s: limited(s(range(2)), 5), [0, 1]),
    "zip": (lambda s: zipped([s(range(3)), s("abc")]), [(0, "a"), (1, "b"), (2, "c")]),
    "zip_to_the_shortest": (
        lambda s: zipped([s(range(7)), s("abc"), s(range(5))], strict=False),
        [(0, "a", 0), (1, "b", 1), (2, "c", 2)],
    ),
    "repeat": (lambda s: repeated(s(range(3)), 3), [0, 1, 2] * 3),
    "repeat_of_nothing": (lambda s: repeated(s([]), None), []),
    "cache": (lambda s: cached(s(range(4))), [0, 1, 2, 3]),
    "mix": (lambda s: mixed([s(range(2)), s(range(10, 15))], (100, 200)), [0, 10, 11, 1, 12, 13]),
    "mix_by_name": (
        lambda s: mixed([s(range(3)), s(range(10, 15))], (1, 1), ("a", "b")),
        [0, 10, 1, 11, 2, 12],
    ),
    "mix_of_repeat": (
        lambda s: mixed([repeated(s(range(2)), 2), s(range(10, 19))], (1, 1)),
        [0, 10, 1, 11, 0, 12, 1, 13],
    ),
    "flat_map": (lambda s: flat_mapped(s(range(7))), [1, 2, 2, 4, 5, 5]),
    "window_shuffle": (lambda s: window_shuffled(s(range(7)), 3), [0, 2, 1, 4, 5, 3, 6]),
    "window_shuffle_of_repeat": (
        lambda s: window_shuffled(repeated(s(range(2)), 2), 3),
        [0, 0, 1, 1],
    ),
    "rebatch_smaller": (lambda s: rebatched(s(arrays(8, 4)), 2), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "rebatch_larger": (
        lambda s: rebatched(s(arrays(9, 2)), 4),
        [[0, 1, 2, 3], [4, 5, 6, 7], [8]],
    ),
    "rebatch_drop_remainder": (
        lambda s: rebatched(s(arrays(9, 3)), 4, drop_remainder=True),
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    "thread_prefetch": (lambda s: prefetched(s(range(9))), list(range(9))),
    "thread_prefetch_inline": (lambda s: prefetched(s(range(5)), 0), list(range(5))),
    "thread_prefetch_of_repeat": (lambda s: prefetched(repeated(s(range(2)), 2), 1), [0, 1, 0, 1]),
    "interleave": (
        lambda s: interleaved_ranges(s, [1, 3, 0, 2, 1], 2),
        [0, 10, 11, 12, 30, 31, 40],
    ),
    "interleave_of_empties": (lambda s: interleaved_ranges(s, [0, 0, 3], 2), [20, 21, 22]),
    "interleave_of_one": (lambda s: interleaved_ranges(s, [3], 2), [0, 1, 2]),
    "interleave_of_none": (lambda s: interleaved_ranges(s, [], 2), []),
    "interleave_many_rounds": (
        lambda s: interleaved_ranges(s, [5, 2, 4], 3),
        [0, 10, 20, 1, 11, 21, 2, 22, 3, 23, 4],
    ),
    "chain": (
        lambda s: limited(flat_mapped(window_shuffled(repeated(s(range(5)), None), 4)), 13),
        None,
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_stage_keeps_contract(name):
    make, expected = STAGES[name]
    if expected is None:
        expected, _ = drain(make(source))
        assert len(expected) == 13
    check_stage(make, expected, same_states=name != "cache")


def test_repeated_cache_keeps_contract():
    # Once all is in memory, a state of the first epoch continues as that of a filled cache.
    check_stage(lambda s: repeated(cached(s(range(3))), 3), [0, 1, 2] * 3, same_states=False)


# The states below were captured from Grain 0.2.18.


def states_of(stage, count):
    states = [stage.state()]
    for _ in range(count):
        stage.pull(1)
        states.append(stage.state())
    return states


def test_repeat_counts_the_last_epoch_at_its_end():
    states = states_of(repeated(source(range(2)), 2), 5)
    assert [s["epoch"] for s in states] == [0, 0, 0, 1, 1, 2]
    assert [s["parent"]["next_index"] for s in states] == [0, 1, 2, 1, 2, 2]


def test_cache_is_read_once():
    parent = source(range(2))
    states = [s["parent"] for s in states_of(repeated(cached(parent), 3), 7)]
    assert parent.pulled == 2
    assert [s["parent"]["next_index"] for s in states] == [0, 1, 2, 0, 0, 0, 0, 0]
    assert [s["position"] for s in states] == [0, 1, 2, 1, 2, 1, 2, 2]
    assert [s["cache_filled"] for s in states] == [False] * 3 + [True] * 5


@pytest.mark.parametrize("k", range(6))
def test_restored_cache_is_read_once_more(k):
    states = states_of(repeated(cached(source(range(2))), 3), 6)
    parent = source(range(2))
    stage = repeated(cached(parent), 3)
    stage.restore(states[k])
    assert states_of(stage, 6 - k) == states[k:]
    assert parent.pulled == 2


def test_mix_counts_the_turn_that_ended_it():
    states = states_of(mixed([source(range(2)), source(range(5))], (100, 200)), 8)
    assert [s["index"] for s in states] == [0, 1, 2, 3, 4, 5, 6, 7, 7]
    assert [s["stop"] for s in states] == [False] * 7 + [True] * 2
    assert states[6]["parents"] == [{"next_index": 2}, {"next_index": 4}]


def test_flat_map_state_is_before_the_element_being_split():
    states = states_of(flat_mapped(source(range(6))), 7)
    assert [s["parent"]["next_index"] for s in states] == [0, 1, 2, 2, 4, 5, 5, 6]
    assert [s["next_index_in_buffer"] for s in states] == [0, 1, 1, 2, 1, 1, 2, 2]


def test_window_shuffle_state_is_at_the_start_of_the_window():
    states = states_of(window_shuffled(source(range(7)), 3), 8)
    assert [s["parent_window_start_state"]["next_index"] for s in states] == [
        *(0, 0, 0, 0, 3, 3, 3, 6, 6)
    ]
    assert [s["window_index"] for s in states] == [0, 0, 0, 1, 1, 1, 2, 3, 3]
    assert [s["pos_in_window"] for s in states] == [0, 1, 2, 3, 1, 2, 3, 1, 1]


def test_rebatch_state_is_before_the_current_batch():
    states = states_of(rebatched(source(arrays(9, 3)), 4), 4)
    assert states == [
        {"parent": {"next_index": 0}, "batch_idx": 0},
        {"parent": {"next_index": 1}, "batch_idx": 1},
        {"parent": {"next_index": 2}, "batch_idx": 2},
        {"parent": {"next_index": 3}, "batch_idx": 3},
        {"parent": {"next_index": 3}, "batch_idx": 3},
    ]


def test_interleave_replaces_a_slot_at_its_following_turn():
    states = states_of(interleaved_ranges(source, [1, 3, 0, 2, 1], 2), 8)
    assert [s["next_index_in_cycle"] for s in states] == [0, 1, 0, 0, 0, 1, 1, 0, 0]
    assert [s["next_index_in_datasets"] for s in states] == [2, 2, 2, 2, 3, 4, 4, 5, 5]
    assert [s["iterators_in_use_indices"] for s in states[3:]] == [
        *([0, 1], [2, 1], [3, 1], [3, 1], [3, 4], [3, 4])
    ]
    assert [s["exhausted"] for s in states[2:]] == [
        *([0, 0], [1, 0], [1, 0], [0, 0], [0, 1], [0, 0], [1, 1])
    ]


# Rules of single stages.


def test_limit_never_pulls_one_too_many():
    parent = source(range(9))
    drain(limited(parent, 3), lambda: 100)
    assert parent.furthest == 3


def one_by_one(stage, count):
    return [element for _ in range(count) for element in stage.pull(1).elements]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_stage_pulls_ahead_of_what_is_asked_for(count):
    parents = [source(range(50)), source(range(50))]
    one_by_one(zipped(parents), count)
    assert [p.pulled for p in parents] == [count, count]
    parents = [source(range(50)), source(range(50))]
    one_by_one(mixed(parents, (1, 1)), count)
    assert [p.pulled for p in parents] == [(count + 1) // 2, count // 2]
    parent = source([4, 7, 5])
    one_by_one(flat_mapped(parent), 1)
    assert parent.pulled == 1
    parents = [source(range(50)) for _ in range(3)]
    one_by_one(interleaved(parents.__getitem__, 3, 3), count)
    assert [p.pulled for p in parents] == [(count + 2 - part) // 3 for part in range(3)]
    parent = source(range(50))
    assert len(one_by_one(cached(parent), count)) == parent.pulled == count


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([2, 1], "ZipIterDataset argument 2 is shorter than argument 1"),
        ([1, 2], "ZipIterDataset argument 2 is longer than argument 1"),
        ([3, 3, 2], "ZipIterDataset argument 3 is shorter than arguments 1-2"),
        ([2, 2, 3], "ZipIterDataset argument 3 is longer than arguments 1-2"),
    ],
)
def test_strict_zip_names_the_argument_of_another_length(lengths, text):
    stage = zipped([source(range(n)) for n in lengths])
    for at in range(min(lengths)):
        assert stage.pull(1).elements == [(at,) * len(lengths)]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{text}$"):
            stage.pull(1)


def test_mix_failure_names_the_part():
    stage = mixed([source(range(5)), ListStage(list(range(5)), failing=[0])], (1, 1))
    assert stage.pull(5).elements == [0]
    with pytest.raises(Boom) as caught:
        stage.pull(5)
    assert caught.value.__notes__ == ["Exception caught while processing dataset @ input_index=1"]
    assert one_by_one(stage, 4) == [0, 1, 1, 2]


def test_named_mix_restores_parts_that_came_and_went():
    stage = mixed([source(range(9)), source(range(10, 19))], (1, 1), ("a", "b"))
    drain(limited(stage, 4))
    state = stage.state()
    assert set(state["parents"]) == {"a", "b"}
    other = mixed([source(range(9)), source(range(20, 29))], (1, 1), ("a", "c"))
    drain(limited(other, 3))
    other.restore(state)
    elements, _ = drain(limited(other, 4))
    assert elements == [2, 20, 3, 21]


def test_mix_of_another_number_of_parts_is_refused():
    state = mixed([source(range(3))], (1,)).state()
    with pytest.raises(
        ValueError,
        match="`parents` must be a list of 2, one for each of the datasets that are mixed, has 1",
    ):
        mixed([source(range(3)), source(range(3))], (1, 1)).restore(state)


def mixed_slowly(proportions, place):
    rest, low, high = sum(proportions), place, place + 1
    for number, weight in enumerate(proportions):
        new_low, new_high = low * (rest - weight) // rest, high * (rest - weight) // rest
        if high - new_high != low - new_low:
            return number
        rest, low, high = rest - weight, new_low, new_high
    raise AssertionError


@pytest.mark.parametrize("proportions", [(100, 233), (1, 1, 1), (9900, 100), (3, 7, 11, 2)])
def test_mix_takes_turns_as_the_plain_arithmetic_says(proportions):
    stage = mixed([source([n] * 2000) for n in range(len(proportions))], proportions)
    elements = list(itertools.chain(*(stage.pull(n).elements for n in (1, 700, 1, 299, 900))))
    assert len(elements) > 1500 or min(proportions) < 1000
    assert elements == [mixed_slowly(proportions, k) for k in range(len(elements))]


def test_rebatched_slice_is_a_view():
    batch = {"x": np.arange(6), "y": [np.ones((6, 2))]}
    first, second = rebatched(source([batch]), 3).pull(9).elements
    assert np.shares_memory(second["x"], batch["x"])
    assert np.shares_memory(first["y"][0], batch["y"][0])
    assert second["x"].tolist() == [3, 4, 5]


def test_rebatch_refuses_leaves_of_unlike_length():
    stage = rebatched(source([{"x": np.ones(2), "y": np.ones(3)}]), 2)
    with pytest.raises(ValueError, match="same number of rows"):
        stage.pull(1)


def test_flat_map_that_fails_meets_the_same_element_again():
    class Once(transforms.FlatMap):
        max_fan_out = 2
        failed = False

        def flat_map(self, element):
            if element == 1 and not self.failed:
                self.failed = True
                raise Boom
            return (element, element)

    stage = flat_mapped(source(range(3)), Once())
    assert drain(stage, lambda: 4)[0] == [0, 0, 1, 1, 2, 2]
    assert Once.failed is False


def test_end_of_a_used_flat_map_emits_nothing():
    stage = flat_mapped(source([2, 2]))
    drain(stage)
    end = stage.state()
    stage.restore({"parent": {"next_index": 0}, "next_index_in_buffer": 0})
    stage.pull(1)
    stage.restore(end)
    assert stage.pull(5).elements == []


@pytest.mark.parametrize(
    ("stage", "state", "text"),
    [
        (
            window_shuffled(source(range(2)), 4),
            {"parent_window_start_state": {"next_index": 0}, "window_index": 0, "pos_in_window": 3},
            "3 elements into a window that has 2",
        ),
        (
            flat_mapped(source([2])),
            {"parent": {"next_index": 0}, "next_index_in_buffer": 3},
            "after 3 outputs of an element that has 2",
        ),
        (
            rebatched(source([np.ones(2)]), 1),
            {"parent": {"next_index": 0}, "batch_idx": 3},
            "after 3 rows of a batch that has 2",
        ),
        (
            cached(source(range(2))),
            {"parent": {"next_index": 3}, "position": 3, "cache_filled": False},
            "after 3 elements but there are 2",
        ),
    ],
)
def test_state_of_other_data_is_refused(stage, state, text):
    stage.restore(state)
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            stage.pull(1)


def test_limit_seeks_and_says_where_it_is():
    stage = limited(source(range(9)), 5)
    stage.pull(2)
    assert stage.next_index() == 2
    stage.seek(4)
    assert stage.next_index() == 4
    assert stage.state() == {"parent": {"next_index": 4}, "count_elements_read": 4}
    assert drain(stage)[0] == [4]


def test_interleave_of_one_dataset_seeks():
    stage = interleaved(lambda _: ListStage(list(range(9)), pull_size=4), 1, 1)
    assert stage.next_index() == 0
    stage.pull(1)
    assert stage.next_index() == 1
    stage.seek(7)
    assert drain(stage)[0] == [7, 8]
    stage.seek(8)
    assert drain(stage)[0] == [8]


def test_interleave_of_datasets_has_no_index():
    stage = interleaved_ranges(source, [2, 2], 1)
    text = "is not supported for InterleaveDatasetIterator with more than one dataset."
    with pytest.raises(NotImplementedError, match=f"get_next_index {text}"):
        stage.next_index()
    with pytest.raises(NotImplementedError, match=f"set_next_index {text}"):
        stage.seek(1)


def test_interleave_restores_future_states_and_leaves_them_alone():
    state = interleaved_ranges(source, [1, 1, 3, 3], 2).state()
    state["future_states"] = {"2": {"next_index": 1}, 3: {"next_index": 2}}
    for _ in range(2):
        stage = interleaved_ranges(source, [1, 1, 3, 3], 2)
        stage.restore(state)
        assert drain(stage)[0] == [0, 10, 21, 32, 22]
    assert len(state["future_states"]) == 2


def test_interleave_reuses_open_parts_on_restore():
    opened = []

    def open_dataset(index):
        opened.append(index)
        return source(range(2))

    stage = interleaved(open_dataset, 2, 2)
    start = stage.state()
    drain(stage)
    stage.restore(start)
    assert len(drain(stage)[0]) == 4
    assert opened == [0, 1]


def test_interleave_opens_the_next_datasets_ahead_and_closes_them():
    parts = [source(range(2)) for _ in range(6)]
    stage = interleaved(parts.__getitem__, 6, 1, ahead=2)
    elements, _ = drain(stage, lambda: 5)
    assert elements == [0, 1] * 6
    stage.close()
    assert all(part.closed for part in parts)


def test_interleave_meets_a_part_that_fails_to_open_again():
    failures = [2, 1]

    def open_dataset(index):
        if index in failures:
            failures.remove(index)
            raise Boom(index)
        return source(range(10 * index, 10 * index + 2))

    assert drain(interleaved(open_dataset, 4, 1), lambda: 3)[0] == [0, 1, 10, 11, 20, 21, 30, 31]


def test_plain_gives_lists():
    assert plain((np.arange(2), {"a": np.ones(1)})) == ([0, 1], {"a": [1.0]})
