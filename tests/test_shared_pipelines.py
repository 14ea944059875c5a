"""Parts of a pipeline that ask `mp_prefetch` for the same workers share them."""

import contextlib
import itertools
import logging
import os
import pickle
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
from effort import SEED, cases
from shared_parts import (
    few_processes,  # noqa: F401 - which all tests here use
    large,
    raised,
    small,
    sometimes_slow,
)
from worker_harness import SOON_S, all_of, gone, run_script, workers, zygotes

import grainmill as grain
from grainmill import experimental
from grainmill._iterators.workers import worker_shards
from grainmill._stats.stalls import Stall
from grainmill._workers.failures import WorkerError
from grainmill._workers.pool import WorkerPool

JOINS = {
    "mix": grain.IterDataset.mix,
    "zip": experimental.ZipIterDataset,
    "mix of mixes": lambda parts: grain.IterDataset.mix(
        [grain.IterDataset.mix(parts[:2]), *parts[2:]]
    ),
}
# Others compute elements ahead of those that a worker is at.
ALONE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def parts(function, count, length=40, *, init=None, **options):
    options = grain.MultiprocessingOptions(**{"num_workers": 2, **options})
    return [
        grain.MapDataset.range(1000 * part, 1000 * part + length)
        .map(function)
        .to_iter_dataset(ALONE)
        .mp_prefetch(options, worker_init_fn=init)
        for part in range(count)
    ]


def with_pid(x):
    return x, os.getpid()


@pytest.fixture
def on_threads(monkeypatch):
    """A context in which workers are threads of this process, those of each part its own."""

    @contextlib.contextmanager
    def patched():
        with monkeypatch.context() as patch:
            patch.setattr(worker_shards, "workers_are_processes", lambda: False)
            yield

    return patched


@pytest.mark.parametrize("join", JOINS)
def test_parts_that_ask_for_the_same_share_worker_processes(join, on_threads):
    with on_threads():
        expected = all_of(iter(JOINS[join](parts(lambda x: (x, 0), 12))))
    before = {process.pid for process in workers()}
    with iter(JOINS[join](parts(with_pid, 12))) as iterator:
        found = all_of(iterator, 5)
        running = [process for process in workers() if process.pid not in before]
        assert len(running) == 2
        found += all_of(iterator)
    assert gone(running)
    flat = np.array(found).reshape(-1, 2)
    assert flat[:, 0].tolist() == np.array(expected).reshape(-1, 2)[:, 0].tolist()
    # Each worker runs its share of each part.
    of_shares = {(x // 1000, x % 2): pid for x, pid in flat.tolist()}
    assert len(of_shares) == 24
    assert {of_shares[part, 0] for part in range(12)} | {of_shares[0, 1]} == set(of_shares.values())
    assert all(of_shares[part, 1] == of_shares[0, 1] for part in range(12))


def test_parts_that_ask_for_others_have_their_own():
    options = [{}, {"init": print}, {"timeout_s": 9}, {"ram_budget_bytes": 1 << 28}]
    joined = [part for each in options for part in parts(abs, 2, **each)]
    joined += parts(abs, 2, per_worker_buffer_size=7)  # which may differ
    before = {process.pid for process in workers()}
    with iter(grain.IterDataset.mix(joined)) as iterator:
        all_of(iterator, 30)
        assert len([each for each in workers() if each.pid not in before]) == 2 * len(options)


def test_each_thread_and_each_iterator_has_its_own():
    def behind_threads():
        mixed = [grain.IterDataset.mix(parts(abs, 2)) for _ in range(2)]
        return [
            experimental.ThreadPrefetchIterDataset(each, prefetch_buffer_size=2) for each in mixed
        ]

    before = {process.pid for process in workers()}
    ds = experimental.ZipIterDataset(behind_threads())
    with iter(ds) as iterator, iter(ds) as other:
        for each in (iterator, other):
            assert all_of(each, 10) == [(x, x) for i in range(5) for x in (i, 1000 + i)]
        assert len([each for each in workers() if each.pid not in before]) == 2 * 2 * 2


def test_what_is_called_first_is_called_once_in_each_worker(tmp_path):
    def init(worker, num_workers):
        (tmp_path / f"{worker} of {num_workers}, {os.getpid()}").touch()

    with iter(grain.IterDataset.mix(parts(abs, 5, init=init))) as iterator:
        all_of(iterator)
    names = sorted(path.name.split(",")[0] for path in tmp_path.iterdir())
    assert names == ["0 of 2", "1 of 2"]


# --- random pipelines ----------------------------------------------------------------------------


def first_of(x):
    return int(np.ravel(x["x"] if isinstance(x, dict) else x)[0])


class Doubled(grain.IterDataset):
    """A user's own dataset, whose iterator has a state of its own."""

    def __iter__(self):
        return DoubledIterator(iter(self._parent))


class DoubledIterator(grain.DatasetIterator):
    def __init__(self, parent):
        super().__init__()
        self._iterator = parent
        self._again = None

    def __next__(self):
        if self._again is not None:
            element, self._again = self._again, None
            return element
        self._again = next(self._iterator)
        return self._again

    def get_state(self):
        return {"parent": self._iterator.get_state(), "again": self._again}

    def set_state(self, state):
        self._iterator.set_state(state["parent"])
        self._again = state["again"]


def random_part(rng, number, options, **own):
    length = rng.choice([0, 1, 7, 60])
    ds = grain.MapDataset.range(1000 * number, 1000 * number + length)
    if rng.random() < 0.5:
        ds = ds.shuffle(seed=number)
    ds = ds.map(rng.choice([large, small, sometimes_slow])).repeat(rng.choice([1, 3]))
    ds = ds.to_iter_dataset(grain.ReadOptions(num_threads=rng.choice([0, 3])))
    for stage in rng.sample(["filter", "batch", "double", "mix", "thread"], rng.choice([0, 1, 2])):
        if stage == "filter":
            ds = ds.filter(lambda x: first_of(x) % 3)
        elif stage == "double":
            ds = Doubled(ds)
        elif stage == "mix":
            ds = grain.IterDataset.mix([ds, ds], [1, 2])
        elif stage == "thread":
            ds = experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2)
        else:
            ds = ds.batch(rng.choice([1, 4]))
    multi = grain.MultiprocessingOptions(
        **{**rng.choice(options), **own}, per_worker_buffer_size=rng.choice([1, 2, 30])
    )
    ds = ds.mp_prefetch(multi, sequential_slice=rng.random() < 0.3)
    if rng.random() < 0.5:
        ds = experimental.RepeatIterDataset(ds, num_epochs=rng.choice([2, None]))
    if rng.random() < 0.2:
        ds = experimental.LimitIterDataset(ds, 5)
    if rng.random() < 0.1:
        ds = experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2)
    return ds


