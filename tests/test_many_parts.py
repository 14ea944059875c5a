"""Mixtures and concatenations of many datasets, alike or not: each element and its origin."""

import pickle
import random
import time
from pathlib import Path

import numpy as np
import plan_oracle
import pytest

import grainmill as grain
from grainmill import MapDataset
from grainmill._evaluate.compile import compiled
from grainmill._evaluate.notes import stages_passed
from grainmill._plan import random_access as plan
from grainmill.array_record import ArrayRecordWriter
from grainmill.experimental import WindowShuffleMapDataset, ZipMapDataset
from grainmill.sources import ArrayRecordDataSource


class Plain:
    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.name * 1000 + index


class InBlocks(Plain):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Endless:
    def __getitem__(self, index):
        return index


class Pieces(grain.experimental.FlatMapTransform):
    max_fan_out = 3

    def flat_map(self, element):
        return [element, element + 1][: element % 3]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    made = []
    for number in range(12):
        with ArrayRecordWriter(str(folder / str(number)), "group_size:1") as writer:
            for record in range(3 + number):
                writer.write(bytes([number, record]))
        made.append(ArrayRecordDataSource(str(folder / str(number))))
    return made


def noisy(x, rng):
    return x, int(rng.integers(1 << 30))


def shared(x):
    return ("shared", x)


def kept(number):
    return lambda x: hash(x) % 5 != number % 5


# The first stages of a part; all except the first four join elements of others.
BEGINNINGS = {
    "range": lambda n, _: MapDataset.range(n, n + 4 + n % 7, 1 + n % 3),
    "long range": lambda n, _: MapDataset.range(2**70 + n, 2**70 + n + 9),
    "plain": lambda n, _: MapDataset.source(Plain(n, 3 + n % 5)),
    "blocks": lambda n, _: MapDataset.source(InBlocks(n, 3 + n % 5)),
    "files": lambda n, sources: MapDataset.source(sources[n % len(sources)]),
    "flat map": lambda n, _: MapDataset.range(n, n + 8)._flat_map(Pieces()),
    "zip": lambda n, _: ZipMapDataset([MapDataset.range(n, n + 5), MapDataset.range(5)]),
}

# Later stages: they use the number of the part, so that like parts differ in their elements.
STAGES = {
    "map": lambda ds, n: ds.map(lambda x: (n, x)),
    "shared map": lambda ds, _: ds.map(shared),
    "filter": lambda ds, n: ds.filter(kept(n)),
    "index": lambda ds, n: ds.map_with_index(lambda i, x: (n, i, x)),
    "random": lambda ds, n: ds.random_map(noisy, seed=n % 3),
    "shuffle": lambda ds, n: ds.shuffle(seed=n),
    "windows": lambda ds, n: WindowShuffleMapDataset(ds, window_size=2 + n % 3, seed=n),
    "slice": lambda ds, n: ds[n % 2 :: 1 + n % 2],
    "take": lambda ds, n: ds.slice([n % 2, 0, -1]),
    "repeat": lambda ds, _: ds.repeat(2),
    "same epoch": lambda ds, _: ds.repeat(3, reseed_each_epoch=False),
}


def part(sources, shape, number):
    ds = BEGINNINGS[shape[0]](number, sources)
    for stage in shape[1:]:
        ds = STAGES[stage](ds, number)
    return ds


def joined(chance, parts):
    if chance.random() < 0.5:
        return MapDataset.concatenate(parts)
    weights = None if chance.random() < 0.5 else [chance.uniform(0.5, 3) for _ in parts]
    return MapDataset.mix(parts, weights)


def many_parts(chance, sources, depth=2):
    """A mixture of mixtures: parts of a few shapes, each with numbers of its own."""
    shapes = [
        (chance.choice(list(BEGINNINGS)), *chance.choices(list(STAGES), k=chance.randrange(4)))
        for _ in range(chance.randint(1, 3))
    ]
    parts = []
    for _ in range(chance.choice([2, 5, 40])):
        if depth and chance.random() < 0.2:
            nested = many_parts(chance, sources, depth - 1)
            stage = chance.choice(["map", "shared map", "index", "random", "filter", "shuffle"])
            parts.append(STAGES[stage](nested, chance.randrange(9)))
        else:
            parts.append(part(sources, chance.choice(shapes), chance.randrange(60)))
    return joined(chance, [part for part in parts if len(part)] or [MapDataset.range(3)])


