"""Plans in which many stages read the same ones: questions take time by the number of nodes."""

import copy
import functools
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

import grainmill as grain
from grainmill import experimental
from grainmill._cache.fingerprint import Fingerprint
from grainmill._checkpoint import pipeline
from grainmill._dataset.iter_dataset import node_of
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.program import Program
from grainmill._plan.slicing import sliced
from grainmill._stats.numbering import numbered
from grainmill._workers import by_value

DEPTH = 30  # 2 ** 30 ways lead to a source, in each of them


class Own(grain.MapDataset):
    """A user's own dataset over two others."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return self.parents[index % 2][index]


class OwnIter(grain.IterDataset):
    """A user's own sequential dataset over two others."""

    def __iter__(self):
        raise NotImplementedError


MAP_STAGES = (
    lambda a, b: grain.MapDataset.mix([a, b], [1, 2])[:5],
    lambda a, b: grain.MapDataset.concatenate([a, b])[:5],
    lambda a, b: experimental.ZipMapDataset([a, b]).map(lambda pair: pair[0]),
    lambda a, b: Own([a, b]),
    lambda a, b: grain.MapDataset.mix([a, b]).shuffle(seed=1)[:5],
)
ITER_STAGES = (
    lambda a, b: grain.IterDataset.mix([a, b], [1, 2]),
    lambda a, b: grain.IterDataset.mix({"a": a, "b": b}, {"a": 1, "b": 2}),
    lambda a, b: experimental.ZipIterDataset([a, b]).map(lambda pair: pair[0]),
    lambda a, b: experimental.InterleaveIterDataset([a, b], cycle_length=2),
    lambda a, b: OwnIter([a, b]),
)


def random_plan(rng, stages, first):
    """A chain of stages, each over the two before it."""
    made = [first, first.map(abs)]
    while len(made) < DEPTH:
        made.append(rng.choice(stages)(*rng.sample(made[-2:], 2)))
    return made[-1]


def plans(seed):
    rng = random.Random(seed)
    first = grain.MapDataset.range(5)
    in_order = random_plan(rng, MAP_STAGES, first)
    yield in_order
    yield random_plan(rng, ITER_STAGES, first.to_iter_dataset())
    yield random_plan(rng, ITER_STAGES[:-1], in_order.to_iter_dataset())
    yield random_plan(rng, (MAP_STAGES[3],), first)
    yield random_plan(rng, (ITER_STAGES[-1],), first.to_iter_dataset())


def spec_of(ds):
    try:
        return experimental.get_element_spec(ds)
    except (ValueError, NotImplementedError):
        return None


def share_of(ds, *, sequential=False):
    in_order = ds.to_iter_dataset() if hasattr(ds, "to_iter_dataset") else ds
    return sliced(node_of(in_order), 0, 2, sequential=sequential)


def unseeded(ds):
    with pytest.raises(ValueError, match="requires a seed"):
        ds.random_map(lambda x, _: x)


# What is asked of a plan.
QUESTIONS = {
    "repr": repr,
    "str": str,
    "describe": lambda ds: str(ds.describe()),
    "html": lambda ds: ds._repr_html_(),
    "spec": spec_of,
    "checkpoint": lambda ds: pipeline.described(node_of(ds)),
    "fingerprint": lambda ds: Fingerprint.of(node_of(ds), "memory"),
    "numbers": lambda ds: numbered(node_of(ds)),
    "walk up": lambda ds: list(node_of(ds).walk_up()),
    "pickle": lambda ds: pickle.loads(by_value.dumps(ds)),
    "copy": copy.deepcopy,
    "share": share_of,
    "consecutive share": lambda ds: share_of(ds, sequential=True),
    "seeds": lambda ds: ds.seed(3).random_map(lambda x, _: x),
    "no seeds": unseeded,
}
PROGRAM = """
import sys
sys.path[:0] = {path!r}
import test_shared_parents as own
for seed in range({first}, {last}):
    for number, ds in enumerate(own.plans(seed)):
        for name, ask in own.QUESTIONS.items():
            print(seed, number, name, flush=True)
            try:
                ask(ds)
            except ValueError:
                if "share" not in name:  # some cannot be split
                    raise
"""