def random_pipeline(seed, *, shared=True):
    rng = random.Random(seed)
    num_workers = rng.choice([1, 2, 3])
    options = [{}, {"timeout_s": 900}, {"ram_budget_bytes": 1 << 20}]
    options = [{**each, "num_workers": num_workers} for each in options[: rng.choice([1, 1, 3])]]
    joined = []
    for number in range(rng.choice([2, 3, 6])):
        own = {} if shared else {"timeout_s": 1000 + number}
        joined.append(random_part(rng, number, options, **own))
    if rng.random() < 0.2:
        return experimental.ZipIterDataset(joined, strict=False)
    if rng.random() < 0.3:
        return experimental.InterleaveIterDataset(joined, cycle_length=rng.choice([2, 9]))
    weights = [rng.choice([1, 2, 30]) for _ in joined]
    return grain.IterDataset.mix(joined, weights)


def texts(iterator, count):
    return [repr(element) for element in itertools.islice(iterator, count)]


REST = """
import pickle, sys
from test_shared_pipelines import random_pipeline, texts
seed, state, count = pickle.loads(bytes.fromhex(sys.stdin.read()))
with iter(random_pipeline(seed)) as iterator:
    iterator.set_state(state)
    print(pickle.dumps(texts(iterator, count)).hex())
"""


@pytest.mark.parametrize("seed", range(SEED, SEED + cases(4, 400)))
def test_elements_and_states_are_those_of_parts_with_their_own(seed):
    rng = random.Random(seed)
    with iter(random_pipeline(seed, shared=False)) as oracle:
        expected, states = [], [oracle.get_state()]
        for element in itertools.islice(oracle, 120):
            expected.append(repr(element))
            states.append(oracle.get_state())
    with iter(random_pipeline(seed)) as iterator:
        for at, element in enumerate(expected):
            assert repr(iterator.get_state()) == repr(states[at])
            assert repr(next(iterator)) == element
        for _ in range(4):
            at = rng.randint(0, len(expected))
            iterator.set_state(states[at])
            if rng.random() < 0.3:
                iterator.start_prefetch()
            until = rng.randint(at, len(expected))
            assert texts(iterator, until - at) == expected[at:until]
            assert repr(iterator.get_state()) == repr(states[until])
    if not seed % 5:
        at = rng.randint(0, len(expected))
        job = pickle.dumps((seed, states[at], len(expected) - at)).hex()
        done = run_script(REST, input=job)
        assert done.returncode == 0, done.stderr
        assert pickle.loads(bytes.fromhex(done.stdout)) == expected[at:]