@pytest.mark.parametrize("seed", range(40))
def test_elements_and_origins_match_those_of_single_positions(seed, sources):
    chance = random.Random(seed)
    ds = many_parts(chance, sources)
    program = compiled(ds._node)
    for _ in range(3):
        start, count = chance.randrange(500), chance.randrange(1, 90)
        expected = [plan_oracle.element(ds._node, at) for at in range(start, start + count)]
        assert program.run(start, count) == (expected, None)
        assert program.start_reads(start, count)() == (expected, None)
        parts, at, made = program.run_incrementally(start, count), start, []
        while at < start + count:
            part_len = chance.randint(1, min(9, start + count - at))
            made += parts.run(at, part_len).elements
            at += part_len
        assert made == expected
        jumps = np.array(chance.choices(range(start, start + count), k=20), np.int64)
        assert program.run_at(jumps).elements == [expected[at - start] for at in jumps]
        assert_origins(ds._node, range(start, start + count))
        numbers = program.numbers(start, count)
        assert numbers is None or numbers.tolist() == expected


def assert_origins(node, positions):
    for at in positions:
        *_, (source, index) = stages_passed(node, at)
        if isinstance(source, plan.FlatMap):
            ((_, at_parent),) = source.inputs(index)
            assert_origins(source.parent, [at_parent])
            continue
        expected, record, epoch = plan_oracle.origin(node, at)
        assert source is expected
        assert index == record + (epoch * source.length if epoch else 0)


def test_origins_of_stages_that_join_elements_are_those_stages():
    zipped = ZipMapDataset([MapDataset.range(6).shuffle(seed=1), MapDataset.range(6)])
    parts = [MapDataset.range(10).batch(4), zipped.batch(2).repeat(2), MapDataset.source(Endless())]
    ds = MapDataset.mix(parts)
    assert_origins(ds._node, range(40))


def test_a_mixture_of_ranges_is_an_array_of_numbers():
    ds = MapDataset.mix([MapDataset.range(n, n + 9).shuffle(seed=n) for n in range(300)])
    program = compiled(ds._node)
    assert program.gives_numbers
    assert not program.runs_user_code
    assert program.numbers(5, 0).tolist() == []
    expected = [plan_oracle.element(ds._node, at) for at in range(50, 950)]
    assert program.numbers(50, 900).tolist() == expected
    batch = next(iter(ds.repeat().to_iter_dataset().batch(700)))
    assert batch.tolist() == program.run(0, 700).elements
    assert batch.dtype == np.int64


class WorseError(Exception):
    pass


def failing(number, at):
    def make(x):
        if (number, x) == at:
            raise WorseError(f"{number}: {x}")
        return x

    return make


@pytest.mark.parametrize("join", [MapDataset.mix, MapDataset.concatenate])
def test_elements_before_a_failure_are_delivered_and_no_function_runs_after_it(join):
    ran = []

    def watched(number):
        fail = failing(number, (7, 3))

        def make(x):
            ran.append((number, x))
            return fail(x)

        return make

    ds = join([MapDataset.range(10).map(watched(number)) for number in range(20)])
    program = compiled(ds._node)
    made, failure = program.run(0, 200)
    assert isinstance(failure, WorseError)
    assert len(made) == (3 * 20 + 7 if join == MapDataset.mix else 73)
    assert ran[-1] == (7, 3)
    # In the order of positions, whatever part they are of.
    assert [x for _, x in ran[:-1]] == made


