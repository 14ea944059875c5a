"""Parts of a pipeline that ask for the same workers share them: elements, states and errors."""

import contextlib
import itertools
import logging
import os
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
from worker_harness import SOON_S, all_of, gone, workers, zygotes

import grainmill as grain
from grainmill import experimental
from grainmill._evaluate.prefetch import worker_tasks
from grainmill._workers.failures import WorkerError
from grainmill._workers.pool import WorkerPool

JOINS = {
    "mix": grain.IterDataset.mix,
    "zip": experimental.ZipIterDataset,
    "mix of mixes": lambda parts: grain.IterDataset.mix(
        [grain.IterDataset.mix(parts[:2]), *parts[2:]]
    ),
}


def parts(function, count, length=40, **options):
    options = grain.ReadOptions(**{"num_workers": 2, **options})
    return [
        grain.MapDataset.range(1000 * part, 1000 * part + length)
        .map(function)
        .to_iter_dataset(options)
        for part in range(count)
    ]


def with_pid(x):
    return x, os.getpid()


@pytest.mark.parametrize("join", JOINS)
def test_parts_that_ask_for_the_same_share_the_workers_of_one(join):
    inline = all_of(iter(JOINS[join](parts(lambda x: (x, 0), 12, num_workers=0))))
    before = {process.pid for process in workers()}
    with iter(JOINS[join](parts(with_pid, 12))) as iterator:
        found = all_of(iterator, 5)
        running = [process for process in workers() if process.pid not in before]
        assert len(running) == 2
        found += all_of(iterator)
    assert gone(running)
    flat = np.array(found).reshape(-1, 2)
    assert flat[:, 0].tolist() == np.array(inline).reshape(-1, 2)[:, 0].tolist()
    assert set(flat[:, 1].tolist()) <= {process.pid for process in running}


@pytest.mark.parametrize("most", ["MIN_PROCESSES", "num_cores"])
@pytest.mark.parametrize(("num_parts", "num_processes"), [(1, 2), (2, 4), (3, 6), (9, 6)])
def test_parts_share_workers_once_there_are_enough(monkeypatch, most, num_parts, num_processes):
    monkeypatch.setattr(worker_tasks, most, 5 if most == "MIN_PROCESSES" else lambda: 5)
    remote = [
        part.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)) for part in ranges(num_parts)
    ]
    for joined in (parts(lambda x: x, num_parts), remote):
        before = {process.pid for process in workers()}
        with iter(grain.IterDataset.mix(joined)) as iterator:
            all_of(iterator, 20)
            running = [process for process in workers() if process.pid not in before]
        assert len(running) == num_processes
        assert gone(running)


def ranges(count):
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return [grain.MapDataset.range(40).to_iter_dataset(options) for _ in range(count)]


def test_parts_that_ask_for_others_have_their_own():
    options = [{}, {"num_threads": 1}, {"worker_init_fn": print}, {"timeout_s": 9}]
    joined = [part for each in options for part in parts(lambda x: x, 2, **each)]
    before = {process.pid for process in workers()}
    with iter(grain.IterDataset.mix(joined)) as iterator:
        all_of(iterator, 20)
        assert len([each for each in workers() if each.pid not in before]) == 2 * len(options)


def test_workers_are_shared_by_parts_of_one_thread_only():
    """Each of these threads waits for results of its own workers."""
    threads = [
        experimental.ThreadPrefetchIterDataset(
            grain.IterDataset.mix(parts(lambda x: x, 3, length=500)), prefetch_buffer_size=3
        )
        for _ in range(2)
    ]
    before = {process.pid for process in workers()}
    with iter(experimental.ZipIterDataset(threads)) as iterator:
        found = all_of(iterator, 10)
        assert len([each for each in workers() if each.pid not in before]) == 4
        found += all_of(iterator)
    rounds = zip(range(500), range(1000, 1500), range(2000, 2500), strict=True)
    assert found == [(x, x) for x in itertools.chain.from_iterable(rounds)]


# --- random pipelines ----------------------------------------------------------------------------


