"""Workers' shares of a plan: together they have every element once, in the original order."""

import threading

import oracle
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import add_one, build, encode, rand_u32, take, user_datasets
from under_test import INLINE, experimental, grain

MapDataset, IterDataset = grain.MapDataset, grain.IterDataset


def shared(dataset, num_workers, *, sequential_slice=False):
    """The elements of `dataset` computed by several workers, as plain values."""
    workers = experimental.multithread_prefetch(
        dataset, num_workers, 1, sequential_slice=sequential_slice
    )
    iterator = iter(workers)
    found = take(iterator, None)
    iterator.close()
    return found


# --- every n-th element --------------------------------------------------------------------------

# A sequential stage: how it is appended, and its result for a list.
STAGES = {
    "map": (lambda ds: ds.map(add_one), lambda xs: [x + 1 for x in xs]),
    "filter": (
        lambda ds: ds.filter(lambda x: x % 3 != 1),
        lambda xs: [x for x in xs if x % 3 != 1],
    ),
    "number": (
        lambda ds: ds.map_with_index(lambda i, x: 100 * i + x),
        lambda xs: [100 * i + x for i, x in enumerate(xs)],
    ),
    "sums": (
        lambda ds: ds.batch(3, batch_fn=sum),
        lambda xs: [sum(xs[k : k + 3]) for k in range(0, len(xs), 3)],
    ),
    "limit": (lambda ds: experimental.LimitIterDataset(ds, 4), lambda xs: xs[:4]),
    "repeat": (lambda ds: experimental.RepeatIterDataset(ds, 2), lambda xs: xs * 2),
    "window": (
        lambda ds: experimental.WindowShuffleIterDataset(ds, window_size=3, seed=5),
        lambda xs: oracle.window_shuffled(xs, 3, 5),
    ),
}


@settings(max_examples=cases(50, 5000))
@given(
    length=st.integers(0, 30),
    num_workers=st.integers(1, 5),
    seed=st.integers(0, 99),
    stages=st.lists(st.sampled_from(sorted(STAGES)), max_size=3),
)
def test_workers_match_slices_taken_in_turn(length, num_workers, seed, stages):
    dataset = MapDataset.range(length).shuffle(seed)
    elements = [oracle.shuffled(i, length, seed) for i in range(length)]
    dataset = dataset.to_iter_dataset(INLINE)
    parts = oracle.every_nth(elements, num_workers)
    for name in stages:
        append, slow = STAGES[name]
        dataset = append(dataset)
        parts = [slow(part) for part in parts]
    assert shared(dataset, num_workers) == oracle.in_turn(parts)


@pytest.mark.parametrize("num_workers", [2, 3, 4, 7])
def test_order_of_one_to_one_stages_does_not_depend_on_workers(num_workers):
    dataset = MapDataset.range(23).seed(3).shuffle().random_map(rand_u32).to_iter_dataset(INLINE)
    dataset = dataset.seed(5).map(lambda x: x[0]).random_map(rand_u32)
    assert shared(dataset, num_workers) == take(iter(dataset), None)


@pytest.mark.better_than_grain("numbers depend on how threads are nested")
def test_random_numbers_of_nested_workers_are_those_of_one():
    dataset = MapDataset.range(17).to_iter_dataset(INLINE).random_map(rand_u32, seed=1)
    inner = experimental.multithread_prefetch(dataset, 2, 1)
    assert shared(inner, 3) == take(iter(dataset), None)


def test_datasets_of_an_interleave_are_dealt_out_unsliced():
    parts = [MapDataset.range(10 * k, 10 * k + k) for k in range(1, 6)]
    together = experimental.InterleaveIterDataset(parts, cycle_length=2)
    of_worker = [
        list(experimental.InterleaveIterDataset(parts[w::2], cycle_length=2)) for w in range(2)
    ]
    assert shared(together, 2) == oracle.in_turn(of_worker)


def test_lazily_opened_datasets_are_dealt_out_too():
    opened = []

    def part(k):
        opened.append(k)
        return MapDataset.range(10 * k, 10 * k + 2).to_iter_dataset()

    together = experimental.InterleaveIterDataset(MapDataset.range(5).map(part), cycle_length=1)
    found = shared(together, 2)
    assert sorted(found) == sorted(10 * k + j for k in range(5) for j in range(2))
    assert sorted(opened) == list(range(5))