# --- failures ------------------------------------------------------------------------------------


def of_own_workers(function, count, length=40, **options):
    """The parts, each with workers of its own."""
    return [
        parts(function, count, length, timeout_s=900 + part, **options)[part]
        for part in range(count)
    ]


@pytest.mark.parametrize("seed", range(SEED, SEED + cases(4, 100)))
def test_what_a_function_raises_is_that_of_parts_with_their_own(seed):
    rng = random.Random(seed)
    count = rng.choice([2, 3, 6])
    bad = {1000 * rng.randrange(count) + rng.randrange(8) for _ in range(3)}
    options = {"per_worker_buffer_size": rng.choice([1, 9]), "num_workers": rng.choice([1, 2])}

    def raises(x):
        if x in bad:
            raise LookupError(f"no {x}")
        return x

    results = []
    for joined in (of_own_workers(raises, count, **options), parts(raises, count, **options)):
        with iter(grain.IterDataset.mix(joined)) as iterator:
            found = [raised(iterator, LookupError) for _ in range(3)]
        notes = [
            re.findall(r"in worker \d, at element \d+:", "".join(e.__notes__)) for _, e in found
        ]
        results.append(
            [(xs, str(failure), note) for (xs, failure), note in zip(found, notes, strict=True)]
        )
        assert all(map(len, notes))
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", range(SEED, SEED + cases(4, 200)))
def test_death_is_an_error_of_the_part_it_was_at_only(seed, tmp_path):
    rng = random.Random(seed)
    count = rng.choice([2, 3, 6])
    num_workers = rng.choice([1, 2])
    part, at = rng.randrange(count), rng.randrange(40)
    slow_ms = rng.choice([0, 0, 3])
    options = {"num_workers": num_workers, "per_worker_buffer_size": rng.choice([1, 6, 20])}

    def dies(x):
        if x == 1000 * part + at and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(slow_ms / 1000 * (x % 5 == 0))
        return x

    weights = [rng.choice([1, 1, 5]) for _ in range(count)]
    ds = grain.IterDataset.mix(parts(dies, count, **options), weights)
    expected = all_of(iter(grain.IterDataset.mix(parts(abs, count, num_workers=1), weights)))
    with iter(ds) as iterator:
        found, failure = raised(iterator)
        assert 1000 * part + at not in found or failure is None
        if 1000 * part + at in expected:
            assert f"worker {at % num_workers} was killed by SIGKILL" in str(failure)
        if failure is not None:
            assert f"while computing element {at}:" in str(failure)
            assert f"@ input_index={part}" in "".join(failure.__notes__)
        rest, again = raised(iterator)
        assert again is None
        assert [*found, *rest] == expected


def test_what_was_computed_before_a_death_comes_before_its_error(tmp_path):
    """The consumer waits for an element of another part when the worker dies."""

    def dies(x):
        if x == 1003 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os._exit(3)
        time.sleep(0.03)  # elements this slow are sent one by one
        return x

    joined = parts(dies, 2, 60, num_workers=1, per_worker_buffer_size=4)
    with iter(grain.IterDataset.mix(joined, [15, 1])) as iterator:
        found, failure = raised(iterator)
        rest, _ = raised(iterator)
    assert "while computing element 3:" in str(failure)
    assert [x for x in found if x >= 1000] == [1000, 1001, 1002]
    assert found + rest == all_of(
        iter(grain.IterDataset.mix(parts(abs, 2, 60, num_workers=1), [15, 1]))
    )


def test_an_element_that_always_kills_stops_its_part_only():
    def dies(x):
        if x == 1005:
            os._exit(3)
        return x

    expected = all_of(iter(grain.IterDataset.mix(parts(abs, 3))))
    with iter(grain.IterDataset.mix(parts(dies, 3))) as iterator:
        found = []
        for _ in range(3):
            more, failure = raised(iterator)
            found += more
            assert "while computing element 5: " in str(failure)
        assert found == expected[: expected.index(1005)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEED, SEED + cases(2, 20)))
