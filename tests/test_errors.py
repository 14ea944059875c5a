"""Errors are raised where they happen: texts, positions, thresholds, tracebacks."""

import logging
import re
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
from pipelines import add_one, is_even, tokens, tokens2
from under_test import INLINE, NAME, experimental, grain

from grainmill.array_record import ArrayRecordWriter

MapDataset = grain.MapDataset

# --- texts ---------------------------------------------------------------------------------------


def ints(n=5):
    return MapDataset.range(n)


def iter_ints(n=5):
    return MapDataset.range(n).to_iter_dataset()


def iter_tokens(f=tokens, n=5):
    return MapDataset.range(n).map(f).to_iter_dataset(INLINE)


class _FanThree(experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        return [element] * 3


class _Opaque:
    """A map without `output_spec`."""

    def __call__(self, element):
        return element


def first_fit(dataset, **options):
    return experimental.FirstFitPackIterDataset(
        dataset, **{"length_struct": {"tokens": 12}, "num_packing_bins": 2, **options}
    )


# (name, action, type, text that the message contains)
MESSAGES = [
    (
        "batch_after_filter",
        lambda: ints().filter(is_even).batch(2),
        ValueError,
        "`MapDataset.batch` can not follow `MapDataset.filter` because",
    ),
    (
        "batch_after_filter_and_map",
        lambda: ints().filter(is_even).map(add_one).shuffle(1).batch(2),
        ValueError,
        "`MapDataset.batch` can not follow `MapDataset.filter` because",
    ),
    (
        "batch_after_flat_map",
        lambda: experimental.FlatMapMapDataset(ints(), _FanThree()).batch(2),
        ValueError,
        "can not follow `FlatMapMapDataset` because",
    ),
    (
        "batch_unlike_shapes",
        lambda: MapDataset.source([np.zeros(2), np.zeros(3)]).batch(2)[0],
        ValueError,
        "Expected all input elements to have the same structure but got:",
    ),
    (
        "batch_unlike_keys",
        lambda: list(MapDataset.source([{"a": 1}, {"b": 1}]).to_iter_dataset(INLINE).batch(2)),
        ValueError,
        "Expected all input elements to have the same structure but got:",
    ),
    ("batch_zero", lambda: ints().batch(0), ValueError, "batch_size must be positive."),
    ("iter_batch_zero", lambda: iter_ints().batch(0), ValueError, "batch_size must be positive."),
    (
        "shuffle_without_seed",
        lambda: ints().shuffle(),
        ValueError,
        "`shuffle` requires a seed. Please provide it with `ds.seed(seed)`",
    ),
    (
        "random_map_without_seed",
        lambda: ints().random_map(lambda x, _: x),
        ValueError,
        "`random_map` requires a seed.",
    ),
    (
        "iter_random_map_without_seed",
        lambda: iter_ints().random_map(lambda x, _: x),
        ValueError,
        "`random_map` requires a seed.",
    ),
    (
        "shuffle_seed_too_big",
        lambda: ints().shuffle(2**32),
        ValueError,
        "Seed must be an integer between 0 and 2**32-1 (got seed=4294967296).",
    ),
    (
        "shuffle_seed_negative",
        lambda: ints().shuffle(-1),
        ValueError,
        "Seed must be an integer between 0 and 2**32-1 (got seed=-1).",
    ),
    (
        "repeat_zero",
        lambda: ints().repeat(0),
        ValueError,
        "num_epochs must be positive, but got 0.",
    ),
    (
        "repeat_endless",
        lambda: ints().repeat().repeat(2),
        ValueError,
        re.compile(r"Repeating already infinite dataset .* does nothing\.", re.DOTALL),
    ),
    (
        "mix_zero_weight",
        lambda: MapDataset.mix([ints(), ints()], [0, 1]),
        ValueError,
        "Must specify all non-zero proportions for mixing.",
    ),
    (
        "mix_empty_parts",
        lambda: MapDataset.mix([ints(0), ints(), ints(0)]),
        ValueError,
        re.compile(
            r"All datasets must have positive length for mixing, but dataset\(s\) at "
            r"index 0 \(RangeMapDataset\(start=0, stop=0, step=1\)\), "
            r"index 2 \(RangeMapDataset\(start=0, stop=0, step=1\)\) have length 0\."
        ),
    ),
    (
        "concatenate_endless",
        lambda: MapDataset.concatenate([ints().repeat(), ints()]),
        ValueError,
        re.compile(r"Cannot concatenate infinite datasets\. .* is infinite\.", re.DOTALL),
    ),
    (
        "zip_third_shorter",
        lambda: list(experimental.ZipIterDataset([iter_ints(), iter_ints(), iter_ints(4)])),
        ValueError,
        "ZipIterDataset argument 3 is shorter than arguments 1-2",
    ),
    (
        "zip_second_shorter",
        lambda: list(experimental.ZipIterDataset([iter_ints(), iter_ints(4)])),
        ValueError,
        "ZipIterDataset argument 2 is shorter than argument 1",
    ),
    (
        "zip_second_longer",
        lambda: list(experimental.ZipIterDataset([iter_ints(4), iter_ints()])),
        ValueError,
        "ZipIterDataset argument 2 is longer than argument 1",
    ),
    (
        "state_out_of_range",
        lambda: iter(iter_ints()).set_state({"next_index": 6}),
        IndexError,
        "Checkpoint `next_index` 6 is out of range for dataset of length 5.",
    ),
    (
        "thread_prefetch_negative",
        lambda: experimental.ThreadPrefetchIterDataset(iter_ints(), prefetch_buffer_size=-2),
        ValueError,
        "`prefetch_buffer_size` must be greater than or equal to 0, got -2",
    ),
    (
        "num_threads_negative",
        lambda: grain.ReadOptions(num_threads=-1),
        ValueError,
        "num_threads must be non-negative, got -1",
    ),
    (
        "prefetch_buffer_size_negative",
        lambda: grain.ReadOptions(prefetch_buffer_size=-1),
        ValueError,
        "prefetch_buffer_size must be non-negative, got -1",
    ),
    (
        "element_spec_of_map",
        lambda: experimental.get_element_spec(ints().map(_Opaque())),
        ValueError,
        re.compile(
            r"Cannot infer element spec for transform .* because it does not implement "
            r"`output_spec` method\.",
            re.DOTALL,
        ),
    ),
    (
        "get_next_index_of_interleave",
        lambda: experimental.get_next_index(
            iter(experimental.InterleaveIterDataset([iter_ints(), iter_ints()], cycle_length=2))
        ),
        NotImplementedError,
        "get_next_index is not supported for InterleaveDatasetIterator with more than one dataset.",
    ),
    (
        "set_next_index_of_interleave",
        lambda: experimental.set_next_index(
            iter(experimental.InterleaveIterDataset([iter_ints(), iter_ints()], cycle_length=2)),
            1,
        ),
        NotImplementedError,
        "set_next_index is not supported for InterleaveDatasetIterator with more than one dataset.",
    ),
    (
        "pack_max_sequences_zero",
        lambda: first_fit(iter_tokens(), max_sequences_per_bin=0),
        ValueError,
        "If specified, `max_sequences_per_bin` must be a positive integer, but got 0.",
    ),
    (
        "first_fit_too_long",
        lambda: list(first_fit(iter_tokens(), length_struct={"tokens": 2})),
        ValueError,
        "Inputs to PackedBatch must be truncated to max length",
    ),
    (
        "best_fit_too_long",
        lambda: list(
            experimental.BestFitPackIterDataset(
                iter_tokens(), length_struct={"tokens": 2}, num_packing_bins=2
            )
        ),
        ValueError,
        "Inputs to packer",
    ),
    (
        "concat_split_missing_length",
        lambda: list(
            experimental.ConcatThenSplitIterDataset(
                iter_tokens(tokens2), length_struct={"inputs": 4}
            )
        ),
        ValueError,
        re.compile(
            r"Parent element has structure .* but target sequence length is .*"
            r"There must be a sequence length for each feature\.",
            re.DOTALL,
        ),
    ),
    (
        "concat_split_nested",
        lambda: list(
            experimental.ConcatThenSplitIterDataset(
                iter_tokens(lambda x: (x,)), length_struct={"a": 4}
            )
        ),
        ValueError,
        "Parent elements must be unnested dictionaries but got",
    ),
    (
        "flat_map_beyond_fan_out",
        lambda: experimental.FlatMapMapDataset(ints(), _FanThree())[0],
        ValueError,
        "The user-provided FlatMapTransform has a split that exceeds specified max fan-out size.",
    ),
    (
        "index_shuffle_rounds",
        lambda: experimental.index_shuffle(0, max_index=5, seed=1, rounds=3),
        ValueError,
        "rounds must be an even integer between 4 and 1024, but got rounds = 3",
    ),
    (
        "index_shuffle_index",
        lambda: experimental.index_shuffle(6, max_index=5, seed=1, rounds=4),
        ValueError,
        "index must be in [0, max_index], but got index = 6 and max_index = 5",
    ),
    (
        "config_unknown",
        lambda: grain.config.update("py_no_such_option", 1),
        ValueError,
        "Unrecognized config option: ",
    ),
    (
        "config_assigned",
        lambda: setattr(grain.config, "py_debug_mode", True),
        ValueError,
        "Please use update().",
    ),
]


@pytest.mark.parametrize(
    ("action", "error", "text"),
    [pytest.param(*row[1:], id=row[0]) for row in MESSAGES],
)
def test_message_contains_what_programs_match(action, error, text):
    pattern = text if isinstance(text, re.Pattern) else re.escape(text)
    with pytest.raises(error, match=pattern):
        action()


def _message(action):
    with pytest.raises(Exception) as info:  # noqa: PT011 - the text is checked
        action()
    return "\n".join([str(info.value), *getattr(info.value, "__notes__", [])])


@pytest.mark.better_than_grain("Grain's structure dump names no key path and no position")
def test_batch_error_names_key_path_both_shapes_and_position():
    elements = [{"x": {"y": np.zeros(2)}}, {"x": {"y": np.zeros(2)}}, {"x": {"y": np.zeros(3)}}]
    text = _message(lambda: MapDataset.source(elements).batch(3)[0])
    assert "y" in text
    assert "2" in text
    assert "3" in text
    assert re.search(r"(element|position|index)\D*2", text), text


@pytest.mark.parametrize(
    "make", [iter_ints, lambda: iter_ints().map(add_one), lambda: iter_ints().batch(2)]
)
def test_next_after_close_raises(make):
    iterator = iter(make())
    next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match="Trying to advance a closed iterator: '"):
        next(iterator)