@pytest.mark.better_than_grain("a worker without a dataset fails")
def test_an_interleave_of_fewer_datasets_than_workers_gives_them_all():
    together = experimental.InterleaveIterDataset([MapDataset.range(3)], cycle_length=2)
    assert shared(together, 4) == [0, 1, 2]


# --- users' own datasets -----------------------------------------------------------------------


def test_users_dataset_in_the_middle_is_sliced_in_a_copy():
    dataset = user_datasets(grain)["Twice"](MapDataset.range(5).to_iter_dataset(INLINE))
    before = dict(vars(dataset))
    parts = [[x for x in part for _ in range(2)] for part in oracle.every_nth(range(5), 2)]
    assert shared(dataset, 2) == oracle.in_turn(parts)
    assert vars(dataset) == before
    assert take(iter(dataset), None) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.better_than_grain("every worker reads all elements through the other name")
def test_parent_kept_under_another_name_is_sliced_too():
    class Doubled(IterDataset):
        def __init__(self, parent):
            super().__init__(parent)
            self.mine = parent

        def __iter__(self):
            return self.mine.map(lambda x: 2 * x).__iter__()

    dataset = Doubled(MapDataset.range(6).to_iter_dataset(INLINE).map(add_one))
    assert shared(dataset, 2) == [2, 4, 6, 8, 10, 12]


def test_users_source_without_random_access_needs_one_worker():
    squares = user_datasets(grain)["Squares"](5)
    assert shared(squares, 1) == [0, 1, 4, 9, 16]
    with pytest.raises(ValueError, match="Cannot slice `IterDataset` source"):
        shared(squares, 2)


def test_users_map_dataset_is_sliced_after_it_and_before_it():
    dataset = user_datasets(grain)["ShiftMap"](MapDataset.range(7)).to_iter_dataset(INLINE)
    assert shared(dataset, 3) == list(range(1000, 1007))
    assert shared(dataset, 3, sequential_slice=True) == [1000, 1003, 1005, 1001, 1004, 1006, 1002]


# --- ranges of consecutive elements ------------------------------------------------------------


@settings(max_examples=cases(50, 5000))
@given(length=st.integers(0, 40), num_workers=st.integers(1, 6), seed=st.integers(0, 9))
def test_consecutive_slices_match_pieces_shuffled_by_themselves(length, num_workers, seed):
    dataset = MapDataset.range(length).shuffle(seed).to_iter_dataset(INLINE)
    parts = [
        [piece[oracle.shuffled(i, len(piece), seed)] for i in range(len(piece))]
        for piece in oracle.pieces(range(length), num_workers)
    ]
    assert shared(dataset, num_workers, sequential_slice=True) == oracle.in_turn(parts)


def _parts(*lengths):
    return [MapDataset.range(100 * k, 100 * k + n) for k, n in enumerate(lengths)]


# Pipelines in which no stage except slices and selections drops elements.
WHOLE = {
    "range_with_step": lambda: MapDataset.range(40, 3, -4),
    "source": lambda: MapDataset.source([5, 3, 8, 1, 9, 2]),
    "shuffle": lambda: MapDataset.range(11).shuffle(4),
    "slice": lambda: MapDataset.range(23).shuffle(4)[3:20],
    "backwards": lambda: MapDataset.range(11)[::-1],
    "concatenate": lambda: MapDataset.concatenate(_parts(5, 7, 4)),
    "zip": lambda: experimental.ZipMapDataset(_parts(9, 9)),
    "select": lambda: MapDataset.select_from_datasets(
        _parts(4, 4), [(0, 1), (1, 3), (0, 2), (1, 0)]
    ),
    "repeat": lambda: MapDataset.range(8).shuffle(2).repeat(3),
    "window": lambda: experimental.WindowShuffleMapDataset(
        MapDataset.range(12), window_size=4, seed=2
    ),
    "map": lambda: MapDataset.range(9).map(add_one).filter(lambda x: x % 2),
    "flat_map": lambda: build(grain, [["range", 7], ["flat_map", "FanTwo"]]),
}
LENGTHS_KEPT = {"slice", "backwards", "concatenate", "zip", "select", "repeat", "window"}


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.better_than_grain("lengths stay those of the whole")]
            if name in LENGTHS_KEPT
            else [],
        )
        for name in WHOLE
    ],
)
def test_consecutive_slices_hold_every_element_once(name, num_workers):
    dataset = WHOLE[name]()
    whole = take(iter(dataset.to_iter_dataset(INLINE)), None)
    found = shared(dataset.to_iter_dataset(INLINE), num_workers, sequential_slice=True)
    assert sorted(map(repr, found)) == sorted(map(repr, whole))