def test_questions_take_time_by_the_number_of_nodes():
    """What walks all ways never answers, so it runs in a process that can be ended."""
    path = [str(Path(__file__).parent)]
    program = PROGRAM.format(path=path, first=0, last=6)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired as stopped:
        pytest.fail(f"stopped after {stopped.stdout[-500:].decode()}")
    assert done.returncode == 0, done.stderr


def test_the_note_of_an_error_takes_time_by_the_number_of_batches():
    def fails(batch):
        if batch.ravel()[0] == 3:
            raise LookupError("three")
        return batch

    ds = grain.MapDataset.range(5).to_iter_dataset()
    for _ in range(
        31
    ):  # 2 ** 31 questions, if each asked its parent twice; NumPy 1 has 32 dimensions
        ds = ds.batch(1).map(lambda x: x)
    with pytest.raises(LookupError) as caught:
        list(ds.map(fails))
    assert "from record 3 of" in "".join(caught.value.__notes__)


def chain(length, ds):
    return functools.reduce(lambda ds, _: ds.map(lambda x: x), range(length), ds)


@pytest.mark.parametrize("read", ["to_iter_dataset", "mp_prefetch"])
def test_workers_run_as_many_maps_as_this_process_does(read):
    ds = chain(1_500, grain.MapDataset.range(3))
    if read == "mp_prefetch":
        options = grain.MultiprocessingOptions(num_workers=1)
        iterator = iter(ds.to_iter_dataset().mp_prefetch(options))
    else:
        iterator = iter(ds.to_iter_dataset(grain.ReadOptions(num_workers=1)))
    with iterator:
        assert list(iterator) == [0, 1, 2]


@pytest.mark.parametrize("length", [24, 25, 26, 624, 625, 626, 1_251, 3_000])
def test_plans_of_any_length_are_pickled_and_copied(length):
    for first in (grain.MapDataset.range(3), grain.MapDataset.range(3).to_iter_dataset()):
        ds = functools.reduce(lambda ds, _: ds.map(abs), range(length), first)
        ds = ds if length > 1_000 else ds.batch(1).map(abs)
        for copied in (pickle.loads(pickle.dumps(ds)), copy.deepcopy(ds)):
            assert len(list(node_of(copied).walk())) == len(list(node_of(ds).walk()))
            assert repr(copied) == repr(ds)
        if length < 100:
            assert [int(batch[0]) for batch in copied] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(30))
def test_what_is_shared_stays_shared(seed):
    rng = random.Random(seed)
    made = [grain.MapDataset.range(5), Own([grain.MapDataset.range(5), grain.MapDataset.range(5)])]
    for _ in range(rng.randint(10, 200)):
        some = rng.sample(made[-4:], 2)
        if rng.random() < 0.5:
            made.append(experimental.ZipMapDataset(some).map(lambda pair: pair[0]))
        else:
            made.append(Own(some) if rng.random() < 0.3 else some[0].map(abs))
    for ds in (made[-1], rng.choice(made)):
        copied = pickle.loads(by_value.dumps(ds))
        assert len(list(node_of(copied).walk())) == len(list(node_of(ds).walk()))
        assert str(node_of(copied)) == str(node_of(ds))
        fingerprints = [Fingerprint.of(node_of(each), "memory").digest for each in (copied, ds)]
        assert fingerprints[0] == fingerprints[1]