def test_next_after_close_of_thread_prefetch_raises():
    iterator = iter(experimental.ThreadPrefetchIterDataset(iter_ints(), prefetch_buffer_size=2))
    next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match=r"Attempting to use a closed iterator\."):
        next(iterator)


STRINGS = [
    (lambda: MapDataset.range(3), "RangeMapDataset(start=0, stop=3, step=1)"),
    (lambda: MapDataset.source([1, 2]), "SourceMapDataset(source=list)"),
    (lambda: MapDataset.range(3).shuffle(1), "ShuffleMapDataset"),
    (lambda: MapDataset.range(3).batch(2), "BatchMapDataset(batch_size=2, drop_remainder=False)"),
    (lambda: MapDataset.range(3).repeat(), "RepeatMapDataset(num_epochs=None)"),
    (lambda: MapDataset.range(3)[1:3], "SliceMapDataset[1:3:1]"),
    (lambda: MapDataset.mix([ints(), ints()]), "MixedMapDataset[2 parents]"),
    (
        lambda: MapDataset.range(3).to_iter_dataset(grain.ReadOptions()),
        "PrefetchIterDataset(read_options=ReadOptions(num_threads=16, prefetch_buffer_size=500), "
        "allow_nones=False)",
    ),
]


@pytest.mark.parametrize(("make", "text"), STRINGS, ids=[text for _, text in STRINGS])
def test_dataset_says_what_it_is(make, text):
    assert str(make()) == text


def test_map_says_what_it_calls_and_where():
    text = str(ints().map(add_one))
    assert re.fullmatch(r"MapMapDataset\(transform=add_one @ .*pipelines\.py:\d+\)", text), text