@pytest.mark.better_than_grain("fails on an empty batch")
def test_consecutive_slices_are_batched_by_themselves():
    dataset = MapDataset.range(11).batch(2).to_iter_dataset(INLINE)
    found = [batch["nd"][2] for batch in shared(dataset, 3, sequential_slice=True)]
    assert found == [[0, 1], [4, 5], [8, 9], [2, 3], [6, 7], [10]]


def test_slice_of_an_endless_dataset_is_taken_in_each_piece():
    dataset = MapDataset.range(10).repeat()[1::2].to_iter_dataset(INLINE)
    workers = experimental.multithread_prefetch(dataset, 2, 1, sequential_slice=True)
    iterator = iter(workers)
    assert take(iterator, 8) == [1, 6, 3, 8, 0, 5, 2, 7]
    iterator.close()


def test_mixture_of_pieces_keeps_its_proportions():
    mixed = MapDataset.mix(_parts(6, 9), [1, 2]).to_iter_dataset(INLINE)
    found = shared(mixed, 3, sequential_slice=True)
    assert found[:12] == [0, 2, 4, 100, 103, 106, 101, 104, 107, 1, 3, 5]


def test_source_without_length_has_no_pieces():
    class Endless:
        def __getitem__(self, index):
            return index

    dataset = MapDataset.source(Endless()).to_iter_dataset(INLINE)
    with pytest.raises((ValueError, TypeError)):
        next(iter(experimental.multithread_prefetch(dataset, 2, 1, sequential_slice=True)))


# --- options and running -----------------------------------------------------------------------


@pytest.mark.better_than_grain("these options are not Grain's")
def test_options_of_ours_are_checked_and_shown_where_set():
    options = grain.MultiprocessingOptions
    shown = "MultiprocessingOptions(num_workers=2, per_worker_buffer_size=3, enable_profiling=False"
    assert repr(options(2, 3)) == f"{shown})"
    assert repr(options(2, 3, timeout_s=4.5)) == f"{shown}, timeout_s=4.5)"
    assert repr(options(2, 3, stall_warning_s=None)) == f"{shown}, stall_warning_s=None)"
    budgets = ["ram_budget_bytes", "per_worker_budget_bytes"]
    for name in ("stall_warning_s", "timeout_s"):
        assert getattr(options(**{name: 0}), name) == 0
        with pytest.raises(ValueError, match=f"`{name}` must not be negative, got -1"):
            options(**{name: -1})
    for name in budgets:
        with pytest.raises(ValueError, match=f"`{name}` must be positive or None, got 0"):
            options(**{name: 0})


def test_options_are_grains():
    options = grain.MultiprocessingOptions
    assert options(2, 3, True) == options(  # noqa: FBT003 - as programs call it
        num_workers=2, per_worker_buffer_size=3, enable_profiling=True
    )
    assert repr(options()) == (
        "MultiprocessingOptions(num_workers=0, per_worker_buffer_size=1, enable_profiling=False)"
    )


def test_no_workers_add_nothing():
    dataset = MapDataset.range(5).to_iter_dataset(INLINE).seed(3)
    assert dataset.mp_prefetch(grain.MultiprocessingOptions(0)) is dataset
    assert experimental.multithread_prefetch(dataset, 0, 1) is dataset
    assert take(iter(dataset.mp_prefetch(grain.MultiprocessingOptions()).random_map(rand_u32)), 1)