class Alternate(grain.transforms.DatasetSelectionMap):
    """One element of either dataset in turn."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index % 2, index


JOINS = (
    lambda a, b: grain.MapDataset.mix([a, b], [1, 2])[:5],
    lambda a, b: grain.MapDataset.concatenate([a, b])[:5],
    lambda a, b: grain.MapDataset.mix([a, b, a]).shuffle(seed=1)[:5],
    lambda a, _: grain.MapDataset.concatenate([a, a]).repeat(2)[1:6],
)
READING_ONE = (*JOINS, lambda a, b: grain.MapDataset.select_from_datasets([a, b], Alternate()))


def resumed(ds):
    iterator = iter(ds.to_iter_dataset())
    next(iterator)
    state = iterator.get_state()
    rest = list(iterator)
    iterator.set_state(state)
    assert list(iterator) == rest


def failing(ds):
    def fails(_):
        raise LookupError

    with pytest.raises(LookupError) as caught:
        list(ds.map(fails))
    assert "from record" in "".join(caught.value.__notes__)


# How a plan is run, of which each element comes from one record.
RUNS = {
    "element": lambda ds: [ds[index] for index in range(5)],
    "lists": list,
    "in line": lambda ds: list(
        ds.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    ),
    "threads": lambda ds: list(ds.to_iter_dataset()),
    "thread prefetch": lambda ds: list(
        experimental.ThreadPrefetchIterDataset(ds.to_iter_dataset(), prefetch_buffer_size=2)
    ),
    "state": resumed,
    "slice": lambda ds: list(ds[1:3]),
    "batch": lambda ds: list(ds.batch(2)),
    "elastic": lambda ds: next(
        experimental.ElasticIterator(ds, 2, grain.sharding.ShardOptions(0, 1))
    ),
    "notes": failing,
}
MAX_CALLS = 200_000  # of functions, where the plan has 60 nodes


def within_limit(call, limit):
    """What `call` returns, unless it calls too many functions of Python in this thread."""
    num_calls = 0

    def count(_frame, event, _argument):
        nonlocal num_calls
        if event == "call":
            num_calls += 1
            if num_calls > limit:
                raise TooManyError

    class TooManyError(BaseException):
        pass

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return call()
    except TooManyError:
        pytest.fail(f"more than {limit} calls")
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("run", RUNS)
def test_joins_of_the_same_datasets_take_work_by_the_number_of_nodes(run):
    for seed in range(3):
        first = grain.MapDataset.source([3, 1, 4, 1, 5])
        # No note says which record was selected.
        ds = random_plan(random.Random(seed), JOINS if run == "notes" else READING_ONE, first)
        within_limit(lambda ds=ds: RUNS[run](ds), MAX_CALLS)


@pytest.mark.parametrize("seed", range(20))
def test_joins_of_shared_datasets_have_the_elements_of_joins_of_copies(seed):
    def plan(first):
        """Like `random_plan`, where `first()` returns one dataset, or another each time."""
        rng, made = random.Random(seed), [first, lambda: first().map(abs)]
        for _ in range(5):
            pair, stage = rng.sample(made[-2:], 2), rng.choice(READING_ONE)
            maps, shuffles = rng.random() < 0.3, rng.random() < 0.3

            def make(pair=pair, stage=stage, maps=maps, shuffles=shuffles):
                ds = stage(*(one() for one in pair))
                ds = ds.random_map(lambda x, rng: x + int(rng.integers(99))) if maps else ds
                return ds.shuffle(seed=2) if shuffles else ds

            made.append(make if is_copied else functools.cache(make))
        return made[-1]()

    is_copied = False
    source = grain.MapDataset.source([-3, 1, -4, 1, 5]).seed(7)
    shared = plan(lambda: source)
    is_copied = True
    copied = plan(lambda: grain.MapDataset.source([-3, 1, -4, 1, 5]).seed(7))
    assert [shared[at] for at in range(15)] == [copied[at] for at in range(15)]
    assert list(shared.to_iter_dataset()) == list(copied.to_iter_dataset())


def test_plans_that_are_zipped_with_themselves_are_compiled_once(monkeypatch):
    numbers = []
    of = Program.__init__
    monkeypatch.setattr(
        Program, "__init__", lambda self, *args: numbers.append(0) or of(self, *args)
    )
    ds = grain.MapDataset.range(5)
    for _ in range(DEPTH):
        ds = experimental.ZipMapDataset([ds, ds]).map(lambda pair: pair[0])
    within_limit(lambda: compiled(node_of(ds)), MAX_CALLS)
    assert len(numbers) == DEPTH + 1


def test_a_dataset_that_is_zipped_with_itself_has_an_element_for_each_use():
    """As elements may be changed in place, and functions may return another each time."""
    calls = []

    def new(x):
        calls.append(x)
        return [x]

    def change(pair):
        pair[0].append(len(calls))
        return pair

    ds = grain.MapDataset.range(3).map(new)
    for zipped in (
        experimental.ZipMapDataset([ds, ds]).map(change),
        experimental.ZipMapDataset([ds, ds]).map(change).to_iter_dataset(),
        experimental.ZipIterDataset([ds.to_iter_dataset()] * 2).map(change),
    ):
        calls.clear()
        for x, (changed, own) in enumerate(zipped):
            assert own == [x]
            assert changed[0] == x
            assert len(changed) == 2
        assert sorted(calls) == [0, 0, 1, 1, 2, 2]