# --- None, and nothing ---------------------------------------------------------------------------


def test_map_dataset_maps_skip_none():
    seen = []
    dataset = MapDataset.source([1, None, 3]).map(lambda x: seen.append(x) or x * 10)
    assert [dataset[i] for i in range(3)] == [10, None, 30]
    assert seen == [1, 3]
    assert list(dataset) == [10, 30]


def test_nones_of_a_source_are_dropped_unless_allowed():
    dataset = MapDataset.source([1, None, 3])
    assert list(dataset.to_iter_dataset()) == [1, 3]
    assert list(dataset.to_iter_dataset(allow_nones=True)) == [1, None, 3]


def test_iter_dataset_keeps_a_none_that_a_map_returns():
    dataset = iter_ints().map(lambda x: None if x == 2 else x)
    assert list(dataset) == [0, 1, None, 3, 4]


def test_iter_dataset_maps_pass_none_on_but_count_it():
    source = MapDataset.source([5, None, 7]).to_iter_dataset(INLINE, allow_nones=True)
    called = []
    assert list(source.map(lambda x: called.append(x) or x + 1)) == [6, None, 8]
    assert called == [5, 7]
    assert list(source.map_with_index(lambda i, x: (i, x))) == [(0, 5), None, (2, 7)]
    drawn = list(source.random_map(lambda x, rng: (x, int(rng.integers(2**32))), seed=3))
    whole = list(iter_ints(3).random_map(lambda _, rng: int(rng.integers(2**32)), seed=3))
    assert drawn == [(5, whole[0]), None, (7, whole[2])]


def test_iter_dataset_filter_asks_about_none():
    source = MapDataset.source([5, None, 7]).to_iter_dataset(INLINE, allow_nones=True)
    assert list(source.filter(lambda x: x is None)) == [None]


def test_empty_dataset_has_no_elements_and_no_index():
    assert list(ints(0)) == []
    with pytest.raises(ZeroDivisionError):
        ints(0)[0]
    assert len(ints(0).repeat()) == 0
    assert list(ints(0).repeat()) == []
    assert list(ints(0).batch(3)) == []


def test_everything_filtered_ends():
    assert list(ints(50).filter(lambda _: False)) == []
    assert list(iter_ints(50).filter(lambda _: False)) == []


@pytest.mark.better_than_grain("an endless repeat of nothing never returns")
def test_endless_repeat_of_nothing_ends():
    if NAME == "grain":
        pytest.fail("would never return")
    iterator = iter(experimental.RepeatIterDataset(iter_ints(0)))
    with pytest.raises(StopIteration):
        next(iterator)


# --- filter thresholds ---------------------------------------------------------------------------


def with_options(dataset, **options):
    return experimental.WithOptionsIterDataset(dataset, experimental.DatasetOptions(**options))


def test_filter_that_drops_too_much_raises_where_asked():
    dataset = iter_ints(1000).filter(lambda _: False)
    with pytest.raises(
        ValueError,
        match=r"FilterDatasetIterator\(transform=.*\) skipped 100\.00 % of the last seen 1000",
    ):
        list(with_options(dataset, filter_raise_threshold_ratio=0.9))


def test_map_dataset_filter_is_checked_at_the_reading_iterator():
    dataset = ints(1000).filter(lambda _: False).to_iter_dataset(grain.ReadOptions())
    with pytest.raises(
        ValueError,
        match=re.escape(
            "PrefetchDatasetIterator(read_options=ReadOptions(num_threads=16, "
            "prefetch_buffer_size=500), allow_nones=False) skipped 100.00 % of the last seen 1000"
        ),
    ):
        list(with_options(dataset, filter_raise_threshold_ratio=0.9))


@pytest.mark.parametrize(
    ("n", "kept", "threshold", "raises"),
    [
        (999, 0, 0.9, False),
        (1000, 100, 0.9, True),
        (1000, 101, 0.9, False),
        (1999, 1000, 0.9, False),
        (2000, 1000, 0.9, True),
        (1000, 0, 0.0, False),
        (1000, 0, None, False),
    ],
)
def test_filter_threshold_is_of_whole_windows(n, kept, threshold, raises, caplog):
    dataset = with_options(
        iter_ints(n).filter(lambda x: x < kept), filter_raise_threshold_ratio=threshold
    )
    with caplog.at_level(logging.ERROR):
        if raises:
            with pytest.raises(ValueError, match="skipped"):
                list(dataset)
        else:
            assert list(dataset) == list(range(kept))


def _warnings_of_skipping(caplog):
    return [r for r in caplog.records if "skipped" in r.getMessage()]


@pytest.mark.better_than_grain("Grain logs through absl, which pytest does not see")
def test_filter_that_drops_too_much_warns_in_the_log(caplog):
    with caplog.at_level(logging.WARNING):
        assert list(iter_ints(1000).filter(lambda _: False)) == []
    assert len(_warnings_of_skipping(caplog)) == 1
    assert _warnings_of_skipping(caplog)[0].levelno == logging.WARNING


def test_small_dataset_never_warns(caplog):
    with caplog.at_level(logging.WARNING):
        assert list(iter_ints(999).filter(lambda _: False)) == []
    assert _warnings_of_skipping(caplog) == []


def test_warning_can_be_turned_off(caplog):
    dataset = iter_ints(1000).filter(lambda _: False)
    with caplog.at_level(logging.WARNING):
        assert list(with_options(dataset, filter_warn_threshold_ratio=None)) == []
    assert _warnings_of_skipping(caplog) == []


# --- exceptions of users' functions --------------------------------------------------------------


class BrokenError(Exception):
    """The exception of the user's function."""


def fail_at(place):
    def check(x):
        if x == place:
            raise BrokenError(f"element {place}")
        return x

    return check