def random_part(rng, number, options):
    length = rng.choice([1, 7, 60])
    ds = grain.MapDataset.range(1000 * number, 1000 * number + length)
    if rng.random() < 0.5:
        ds = ds.shuffle(seed=number)
    ds = ds.map(rng.choice([large, small, sometimes_slow]))
    if rng.random() < 0.3:
        ds = ds.filter(lambda x: np.size(x) < 9999)
    ds = ds.repeat(rng.choice([1, 3, None]))
    read = grain.ReadOptions(
        **{**rng.choice(options), "prefetch_buffer_size": rng.choice([1, 3, 50, 500])}
    )
    ds = ds.to_iter_dataset(read)
    if rng.random() < 0.4:
        ds = ds.batch(rng.choice([1, 4]), drop_remainder=True)
    if rng.random() < 0.2:
        ds = experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2)
    return ds


def random_pipeline(seed, *, in_workers):
    rng = random.Random(seed)
    num_workers = rng.choice([1, 2, 3])
    options = [{"num_threads": 1}, {"num_threads": 4}, {"ram_budget_bytes": 1 << 20}]
    options = [{**each, "num_workers": num_workers * in_workers} for each in options]
    options = options[: rng.choice([1, 1, 3])]
    joined = [random_part(rng, number, options) for number in range(rng.choice([2, 3, 9]))]
    if rng.random() < 0.3:
        return experimental.ZipIterDataset(joined, strict=False)
    weights = [rng.choice([1, 2, 30]) for _ in joined]
    return grain.IterDataset.mix(joined, weights)


@pytest.mark.parametrize("seed", range(SEED, SEED + cases(12, 400)))
def test_elements_and_states_are_those_without_workers(seed):
    rng = random.Random(seed)
    with iter(random_pipeline(seed, in_workers=False)) as oracle:
        expected, states = [], [oracle.get_state()]
        for element in itertools.islice(oracle, 150):
            expected.append(repr(element))
            states.append(oracle.get_state())
    with iter(random_pipeline(seed, in_workers=True)) as iterator:
        at = 0
        for _ in range(6):
            until = rng.randint(at, len(expected))
            assert [repr(x) for x in itertools.islice(iterator, until - at)] == expected[at:until]
            assert iterator.get_state() == states[until]
            if rng.random() < 0.3:
                iterator.start_prefetch()
            at = rng.randint(0, len(expected))
            iterator.set_state(states[at])
        rest = [repr(x) for x in itertools.islice(iterator, len(expected) - at)]
        assert rest == expected[at:]