def test_deaths_at_random_moments_lose_nothing(seed):
    rng = random.Random(seed)
    expected = all_of(iter(grain.IterDataset.mix(parts(abs, 5, 1500, num_workers=1))), 4000)
    joined = parts(abs, 5, 1500, per_worker_buffer_size=5)
    found, errors = [], 0
    with iter(grain.IterDataset.mix(joined)) as iterator:
        while len(found) < len(expected):
            try:
                for element in itertools.islice(iterator, rng.randrange(400)):
                    found.append(element)
                    if len(found) == len(expected):
                        break
            except WorkerError:
                errors += 1
            for process in workers()[: rng.randrange(2)]:
                with contextlib.suppress(Exception):
                    process.kill()
    assert found == expected
    assert errors


def test_a_death_at_rest_names_no_element_of_another_part():
    """The worker has last computed an element of another part than the one that is asked next."""
    with iter(grain.IterDataset.mix(parts(abs, 2, num_workers=1), [3, 1])) as iterator:
        expected = all_of(iterator, 3)
        time.sleep(0.2)
        for process in workers():
            process.kill()
        found, failure = raised(iterator)
        more, again = raised(iterator)
    assert "was killed by SIGKILL" in str(failure)
    number = re.search(r"while computing element (\d+)", str(failure))
    assert number is None or int(number[1]) < 40
    assert again is None
    assert [*expected, *found, *more] == all_of(
        iter(grain.IterDataset.mix(parts(abs, 2, num_workers=1), [3, 1]))
    )


class OpensAt(grain.IterDataset):
    """Cannot be opened in workers before a file is there."""

    def __init__(self, parent, path):
        super().__init__(parent)
        self._path = path
        self._pid = os.getpid()

    def __iter__(self):
        if os.getpid() != self._pid and not self._path.exists():
            self._path.touch()
            raise LookupError("not yet")
        return iter(self._parent)


def test_a_part_that_cannot_be_opened_leaves_the_others_alone(tmp_path):
    options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=4)
    bad = OpensAt(grain.MapDataset.range(1000, 1040).to_iter_dataset(), tmp_path / "there")
    good = grain.MapDataset.range(40).to_iter_dataset()
    mixed = grain.IterDataset.mix([good.mp_prefetch(options), bad.mp_prefetch(options)])
    with iter(mixed) as iterator:
        found, failure = raised(iterator, LookupError)
        assert "in worker 0:" in "".join(failure.__notes__)
        running = workers()
        found += all_of(iterator)
        assert running == workers()
    assert found == [x for i in range(40) for x in (i, 1000 + i)]


# --- waits ---------------------------------------------------------------------------------------


def test_a_wait_counts_from_the_last_result_of_the_worker(monkeypatch):
    """It has tasks of other parts first, which may take longer together than the limit."""
    last_s, checks = [0.0], []
    handle = WorkerPool._handle

    def recording_handle(self, worker, message, files):
        handle(self, worker, message, files)
        last_s[0] = time.perf_counter()

    def slow(x):
        time.sleep(0.1)
        return x

    monkeypatch.setattr(WorkerPool, "_handle", recording_handle)
    monkeypatch.setattr(Stall, "check", lambda _, since_s: checks.append((since_s, last_s[0])))
    options = {"num_workers": 1, "stall_warning_s": 0.04, "per_worker_buffer_size": 4}
    with iter(grain.IterDataset.mix(parts(slow, 8, **options))) as iterator:
        iterator.start_prefetch()
        assert all_of(iterator, 8) == [1000 * part for part in range(8)]
    assert checks
    assert all(since_s >= result_s for since_s, result_s in checks)