FAILING = {
    "map_inline": lambda f: ints(9).map(f).to_iter_dataset(INLINE),
    "map_default": lambda f: ints(9).map(f).to_iter_dataset(),
    "map_one_thread": lambda f: (
        ints(9).map(f).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    ),
    "filter": lambda f: ints(9).filter(lambda x: f(x) is not None).to_iter_dataset(),
    "random_map": lambda f: ints(9).random_map(lambda x, _: f(x), seed=1).to_iter_dataset(),
    "map_with_index": lambda f: ints(9).map_with_index(lambda _, x: f(x)).to_iter_dataset(),
    "iter_map": lambda f: iter_ints(9).map(f),
    "iter_filter": lambda f: iter_ints(9).filter(lambda x: f(x) is not None),
    "iter_random_map": lambda f: iter_ints(9).random_map(lambda x, _: f(x), seed=1),
    "iter_map_with_index": lambda f: iter_ints(9).map_with_index(lambda _, x: f(x)),
    "thread_prefetch": lambda f: experimental.ThreadPrefetchIterDataset(
        iter_ints(9).map(f), prefetch_buffer_size=3
    ),
    "mix": lambda f: grain.IterDataset.mix([iter_ints(9).map(f)]),
    "limit": lambda f: experimental.LimitIterDataset(iter_ints(9).map(f), 8),
    "repeat": lambda f: experimental.RepeatIterDataset(iter_ints(9).map(f), 1),
}


@pytest.mark.parametrize("place", [0, 4, 7])
@pytest.mark.parametrize("name", FAILING)
def test_exception_surfaces_at_its_element(name, place):
    iterator = iter(FAILING[name](fail_at(place)))
    assert [next(iterator) for _ in range(place)] == list(range(place))
    with pytest.raises(BrokenError, match=f"element {place}"):
        next(iterator)
    iterator.close()


@pytest.mark.better_than_grain("after an exception Grain loses its place")
@pytest.mark.parametrize("name", FAILING)
def test_exception_is_never_taken_for_the_end(name):
    iterator = iter(FAILING[name](fail_at(4)))
    assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
    state = iterator.get_state()
    for _ in range(3):
        with pytest.raises(BrokenError):
            next(iterator)
    # Nothing was skipped: the state refers to the element that fails.
    assert iterator.get_state() == state
    iterator.close()