# --- death ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEED, SEED + cases(8, 200)))
def test_death_is_an_error_of_the_element_it_was_at_only(seed, tmp_path):
    """One error, at the place of its task, however far ahead of the others its part is."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 6])
    killer = 1000 * rng.randrange(count) + rng.randrange(40)
    slow_ms = rng.choice([0, 0, 3])
    options = {"num_workers": rng.choice([1, 2]), "num_threads": rng.choice([1, 4])}

    def dies(x):
        if x == killer and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(slow_ms / 1000 * (x % 5 == 0))
        return x

    weights = [rng.choice([1, 1, 5]) for _ in range(count)]
    expected = all_of(iter(grain.IterDataset.mix(parts(abs, count, num_workers=0), weights)))
    with iter(grain.IterDataset.mix(parts(dies, count, **options), weights)) as iterator:
        found, failure = raised(iterator)
        if options["num_threads"] == 1:  # else it was at several
            assert killer not in found
            # Else only if the elements before it in its task are asked for.
            assert failure is not None or killer not in expected
        if failure is not None and options["num_threads"] == 1:
            assert f"while computing element {killer % 1000}:" in str(failure)
        rest, again = raised(iterator)
        assert again is None
        assert [*found, *rest] == expected


def test_an_element_that_always_kills_stops_its_part_only():
    def dies(x):
        if x == 1005:
            os._exit(3)
        return x

    joined = parts(dies, 3)
    expected = all_of(iter(grain.IterDataset.mix(parts(abs, 3, num_workers=0))))
    with iter(grain.IterDataset.mix(joined)) as iterator:
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
    expected = all_of(iter(grain.IterDataset.mix(parts(abs, 5, 3000, num_workers=0))), 4000)
    found, errors = [], 0
    with iter(grain.IterDataset.mix(parts(abs, 5, 3000, prefetch_buffer_size=20))) as iterator:
        while len(found) < len(expected):
            try:
                found += all_of(iterator, min(rng.randrange(400), len(expected) - len(found)))
            except WorkerError:
                errors += 1
                found = expected[: len(found)]
                found += expected[len(found) : _position(iterator)]
            for process in workers()[: rng.randrange(2)]:
                with contextlib.suppress(Exception):
                    process.kill()
    assert found == expected
    assert errors


def _position(iterator):
    """How many elements were delivered, by the state of the mixture."""
    states = re.findall(r"'next_index': (\d+)", repr(iterator.get_state()))
    return sum(map(int, states))


def test_what_the_workers_get_is_named_where_it_cannot_be_sent():
    lock = threading.Lock()
    joined = [*parts(abs, 2), *parts(lambda x: (x, lock), 1)]
    with (
        iter(grain.IterDataset.mix(joined)) as iterator,
        pytest.raises(TypeError, match="cannot pickle"),
    ):
        next(iterator)


def test_function_that_raises_names_its_worker_and_element():
    def raises(x):
        if x == 1007:
            raise LookupError(f"no {x}")
        return x

    with iter(grain.IterDataset.mix(parts(raises, 3))) as iterator:
        found = []
        with pytest.raises(LookupError, match="no 1007") as caught:
            found.extend(iterator)
        assert found == [x for at in range(8) for x in (at, 1000 + at, 2000 + at)][:22]
    notes = "\n".join(caught.value.__notes__)
    assert re.search(r"in worker [01], at element 7:", notes)


# --- waits ---------------------------------------------------------------------------------------


def test_a_part_is_not_held_up_by_the_prefetch_of_others(monkeypatch):
    """What is awaited runs after two tasks at most, though others may prefetch hundreds."""
    unfinished = []
    submit = WorkerPool.submit

    def recording_submit(self, worker, *task):
        pending = submit(self, worker, *task)
        unfinished.append(len(self._unfinished[worker]))
        return pending

    monkeypatch.setattr(WorkerPool, "submit", recording_submit)
    joined = parts(sometimes_slow, 9, length=500, num_threads=1)
    with iter(grain.IterDataset.mix(joined, [1, 50, 3, 1, 1, 1, 1, 1, 1])) as iterator:
        iterator.start_prefetch()
        all_of(iterator, 400)
    assert max(unfinished) <= 3


def test_stall_names_the_element_that_the_worker_is_at(caplog):
    """Which is of another part than the element that is awaited."""

    def hangs(x):
        if x == 1002:
            time.sleep(1e9)
        return x

    caplog.set_level(logging.WARNING, "grainmill")
    options = {"num_workers": 1, "num_threads": 1, "stall_warning_s": 0.3}
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
    assert "from record 2 of" in message


def test_small_budgets_hold_nothing_up():
    mebibyte = 1 << 20
    joined = parts(lambda x: np.full(mebibyte, x % 256, np.uint8), 6, ram_budget_bytes=mebibyte)
    with iter(grain.IterDataset.mix(joined, [1, 1, 9, 1, 1, 4])) as iterator:
        kept = all_of(iterator, 60)
    assert all(element[0] == element[-1] for element in kept)


def test_each_part_reports_its_workers_and_stages():
    def slow(x):
        time.sleep(0.002)
        return x

    # Idle threads of a worker would compute some elements of a task meanwhile.
    joined = [*parts(slow, 1, 200, num_threads=1), *parts(abs, 1, 200, num_threads=1)]
    with iter(grain.IterDataset.mix(joined)) as iterator:
        all_of(iterator)
        stages = iterator.stats()["stages"]
    owners = [stage for stage in stages if stage.get("workers")]
    assert len(owners) == 2
    for stage in owners:
        assert 1 <= len(stage["workers"]) <= 2
        assert 1 <= sum(worker["elements"] for worker in stage["workers"]) <= 200
    # What a worker did for the other part does not count.
    busy_s = {
        stage["inputs"][0]: [worker["busy_s"] / worker["elements"] for worker in stage["workers"]]
        for stage in owners
    }
    (slow_stage,) = [n for n, stage in enumerate(stages) if "=slow " in stage["name"]]
    assert min(busy_s[slow_stage]) >= 0.002
    assert len(busy_s) == 2


def test_nothing_is_left_where_a_mixture_is_dropped():
    iterator = iter(grain.IterDataset.mix(parts(abs, 4)))
    all_of(iterator, 10)
    processes = [*workers(), *zygotes()]
    del iterator
    assert gone(processes)