def test_stall_names_the_element_that_the_worker_is_at(caplog):
    """Which is of another part than the element that is awaited."""

    def hangs(x):
        if x == 1002:
            time.sleep(1e9)
        return x

    caplog.set_level(logging.WARNING, "grainmill")
    options = {"num_workers": 1, "stall_warning_s": 0.3, "per_worker_buffer_size": 8}
    iterator = iter(grain.IterDataset.mix(parts(hangs, 3, **options)))

    def close_when_named():
        until = time.monotonic() + SOON_S
        while "in hangs\n" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
        iterator.close()

    closing = threading.Thread(target=close_when_named)
    closing.start()
    found = []
    with pytest.raises(ValueError, match="closed iterator"):
        found.extend(iterator)
    closing.join()
    order = [x for at in range(40) for x in (at, 1000 + at, 2000 + at)]
    assert found == order[: len(found)]
    assert len(found) <= order.index(1002)
    message = next(
        each.getMessage() for each in caplog.records if "in hangs\n" in each.getMessage()
    )
    assert message.startswith("worker 0 has returned no result for"), message
    assert "while computing element 2\n" in message
    assert "in the workers of" in message


def test_tasks_are_short_and_the_buffer_is_filled_by_several(tmp_path):
    """So that no part waits long for the prefetch of another, and slow elements are prefetched."""

    def slow(x):
        time.sleep(0.03)
        with (tmp_path / str(x // 1000)).open("a") as file:
            file.write(f"{x}\n")
        return x

    def num_computed(part):
        return len((tmp_path / str(part)).read_text().split())

    joined = parts(slow, 2, num_workers=1, per_worker_buffer_size=12)
    with iter(grain.IterDataset.mix(joined)) as iterator:
        all_of(iterator, 2)
        assert num_computed(0) <= 6
        all_of(iterator, 26)
        until = time.monotonic() + SOON_S
        while (num_computed(0), num_computed(1)) < (26, 26) and time.monotonic() < until:
            time.sleep(0.01)
        assert 26 <= num_computed(0) <= 28
        assert 26 <= num_computed(1) <= 28


def test_small_budgets_hold_nothing_up():
    mebibyte = 1 << 20

    def full(x):
        return np.full(mebibyte, x % 256, np.uint8)

    for budget in ("ram_budget_bytes", "per_worker_budget_bytes"):
        joined = parts(full, 6, **{budget: mebibyte})
        with iter(grain.IterDataset.mix(joined, [1, 1, 9, 1, 1, 4])) as iterator:
            kept = all_of(iterator, 60)
        assert all(element[0] == element[-1] for element in kept)


class WithLargeStates(grain.IterDataset):
    """Two of its states, as a result has them, nearly fill a packet, and a few packets a socket."""

    def __iter__(self):
        return LargeStateIterator(iter(self._parent))


class LargeStateIterator(grain.DatasetIterator):
    def __init__(self, parent):
        super().__init__()
        self._iterator = parent

    def __next__(self):
        time.sleep(0.003)  # so that it comes by itself, with its state
        return next(self._iterator)

    def get_state(self):
        return {"parent": self._iterator.get_state(), "more": "x" * 13_000}

    def set_state(self, state):
        self._iterator.set_state(state["parent"])


def test_many_large_messages_in_both_directions_hold_nothing_up():
    options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=2)
    joined = [
        WithLargeStates(grain.MapDataset.range(100 * part, 100 * part + 3).to_iter_dataset(ALONE))
        for part in range(40)
    ]
    mixed = grain.IterDataset.mix([part.mp_prefetch(options) for part in joined])
    expected = [100 * part + at for at in range(3) for part in range(40)]
    with iter(mixed) as iterator:
        assert all_of(iterator, 45) == expected[:45]
        iterator.set_state(iterator.get_state())
        iterator.start_prefetch()
        assert all_of(iterator) == expected[45:]


def test_each_part_reports_its_workers_and_stages():
    def slow(x):
        time.sleep(0.002)
        return x

    joined = [*parts(slow, 1, 200), *parts(abs, 1, 200)]
    with iter(grain.IterDataset.mix(joined)) as iterator:
        all_of(iterator)
        stages = iterator.stats()["stages"]
    owners = [stage for stage in stages if stage.get("workers")]
    assert len(owners) == 2
    for stage in owners:
        assert len(stage["workers"]) == 2
        assert 1 <= sum(worker["elements"] for worker in stage["workers"]) <= 200
    busy_s = [
        sum(worker["busy_s"] for worker in stage["workers"])
        / sum(worker["elements"] for worker in stage["workers"])
        for stage in owners
    ]
    assert max(busy_s) >= 0.002


def test_nothing_is_left_where_a_mixture_is_dropped():
    iterator = iter(grain.IterDataset.mix(parts(abs, 4)))
    all_of(iterator, 10)
    processes = [*workers(), *zygotes()]
    del iterator
    assert gone(processes)