@pytest.mark.better_than_grain("after an exception Grain loses its place")
@pytest.mark.parametrize("name", FAILING)
def test_element_that_fails_once_is_delivered_later(name):
    failures = [BrokenError("once")]

    def fail_once(x):
        if x == 4 and failures:
            raise failures.pop()
        return x

    iterator = iter(FAILING[name](fail_once))
    assert [next(iterator) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(BrokenError):
        next(iterator)
    # No element is lost, whether the exception is cached or the element computed again.
    state = iterator.get_state()
    iterator.set_state(state)
    assert [next(iterator) for _ in range(4)] == [4, 5, 6, 7]
    iterator.close()


@pytest.mark.parametrize("name", FAILING)
def test_state_before_the_exception_restores(name):
    iterator = iter(FAILING[name](fail_at(4)))
    for _ in range(4):
        next(iterator)
    state = iterator.get_state()
    with pytest.raises(BrokenError):
        next(iterator)
    iterator.close()
    healthy = iter(FAILING[name](lambda x: x))
    healthy.set_state(state)
    assert [next(healthy) for _ in range(4)] == [4, 5, 6, 7]
    healthy.close()


def test_exception_of_a_batch_in_a_map_dataset_surfaces_at_its_batch():
    iterator = iter(ints(9).map(fail_at(4)).batch(3).to_iter_dataset())
    assert next(iterator).tolist() == [0, 1, 2]
    with pytest.raises(BrokenError, match="element 4"):
        next(iterator)
    iterator.close()


def test_exception_of_a_source_surfaces():
    class Source:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            return fail_at(4)(index)

    iterator = iter(MapDataset.source(Source()).map(add_one).to_iter_dataset())
    assert [next(iterator) for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(BrokenError, match="element 4"):
        next(iterator)
    iterator.close()


def test_index_of_a_map_dataset_raises_the_users_exception():
    with pytest.raises(BrokenError, match="element 4"):
        ints(9).map(fail_at(4))[4]


def test_stop_iteration_of_a_users_function_is_not_the_end():
    def stop(x):
        if x == 2:
            raise StopIteration("from the user")
        return x

    found, error = [], None
    iterator = iter(ints(5).map(stop).to_iter_dataset(INLINE))
    try:
        found.extend(iterator)
    except Exception as raised:
        error = raised
    assert found == [0, 1]
    assert error is not None or NAME == "grain", "the pipeline ended early in silence"


def _raise(_):
    raise BrokenError("deep")


@pytest.mark.parametrize(
    "make",
    [
        lambda ds: ds.to_iter_dataset(INLINE),
        lambda ds: ds.to_iter_dataset(),
    ],
    ids=["inline", "default"],
)
def test_hundred_maps_show_few_frames_and_the_users_last(make):
    dataset = ints(3).map(_raise)
    for _ in range(100):
        dataset = dataset.map(add_one)
    iterator = iter(make(dataset))
    try:
        next(iterator)
    except BrokenError as error:
        frames = traceback.extract_tb(error.__traceback__)
    else:
        pytest.fail("nothing was raised")
    assert len(frames) <= 15
    assert frames[-1].name == "_raise"
    iterator.close()


def test_hundred_iter_maps_show_few_frames_and_the_users_last():
    dataset = iter_ints(3).map(_raise)
    for _ in range(100):
        dataset = dataset.map(add_one)
    iterator = iter(dataset)
    try:
        next(iterator)
    except BrokenError as error:
        frames = traceback.extract_tb(error.__traceback__)
    else:
        pytest.fail("nothing was raised")
    assert len(frames) <= 15
    assert frames[-1].name == "_raise"


def test_hundreds_of_stages_do_not_exhaust_the_stack():
    dataset = ints(3)
    for _ in range(300):
        dataset = dataset.map(add_one)
    assert list(dataset) == [300, 301, 302]


@pytest.mark.better_than_grain("Grain goes on behind the batch")
@pytest.mark.parametrize("options", [{"num_threads": 0}, {}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("at", [1, 6])
def test_batch_of_unlike_elements_fails_again_and_loses_none(options, at):
    dataset = ints(12).map(lambda x: np.zeros(1 + (x == at)))
    iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(**options)).batch(4))
    for _ in range(at // 4):
        next(iterator)
    state = iterator.get_state()
    for _ in range(3):
        with pytest.raises(ValueError, match=f"element {at % 4} has shape"):
            next(iterator)
        assert iterator.get_state() == state
    iterator.close()


class _WithoutState(grain.DatasetIterator):
    def __init__(self):
        super().__init__()
        self._numbers = iter(range(5))

    def __next__(self):
        return next(self._numbers)

    def get_state(self):
        raise NotImplementedError("none")

    def set_state(self, state):
        raise NotImplementedError("none")


class _Stateless(grain.IterDataset):
    def __iter__(self):
        return _WithoutState()


def test_batches_of_an_iterator_without_state():
    iterator = iter(_Stateless().batch(2))
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4]]
    with pytest.raises((NotImplementedError, ValueError)):
        iterator.get_state()


@pytest.mark.better_than_grain("how deep a plan may be is up to the interpreter")
def test_a_plan_too_deep_is_an_error():
    dataset = ints(10)
    for _ in range(900):
        dataset = dataset[0:10]
    assert dataset[3] == 3
    for _ in range(20_000):
        dataset = dataset[0:10]
    with pytest.raises(RecursionError, match="1000 nested"):
        dataset[3]


@pytest.mark.better_than_grain("Grain counts on beyond 64 bits")
def test_shuffle_at_the_end_of_the_range_repeats_nothing():
    dataset = ints(10).shuffle(seed=0)
    # The epoch that begins below 2^63 - 1 and ends beyond it.
    found = [dataset[index] for index in range(2**63 - 8, 2**63 - 1)]
    assert len(set(found)) == len(found)


@pytest.mark.better_than_grain("Grain gives the part's number only, and counts by sorted name")
def test_mix_names_the_part_that_failed():
    parts = {"good": iter_ints(9), "bad": iter_ints(9).map(fail_at(0))}
    with pytest.raises(BrokenError) as info:
        list(grain.IterDataset.mix(parts, {"good": 1, "bad": 1}))
    assert any("bad" in note for note in info.value.__notes__)


def test_misuse_fails_when_the_plan_is_built():
    """Wrong arguments are detected without reading anything."""

    class Untouched:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            pytest.fail("read while building")

    dataset = MapDataset.source(Untouched())
    for wrong in (
        lambda: dataset.batch(-1),
        lambda: dataset.shuffle(-1),
        lambda: dataset.repeat(-1),
        lambda: dataset.to_iter_dataset().batch(0),
        lambda: experimental.LimitIterDataset(dataset.to_iter_dataset(), 0),
        lambda: experimental.RebatchIterDataset(dataset.to_iter_dataset(), 0),
        lambda: experimental.RepeatIterDataset(dataset.to_iter_dataset(), 0),
    ):
        with pytest.raises(ValueError):  # noqa: PT011 - the texts are tested above
            wrong()


@pytest.mark.better_than_grain("an epoch and a half never ends")
def test_number_of_epochs_is_an_integer():
    with pytest.raises(TypeError):
        experimental.RepeatIterDataset(iter_ints(3), 1.5)


def damaged_file(path, *, num_records, damaged):
    """An ArrayRecord file of small records, one of which does not match its checksum."""
    marks = [f"record {number:06d} of the file".encode() for number in range(num_records)]
    with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
        for mark in marks:
            writer.write(mark)
    content = bytearray(path.read_bytes())
    content[content.index(marks[damaged]) + 3] ^= 1
    path.write_bytes(content)
    return marks


@pytest.mark.parametrize("threads", [0, 1, 16])
@pytest.mark.parametrize("mapped", [False, True])
def test_records_before_a_damaged_one_are_delivered(tmp_path, threads, mapped):
    path = tmp_path / "damaged.array_record"
    marks = damaged_file(path, num_records=400, damaged=233)
    ds = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(path)))
    ds = ds.map(bytes.upper) if mapped else ds
    expected = [mark.upper() if mapped else mark for mark in marks]
    it = iter(ds.to_iter_dataset(grain.ReadOptions(threads, 500 if threads else 100)))
    for mark in expected[:233]:
        assert next(it) == mark
    for _ in range(2):  # it does not raise StopIteration instead
        with pytest.raises(grain.GrainmillError, match=r"damaged\.array_record.*233"):
            next(it)
        assert it.get_state() == {"next_index": 233}
    it.set_state({"next_index": 234})
    assert list(it) == expected[234:]


@pytest.mark.parametrize("raised", [SystemExit, GeneratorExit, KeyboardInterrupt, StopIteration])
def test_what_a_function_raises_to_leave_arrives_in_order(raised):
    """If its thread ended with the function, the consumer would wait forever."""

    def leave_at_seven(number):
        if number == 7:
            raise raised
        return number

    ds = MapDataset.range(20).map(leave_at_seven).to_iter_dataset(grain.ReadOptions(4, 10))
    it = iter(ds)
    assert [next(it) for _ in range(7)] == list(range(7))
    with pytest.raises(RuntimeError if raised is StopIteration else raised):
        next(it)
    it.close()


# --- arguments -----------------------------------------------------------------------------------


def _prefetched(**options):
    return lambda: iter_ints().mp_prefetch(grain.MultiprocessingOptions(**options))


def _interleaved(**options):
    parts = [iter_ints(), iter_ints()]
    return experimental.InterleaveIterDataset(parts, **{"cycle_length": 2, **options})


def _split(**options):
    length_struct = options.pop("length_struct", {"tokens": 4})
    return experimental.ConcatThenSplitIterDataset(
        iter_tokens(), length_struct=length_struct, **options
    )


def _loader(**options):
    sampler = grain.samplers.SequentialSampler(3)
    return grain.DataLoader(**{"data_source": range(3), "sampler": sampler, **options})