def _prefetched(num_workers, buffer_size):
    dataset = MapDataset.range(5).to_iter_dataset(INLINE)
    return dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers, buffer_size))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _prefetched(2, 0), "`buffer_size` must be greater than 0, got 0"),
        pytest.param(
            lambda: _prefetched(-1, 1),
            "`num_workers` must be at least 1, got -1",
            marks=pytest.mark.better_than_grain("checked when it runs, if ever"),
        ),
        pytest.param(
            lambda: _prefetched(2, 1).mp_prefetch(grain.MultiprocessingOptions(2)),
            "`mp_prefetch` cannot follow `mp_prefetch`",
            marks=pytest.mark.better_than_grain("fails in the worker, without a reason"),
        ),
        pytest.param(
            lambda: experimental.multithread_prefetch(_prefetched(0, 1), -1, 1),
            "`num_threads` must be at least 1, got -1",
            marks=pytest.mark.better_than_grain("checked when it runs, if ever"),
        ),
        (
            lambda: experimental.multithread_prefetch(
                MapDataset.range(3).to_iter_dataset().seed(1), 2, 1
            ).random_map(rand_u32),
            "`random_map` requires a seed",
        ),
    ],
)
def test_bad_arguments_are_refused_when_the_plan_is_built(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.better_than_grain("a worker begins when it has its turn")
def test_all_workers_are_at_work_from_the_first_element_on():
    together = threading.Barrier(3, timeout=120)

    def meet(x):
        if x < 3:
            together.wait()
        return x

    dataset = MapDataset.range(9).map(meet).to_iter_dataset(INLINE)
    assert shared(dataset, 3) == list(range(9))


def test_a_worker_works_ahead_as_far_as_its_buffer():
    made = []
    dataset = MapDataset.range(100).map(lambda x: made.append(x) or x).to_iter_dataset(INLINE)
    iterator = iter(experimental.multithread_prefetch(dataset, 2, 3))
    for k in range(20):
        next(iterator)
        # Delivered elements, and for each worker its buffer and the element in progress.
        assert len(made) <= k + 1 + 2 * (3 + 1)
    iterator.close()


@pytest.mark.better_than_grain("the worker ends with its first failure")
def test_a_failure_comes_at_its_place_and_costs_no_element():
    failing = {5}

    def fail_once(x):
        if x in failing:
            failing.discard(x)
            raise KeyError(x)
        return x

    dataset = MapDataset.range(9).map(fail_once).to_iter_dataset(INLINE)
    iterator = iter(experimental.multithread_prefetch(dataset, 2, 1))
    assert take(iterator, 5) == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError):
        next(iterator)
    assert take(iterator, None) == [5, 6, 7, 8]
    iterator.close()


def test_options_of_the_pipeline_reach_the_workers():
    dataset = MapDataset.range(2000).to_iter_dataset(INLINE).filter(lambda _: False)
    dataset = experimental.multithread_prefetch(dataset, 2, 1)
    strict = experimental.DatasetOptions(filter_raise_threshold_ratio=0.9)
    iterator = iter(experimental.WithOptionsIterDataset(dataset, strict))
    with pytest.raises(ValueError, match=r"skipped 100.00 %"):
        next(iterator)
    iterator.close()


def test_prefetch_is_an_older_name():
    dataset = MapDataset.range(7).to_iter_dataset(INLINE)
    with pytest.warns(DeprecationWarning, match="mp_prefetch"):
        older = dataset.prefetch(grain.MultiprocessingOptions(2))
    iterator = iter(older)
    assert take(iterator, None) == list(range(7))
    iterator.close()


def test_element_spec_is_that_of_the_parent():
    dataset = MapDataset.range(7).to_iter_dataset().batch(3)
    spec = experimental.get_element_spec(experimental.multithread_prefetch(dataset, 2, 1))
    assert encode(spec) == encode(experimental.get_element_spec(dataset))


def test_next_index_needs_a_single_worker():
    dataset = MapDataset.range(9).to_iter_dataset(INLINE)
    one = iter(experimental.multithread_prefetch(dataset, 1, 2))
    next(one)
    experimental.set_next_index(one, 5)
    assert take(one, 2) == [5, 6]
    several = iter(experimental.multithread_prefetch(dataset, 2, 1))
    with pytest.raises(NotImplementedError, match="with more than one dataset"):
        experimental.get_next_index(several)
    one.close()
    several.close()