def test_an_unreadable_record_hides_none_before_it(tmp_path):
    parts = []
    for number in range(30):
        path = tmp_path / str(number)
        with ArrayRecordWriter(str(path), "group_size:1,uncompressed") as writer:
            for record in range(4):
                writer.write(bytes([number + 100, record]) * 2000)
        if number == 20:
            content = bytearray(path.read_bytes())
            content[content.index(bytes([120, 2]) * 100) + 50] ^= 1
            path.write_bytes(content)
        parts.append(MapDataset.source(ArrayRecordDataSource(str(path))))
    program = compiled(MapDataset.mix(parts)._node)
    for _ in range(2):
        made, failure = program.run(0, 120)
        assert failure is not None
        assert [bytes(x[:2]) for x in made] == [
            bytes([100 + at % 30, at // 30]) for at in range(2 * 30 + 20)
        ]
        begun = program.start_reads(0, 120)()
        assert (begun.elements, str(begun.failure)) == (made, str(failure))


def test_slow_storage_is_read_for_all_parts_together(sources):
    program = compiled(MapDataset.mix([MapDataset.source(source) for source in sources])._node)
    expected = program.run(0, 60)
    ((_, source),) = program.chain.sources()
    assert not program.waits_for_storage
    begun = []

    class Far:
        def __init__(self, files):
            self.is_slow = True
            self._files = files

        def start(self, index, reads):
            begun.append(index.tolist())
            return self._files.start(index, reads)

    source.files = Far(source.files)
    assert program.start_reads(0, 60)() == expected
    assert program.run(0, 60) == expected
    assert [len(index) for index in begun] == [60, 60]


def test_a_source_with_a_wrong_length_reads_no_records_of_others(tmp_path):
    class Longer(ArrayRecordDataSource):
        def __len__(self):
            return 6

    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        with ArrayRecordWriter(str(path), "group_size:1") as writer:
            for record in range(4):
                writer.write(b"%s%d" % (path.name.encode(), record))
    joined = MapDataset.concatenate([MapDataset.source(Longer(str(path))) for path in paths])
    made, failure = compiled(joined._node).run(0, 12)
    assert made == [b"a0", b"a1", b"a2", b"a3"]
    assert "record 4" in str(failure)
    assert joined[6] == b"b0"


def test_another_process_opens_only_the_files_that_it_reads(tmp_path):
    paths = [str(tmp_path / str(number)) for number in range(3)]
    for number, path in enumerate(paths):
        with ArrayRecordWriter(path, "group_size:1") as writer:
            for record in range(4):
                writer.write(b"%d" % (10 * number + record))
    parts = [ArrayRecordDataSource(path) for path in paths]
    sources = pickle.loads(pickle.dumps([*parts, ArrayRecordDataSource(paths)]))
    Path(paths[1]).unlink()
    mixed = MapDataset.mix([MapDataset.source(source) for source in sources[:3]])
    assert [mixed[at] for at in (0, 2, 3)] == [b"0", b"20", b"1"]
    with pytest.raises(FileNotFoundError, match=paths[1]):
        mixed[1]
    assert len(sources[3]) == 12
    assert sources[3][11] == b"23"
    with pytest.raises(FileNotFoundError, match=paths[1]):
        sources[3][5]


class Counted(Plain):
    opened = 0

    @property
    def name(self):
        Counted.opened += 1
        return 0

    @name.setter
    def name(self, _):
        pass


def test_a_block_reads_only_the_parts_it_needs():
    ds = MapDataset.concatenate([MapDataset.source(Counted(n, 10)).batch(5) for n in range(500)])
    program = compiled(ds._node)
    Counted.opened = 0
    assert program.run(0, 4).failure is None
    assert Counted.opened == 20
    (source,) = (source for _, source in program.chain.sources())
    assert len(source._sources) < 30


def test_parts_that_are_alike_are_one_chain():
    shapes = [
        lambda n: MapDataset.range(n, n + 5).map(lambda x: x + n),
        lambda n: MapDataset.range(n, n + 5).shuffle(seed=n).random_map(noisy, seed=n),
        lambda n: MapDataset.source(Plain(n, 4)),
    ]
    ds = MapDataset.mix([shapes[n % 3](n) for n in range(300)]).map(shared)
    assert len(compiled(ds._node).chain.sources()) == 3


@pytest.mark.parametrize("make", [MapDataset.mix, MapDataset.concatenate])
def test_a_block_costs_as_much_in_many_parts_as_in_few(make):
    def seconds(num_parts):
        ds = make([MapDataset.range(n, n + 50).map(lambda x: x + 1) for n in range(num_parts)])
        program = compiled(ds._node)
        program.run(0, 500)
        began = time.process_time()
        for start in range(0, 5000, 500):
            program.run(start % 400, 500)
        return time.process_time() - began

    # A hundred times as many parts; a wide bound, since machines are busy.
    assert min(seconds(10_000) for _ in range(3)) < 10 * min(seconds(100) for _ in range(3))