# What takes a count or a seed: its name, and a call with one.
NUMBERS = {
    "batch": ("batch_size", lambda n: ints().batch(n)),
    "iter_batch": ("batch_size", lambda n: iter_ints().batch(n)),
    "apply_batch": ("batch_size", lambda n: ints().apply(grain.transforms.Batch(n))),
    "rebatch": ("batch_size", lambda n: experimental.RebatchIterDataset(iter_ints(), n)),
    "shuffle": ("seed", lambda n: ints().shuffle(n)),
    "random_map": ("seed", lambda n: ints().random_map(add_one, seed=n)),
    "iter_random_map": ("seed", lambda n: iter_ints().random_map(add_one, seed=n)),
    "seed": ("seed", lambda n: ints().seed(n)),
    "iter_seed": ("seed", lambda n: iter_ints().seed(n)),
    "repeat": ("num_epochs", lambda n: ints().repeat(n)),
    "iter_repeat": ("num_epochs", lambda n: experimental.RepeatIterDataset(iter_ints(), n)),
    "limit": ("count", lambda n: experimental.LimitIterDataset(iter_ints(), n)),
    "range": ("start", MapDataset.range),
    "range_stop": ("stop", lambda n: MapDataset.range(0, n)),
    "range_step": ("step", lambda n: MapDataset.range(0, 5, n)),
    "index": ("index", ints().__getitem__),
    "window": (
        "window_size",
        lambda n: experimental.WindowShuffleMapDataset(ints(), window_size=n, seed=1),
    ),
    "window_seed": (
        "seed",
        lambda n: experimental.WindowShuffleMapDataset(ints(), window_size=2, seed=n),
    ),
    "iter_window": (
        "window_size",
        lambda n: experimental.WindowShuffleIterDataset(iter_ints(), window_size=n, seed=1),
    ),
    "thread_prefetch": (
        "prefetch_buffer_size",
        lambda n: experimental.ThreadPrefetchIterDataset(iter_ints(), prefetch_buffer_size=n),
    ),
    "thread_prefetch_iterator": (
        "prefetch_buffer_size",
        lambda n: experimental.ThreadPrefetchDatasetIterator(iter(iter_ints()), n),
    ),
    "multithread": (
        "num_threads",
        lambda n: experimental.multithread_prefetch(iter_ints(), n, 1),
    ),
    "multithread_buffer": (
        "buffer_size",
        lambda n: experimental.multithread_prefetch(iter_ints(), 1, n),
    ),
    "mp_prefetch": ("num_workers", lambda n: _prefetched(num_workers=n)()),
    "mp_prefetch_buffer": (
        "per_worker_buffer_size",
        lambda n: _prefetched(num_workers=1, per_worker_buffer_size=n)(),
    ),
    "read_threads": ("num_threads", lambda n: grain.ReadOptions(num_threads=n)),
    "read_buffer": ("prefetch_buffer_size", lambda n: grain.ReadOptions(0, n)),
    "read_workers": ("num_workers", lambda n: grain.ReadOptions(num_workers=n)),
    "reads_in_flight": (
        "max_reads_in_flight",
        lambda n: grain.ReadOptions(max_reads_in_flight=n),
    ),
    "cycle_length": ("cycle_length", lambda n: _interleaved(cycle_length=n)),
    "make_iter_threads": ("num_make_iter_threads", lambda n: _interleaved(num_make_iter_threads=n)),
    "make_iter_buffer": ("make_iter_buffer_size", lambda n: _interleaved(make_iter_buffer_size=n)),
    "iter_buffer": ("iter_buffer_size", lambda n: _interleaved(iter_buffer_size=n)),
    "bins": ("num_packing_bins", lambda n: first_fit(iter_tokens(), num_packing_bins=n)),
    "pack_seed": ("seed", lambda n: first_fit(iter_tokens(), seed=n)),
    "max_sequences": (
        "max_sequences_per_bin",
        lambda n: first_fit(iter_tokens(), max_sequences_per_bin=n),
    ),
    "bos_token": (
        "bos_token_id",
        lambda n: _split(
            bos_handling=experimental.BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS, bos_token_id=n
        ),
    ),
    "shard_index": ("shard_index", lambda n: grain.sharding.ShardOptions(n, 9)),
    "shard_count": ("shard_count", lambda n: grain.sharding.ShardOptions(0, n)),
    "sampler": ("num_records", grain.samplers.IndexSampler),
    "sampler_epochs": ("num_epochs", lambda n: grain.samplers.IndexSampler(3, num_epochs=n)),
    "sampler_seed": ("seed", lambda n: grain.samplers.IndexSampler(3, seed=n)),
    "sequential_sampler_seed": ("seed", lambda n: grain.samplers.SequentialSampler(3, seed=n)),
    "worker_count": ("worker_count", lambda n: _loader(worker_count=n)),
}
NONE_IS_A_CHOICE = {
    *("shuffle", "random_map", "iter_random_map", "repeat", "iter_repeat", "range_stop"),
    *("max_sequences", "sampler_epochs", "sampler_seed", "sequential_sampler_seed"),
    *("worker_count", "reads_in_flight", "bos_token", "seed", "iter_seed"),
}


@pytest.mark.better_than_grain("found out late or never, by an operator that fails")
@pytest.mark.parametrize("wrong", [1.5, 2.0, True, np.True_, "2", b"2", None, [2], np.float64(2)])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_integer_is_refused_when_the_plan_is_built(name, wrong):
    argument, call = NUMBERS[name]
    if wrong is None and name in NONE_IS_A_CHOICE:
        return
    with pytest.raises(TypeError) as refused:
        call(wrong)
    text = str(refused.value)
    assert f"`{argument}`" in text
    assert repr(wrong) in text
    assert type(wrong).__name__ in text


@pytest.mark.better_than_grain("some are told apart by their type")
@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.int32, np.array])
@pytest.mark.parametrize("name", NUMBERS)
def test_integers_of_numpy_are_integers(name, kind):
    call = NUMBERS[name][1]
    assert repr(call(kind(2))) == repr(call(2)) or not hasattr(call(2), "__dataclass_fields__")


def test_numbers_of_numpy_leave_no_trace_in_saved_states():
    sampler = grain.samplers.IndexSampler(
        np.int64(7),
        grain.sharding.ShardOptions(np.int64(0), np.int32(2)),
        num_epochs=np.int64(1),
        shuffle=True,
        seed=np.int64(3),
    )
    assert "int" not in repr(sampler)


class _NoFanOut:
    def flat_map(self, element):
        return [element]


# What else is wrong: a call, the error, and what the message names, says to expect, and found.
WRONG_ARGUMENTS = {
    "source": (lambda: MapDataset.source(None), TypeError, ["`source`", "`__getitem__`", "None"]),
    "source_iterator": (
        lambda: MapDataset.source(iter([1])),
        TypeError,
        ["`source`", "list_iterator"],
    ),
    "step_zero": (lambda: MapDataset.range(0, 5, 0), ValueError, ["`step` must not be 0"]),
    "slice": (lambda: ints().slice("abc"), ValueError, ["sequence of integers", "'abc'"]),
    "slice_number": (lambda: ints().slice(3), ValueError, ["sequence of integers", "got 3"]),
    "batch_fn": (lambda: ints().batch(2, batch_fn=3), TypeError, ["`batch_fn`", "got 3"]),
    "iter_batch_fn": (lambda: iter_ints().batch(2, batch_fn=3), TypeError, ["`batch_fn`", "3"]),
    "init": (
        lambda: grain.ReadOptions(num_workers=1, worker_init_fn=3),
        TypeError,
        ["`worker_init_fn`", "got 3"],
    ),
    "mp_init": (
        lambda: iter_ints().mp_prefetch(
            grain.MultiprocessingOptions(num_workers=1), worker_init_fn="f"
        ),
        TypeError,
        ["`worker_init_fn`", "got 'f'"],
    ),
    "time": (
        lambda: grain.ReadOptions(timeout_s="5"),
        TypeError,
        ["`timeout_s` must be a number", "got '5'"],
    ),
    "budget": (
        lambda: grain.MultiprocessingOptions(ram_budget_bytes=True),
        TypeError,
        ["`ram_budget_bytes`", "got True"],
    ),
    "weight_text": (
        lambda: MapDataset.mix([ints(), ints()], [1, "2"]),
        TypeError,
        ["`weights[1]` must be a number", "got '2'"],
    ),
    "weight_infinite": (
        lambda: grain.IterDataset.mix([iter_ints(), iter_ints()], [1, float("inf")]),
        ValueError,
        ["`weights[1]` must be finite", "inf"],
    ),
    "flat_map": (
        lambda: experimental.FlatMapIterDataset(iter_ints(), add_one),
        TypeError,
        ["`transform`", "`flat_map`", "add_one"],
    ),
    "flat_map_dataset": (
        lambda: experimental.FlatMapMapDataset(ints(), add_one),
        TypeError,
        ["`transform`", "`flat_map`"],
    ),
    "fan_out": (
        lambda: experimental.FlatMapMapDataset(ints(), _NoFanOut()),
        TypeError,
        ["`max_fan_out` of `_NoFanOut`", "got None"],
    ),
    "interleave": (
        lambda: experimental.InterleaveIterDataset(iter_ints(), cycle_length=1),
        TypeError,
        ["`datasets` must be a sequence", "of type IterDataset"],
    ),
    "cycle_length": (lambda: _interleaved(cycle_length=0), ValueError, ["`cycle_length`", "got 0"]),
    "no_dataset": (
        lambda: grain.IterDataset.mix([[1, 2]]),
        TypeError,
        ["expected a dataset", "[1, 2]", "list"],
    ),
    "group_by": (
        lambda: first_fit(iter_tokens(), shuffle_bins_group_by_feature="length"),
        ValueError,
        ["`shuffle_bins_group_by_feature`", "['tokens']", "got 'length'"],
    ),
    "meta_features": (
        lambda: first_fit(iter_tokens(), meta_features="tokens"),
        TypeError,
        ["`meta_features` must be a sequence of names", "'tokens'"],
    ),
    "bos_features": (
        lambda: _split(
            bos_handling=experimental.BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS,
            bos_token_id=1,
            bos_features=["token"],
        ),
        ValueError,
        ["`bos_features`", "['tokens']", "['token']"],
    ),
    "bos_handling": (lambda: _split(bos_handling="yes"), TypeError, ["`bos_handling`", "'yes'"]),
    "length_struct": (lambda: _split(length_struct=4), TypeError, ["`length_struct`", "got 4"]),
    "loader_source": (
        lambda: _loader(data_source=None),
        TypeError,
        ["`data_source` must have `__getitem__`", "None"],
    ),
    "loader_sampler": (lambda: _loader(sampler=3), TypeError, ["`sampler`", "got 3"]),
    "loader_operations": (
        lambda: _loader(operations=grain.transforms.Batch(2)),
        TypeError,
        ["`operations` must be a sequence", "Batch(batch_size=2"],
    ),
    "load": (lambda: grain.load(None), TypeError, ["`source`", "`__len__`", "None"]),
}


def _source_class(length=None, *, iterates=False):
    class Source:
        def __getitem__(self, index):
            return index

        if length is not None:

            def __len__(self):
                return length()

        if iterates:

            def __iter__(self):
                return iter(range(10))

    return Source


def _fails_with_a_type_error():
    return 1 + "one"


NO_SOURCES = {
    "a failing length": (_source_class(_fails_with_a_type_error)(), "unsupported operand"),
    "no length": (_source_class(lambda: None)(), "'NoneType' object cannot be interpreted"),
    "a class": (_source_class(lambda: 3), r"the class `Source`: did you mean `Source\(...\)`"),
    "a class of an endless source": (_source_class(), "the class `Source`"),
    "a streamed data set": (
        _source_class(iterates=True)(),
        "derive a class from `grain.IterDataset`",
    ),
    "an array without axes": (np.array(5), "unsized"),
    "a generator": ((x for x in range(3)), "must have `__getitem__`"),
    "a set": ({1, 2}, "must have `__getitem__`"),
    "an iterator": (map(abs, [1]), "a class that derives from `grain.IterDataset`"),
    "a path": ("data/x.array_record", "whose elements are its characters"),
    "a path object": (Path("x.array_record"), "to read a file, pass a source"),
}
NO_DATA_SOURCES = {
    name: value
    for name, value in NO_SOURCES.items()
    if name not in {"a failing length", "no length", "an array without axes"}
}


@pytest.mark.better_than_grain("endless data sets of garbage")
@pytest.mark.parametrize("name", NO_SOURCES)
@pytest.mark.parametrize("make", [MapDataset.source, grain.load])
def test_what_is_no_source_is_not_taken_for_an_endless_one(make, name):
    source, text = NO_SOURCES[name]
    with pytest.raises(TypeError, match=text):
        make(source)


def load_in_order(source):
    shard = grain.sharding.NoSharding()
    sampler = grain.samplers.SequentialSampler(2, shard)
    return grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)


@pytest.mark.better_than_grain("loads what indexing a class or a stream gives")
@pytest.mark.parametrize("name", NO_DATA_SOURCES)
def test_what_is_no_source_is_none_of_a_loader_either(name):
    """It asks for the elements that its sampler names, so a source needs no length."""
    source, text = NO_DATA_SOURCES[name]
    with pytest.raises(TypeError, match=text if "a class that" not in text else "`data_source`"):
        load_in_order(source)


def test_a_loader_takes_a_source_without_length():
    assert list(load_in_order(_source_class()())) == [0, 1]


def test_a_source_without_length_never_ends():
    ds = MapDataset.source(_source_class()())
    assert len(ds) == sys.maxsize
    assert ds[10**15] == 10**15
    with pytest.raises(TypeError, match="must have `__len__`"):
        grain.load(_source_class()())


@pytest.mark.better_than_grain("found out late, by an operator that fails")
@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_argument_is_named_when_the_plan_is_built(name):
    call, error, texts = WRONG_ARGUMENTS[name]
    with pytest.raises(error) as refused:
        call()
    for text in texts:
        assert text in str(refused.value)


def test_a_wait_that_lasts_is_reported_after_a_third_of_a_minute():
    assert grain.MultiprocessingOptions().stall_warning_s == 20
    assert grain.ReadOptions().stall_warning_s == 20
    assert grain.config.stall_warning_s == 20


class _Picks(grain.transforms.DatasetSelectionMap):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return 0, 0


EMPTY = {
    "range": lambda: ints(0),
    "source": lambda: MapDataset.source([]),
    "shuffle": lambda: ints(0).shuffle(1),
    "repeat": lambda: ints(0).shuffle(1).repeat(),
    "slice": lambda: ints(5)[3:3],
    "slice_of_nothing": lambda: ints(0)[1:4],
    "take": lambda: ints(5).slice([]),
    "batch": lambda: ints(0).batch(2),
    "batch_of_too_few": lambda: ints(1).batch(2, drop_remainder=True),
    "filter_and_map": lambda: ints(0).filter(is_even).map(add_one),
    "window": lambda: experimental.WindowShuffleMapDataset(ints(0), window_size=2, seed=1),
    "zip": lambda: experimental.ZipMapDataset([ints(0), ints(0)]),
    "flat_map": lambda: experimental.FlatMapMapDataset(ints(0), _FanThree()),
    "concatenate": lambda: MapDataset.concatenate([ints(0), ints(0)]),
}


@pytest.mark.better_than_grain("a division by zero")
@pytest.mark.parametrize("name", EMPTY)
def test_empty_dataset_says_that_it_is_empty(name):
    dataset = EMPTY[name]()
    assert len(dataset) == 0
    assert list(dataset) == []
    assert list(dataset.to_iter_dataset().batch(2)) == []
    for index in (0, 3, -1):
        with pytest.raises(IndexError, match=f"has no elements, so index {index} is out of range"):
            dataset[index]
    with pytest.raises(IndexError, match="has no elements"):
        dataset.__getitems__([0, 1])
    assert dataset.__getitems__([]) == []


@pytest.mark.better_than_grain("a division by zero")
@pytest.mark.parametrize(
    "make",
    [
        lambda: ints(0).slice([0]),
        lambda: MapDataset.select_from_datasets([ints(0)], _Picks()),
        lambda: ints(0).batch(2).slice([0]),
    ],
)
def test_element_of_an_empty_part_is_out_of_range(make):
    with pytest.raises(IndexError, match="of an empty dataset has no position 0"):
        make()[0]


@pytest.mark.better_than_grain("ends the data, or names nothing")
@pytest.mark.parametrize(
    "make",
    [
        lambda f: ints(5).map(f).to_iter_dataset(INLINE),
        lambda f: ints(5).map(f).to_iter_dataset(),
        lambda f: iter_ints(5).map(f),
        lambda f: iter_ints(5).filter(f),
    ],
)
def test_function_that_raises_stop_iteration_is_named(make):
    def takes_the_first_of_none(_):
        return next(iter([]))

    with pytest.raises(RuntimeError) as raised:
        list(make(takes_the_first_of_none))
    text = str(raised.value)
    assert "raised StopIteration" in text
    line = takes_the_first_of_none.__code__.co_firstlineno
    assert "takes_the_first_of_none`, defined at" in text
    assert f"{__file__}:{line}" in text
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.better_than_grain("nothing is named")
@pytest.mark.parametrize(
    ("batches", "texts"),
    [
        (
            [{"a": np.zeros(3)}, {"b": np.zeros(3), "c": np.zeros(3)}],
            [
                "must have the same structure",
                "batch 1 lacks `batch['a']`",
                "batch 0 lacks",
                "['c']",
            ],
        ),
        (
            [np.zeros(2), np.zeros(3), (np.zeros(3),)],
            ["must have the same structure", "batch 2 lacks `batch`", "batch 1 lacks `batch[0]`"],
        ),
        (
            [{"a": np.zeros(3), "b": np.zeros(2)}],
            ["3 at `batch['a']`, 2 at `batch['b']`", "batch 0"],
        ),
        ([np.zeros(3), np.float64(2)], ["a scalar at `batch`", "batch 1"]),
    ],
)
def test_rebatch_names_the_leaves_and_batches_that_differ(batches, texts):
    dataset = MapDataset.source(batches).to_iter_dataset(INLINE)
    with pytest.raises(ValueError, match="RebatchIterDataset") as raised:
        list(experimental.RebatchIterDataset(dataset, 2))
    for text in texts:
        assert text in str(raised.value)
