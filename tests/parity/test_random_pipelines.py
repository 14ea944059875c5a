"""Random pipelines equal those of Grain 0.2.18: elements, lengths, states, and types of errors.

Every pipeline is generated from one seed. A failure reports the seed and the operations, and those
that are left when everything is removed without which the two still differ. The generator avoids
known defects of Grain; comments name them. `GRAINMILL_SEED` compares others.
"""

import copy
import json
import logging
import random

import effort
import grain as real
import pytest
from kept_shuffles import _shuffles_are_kept  # noqa: F401 - a fixture
from pipelines import OPERATIONS, build, close, encode, lacking, take
from shrinking import shrunk
from under_test import IS_GRAIN, grain

NUM_SEEDS = effort.cases(40, 1000)
PER_TEST = 20
# So few from 80 on have every stage.
FIRST_SEED = effort.SEED + effort.cases(80, 0)
SEEDS = [
    range(s, min(s + PER_TEST, FIRST_SEED + NUM_SEEDS))
    for s in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS, PER_TEST)
]
MAX_ELEMENTS = 40

# Inline: Grain starts 16 threads for every iterator otherwise, and the elements are the same.
READ = {"num_threads": 0, "prefetch_buffer_size": 0}


class Maker:
    """Draws one pipeline as operations; `kind` is the current kind of its elements."""

    def __init__(self, seed, *, is_split=False):
        self.rng = random.Random(seed)
        # Grain never returns from the endless repetition of a worker's share that is empty.
        self.is_split = is_split
        self.ops = []
        self.length = 0
        self.kind = "int"
        self.droppable = False
        self.endless = False
        self.nones = False
        self.has_seed = False
        self.loose_states = False
        self.restores = True
        self.restores_end = True
        self.theirs_restore = True
        self.compared = lambda state: state

    # Stages --------------------------------------------------------------------------------------

    def source(self):
        pick = self.rng.randrange(7)
        n = self.rng.choice([1, 2, 3, 5, 8, 13, 20])
        if pick <= 2:
            start, step = self.rng.randrange(20), self.rng.choice([1, 1, 2, -1, 3])
            self.ops = [["range", start, start + n * step, step]]
        elif pick == 3:
            self.ops = [["source", [self.rng.randrange(100) for _ in range(n)]]]
        elif pick == 4:
            parts, lengths = zip(
                *[self._simple_part() for _ in range(self.rng.randint(1, 3))], strict=True
            )
            self.ops = [["concat", list(parts)]]
            n = sum(lengths)
        elif pick == 5:
            parts, lengths = zip(
                *[self._simple_part() for _ in range(self.rng.randint(1, 3))], strict=True
            )
            choices = [self.rng.randrange(len(parts)) for _ in range(n)]
            self.ops = [
                ["select", list(parts), [[d, self.rng.randrange(3 * lengths[d])] for d in choices]]
            ]
        else:
            parts, lengths = zip(
                *[self._simple_part() for _ in range(self.rng.randint(1, 3))], strict=True
            )
            weights = [self.rng.choice([1, 2, 3, 0.3, 0.7, 0.15]) for _ in parts]
            self.ops = [
                ["mix", list(parts), weights] if self.rng.random() < 0.7 else ["mix", list(parts)]
            ]
            n = len(build(real, self.ops))
        self.length = n

    def _simple_part(self):
        n, start = self.rng.randint(1, 9), self.rng.randrange(50)
        part = [["range", start, start + n]]
        if self.rng.random() < 0.4:
            part.append(["shuffle", self.rng.randrange(1000)])
        return part, n

    def map_stage(self):
        """One random-access stage."""
        choose = self.rng.choice
        options = {
            "seed": lambda: ["seed", self.rng.randrange(2**40)],
            "slice": lambda: ["slice", *self._bounds()],
            "getslice": lambda: ["getslice", *self._bounds()],
            "repeat": lambda: [
                "repeat",
                choose([1, 2, 3]),
                {"reseed_each_epoch": choose([True, False])},
            ],
        }
        # The sizes drawn here are far below 4^8 + 1, where Grain's shuffle is not a permutation.
        options["shuffle"] = lambda: (
            ["shuffle"] if self.has_seed else ["shuffle", self.rng.randrange(2**32)]
        )
        if self.kind == "int":
            options |= {
                "map": lambda: ["map", choose(["add_one", "times_two", "drop_mult_3"])],
                "filter": lambda: ["filter", choose(["is_even", "not_mult_3", "is_small"])],
                "random_map": lambda: [
                    "random_map",
                    "add_rand",
                    *([] if self.has_seed else [{"seed": self.rng.randrange(2**40)}]),
                ],
                "map_with_index": lambda: ["map_with_index", "add_index"],
                "apply": lambda: ["apply", *choose([["PlusOne"], ["Even"], ["PlusOne", "Even"]])],
                "user_map": lambda: ["user_map"],
                "mix": lambda: [
                    "mix",
                    [self.ops, self._simple_part()[0]],
                    choose([[1, 2], [3, 1]]),
                ],
                "concat": lambda: ["concat", [self.ops, self._simple_part()[0]]],
            }
            if not self.droppable and self.length < 100:
                options |= {
                    "batch_fn": lambda: ["batch", choose([1, 2, 3]), {"batch_fn": "join_batch"}],
                    "batch_and_pad": lambda: ["batch_and_pad", choose([1, 2, 4]), {"pad_value": 7}],
                }
            if self.length <= 12:
                options["flat_map"] = lambda: ["flat_map", choose(["FanOut", "FanTwo"])]
            if self.length % 4 == 0 and self.length:
                # A window that does not divide the length takes elements of the next epoch in
                # Grain: an epoch is not a permutation there, and ours differs.
                options["window_shuffle"] = lambda: [
                    "window_shuffle",
                    choose([1, 2, 4]),
                    self.rng.randrange(2**31),
                ]
        if self.kind in ("int", "batch") and self.length < 100:
            options["zip"] = lambda: ["zip", [self.ops, [["range", self.length]]]]
        if not self.droppable and self.kind != "object" and self.length:
            options["batch"] = lambda: [
                "batch",
                choose([1, 2, 3, 5]),
                {"drop_remainder": choose([True, False])},
            ]
        name = choose(sorted(options))
        self._append(options[name]())

    def _bounds(self):
        a, b = sorted(self.rng.randrange(self.length + 3) for _ in range(2))
        step = self.rng.choice([None, 1, 2, 3])
        if self.rng.random() < 0.2:
            return [None, None, -1]
        return [self.rng.choice([None, a]), self.rng.choice([None, b, -1]), step]

    def _append(self, op):
        name = op[0]
        joins = name in ("mix", "concat", "zip")
        ops = [op] if joins else [*self.ops, op]
        try:
            trial = build(real, ops)
        except ValueError:  # a mixture with a filtered dataset of no elements, or unequal lengths
            return
        # Empty datasets are covered by `EMPTY`; a chain of them tests little.
        if len(trial) == 0:
            return
        self.ops = ops
        self.length = min(len(trial), 10**6)
        self.droppable |= (
            name in ("filter", "flat_map") or op[1:] == ["drop_mult_3"] or "Even" in op
        )
        self.has_seed |= name == "seed"
        if joins and name != "zip":
            # Seeds of several parts are joined, and are checked by `MISUSE` and the golden files.
            self.has_seed = False
        if name == "zip":
            self.kind = "object"
        elif name == "batch_and_pad":
            self.kind = "batch"
        elif name == "batch" and "batch_fn" not in op[-1]:
            self.kind = "batch" if self.kind == "int" else "batches"

    def payload(self, *, to_pack):
        """Turns ints into dicts of arrays, for what packs or stacks trees."""
        if self.kind != "int":
            return
        kinds = ["tokens", "tokens2", "tokens_meta", "tokens_group", "tokens_free_meta"]
        if not to_pack:
            kinds = ["none", "none", "none", "none", "vec4", "vec4", "fixed_dict", "tokens"]
        pick = self.rng.choice(kinds)
        if pick != "none":
            self.ops.append(["map", pick])
            self.kind = pick

    def iter_stage(self):
        """One sequential stage."""
        choose = self.rng.choice
        seed = self.rng.randrange(2**31)
        options = {
            "limit": lambda: ["limit", self.rng.randint(1, 15)],
            "window_shuffle": lambda: ["window_shuffle", choose([1, 2, 3, 5, 100]), seed],
            "thread_prefetch": lambda: ["thread_prefetch", choose([0, 1, 3])],
            "repeat": lambda: ["iter_repeat", choose([1, 2])],
            # At most one cache: if there are two in a row, the first one's states differ.
            **({} if ["cache"] in self.ops else {"cache_repeat": lambda: ["iter_repeat", 2]}),
            "map_with_index": lambda: ["map_with_index", "pair"],
            "options": lambda: ["options", {"filter_warn_threshold_ratio": None}],
            "zip": lambda: [
                "iter_zip",
                [self.ops, [["range", 50], ["to_iter"]]],
                {"strict": False},
            ],
            # The same pipeline twice, so that any kind of element can be joined.
            "zip_strict": lambda: ["iter_zip", [self.ops, self.ops]],
            "mix_twice": lambda: ["iter_mix", [self.ops, self.ops], choose([[1, 1], [1, 3]])],
            "interleave_twice": lambda: [
                "interleave",
                [self.ops, self.ops],
                {
                    "cycle_length": choose([1, 2]),
                    "iter_buffer_size": choose([1, 3]),
                    "make_iter_buffer_size": choose([1, 2]),
                    "num_make_iter_threads": choose([1, 2]),
                },
            ],
        }
        if self._may_repeat_endlessly():
            options["repeat_endlessly"] = lambda: ["iter_repeat"]
        for_any_kind = set(options)
        if self.kind == "int":
            options |= {
                "map": lambda: ["map", choose(["add_one", "times_two"])],
                "filter": lambda: ["filter", choose(["is_even", "not_mult_3", "is_small"])],
                "random_map": lambda: [
                    "random_map",
                    "add_rand",
                    {"seed": self.rng.randrange(2**40)},
                ],
                "flat_map": lambda: ["flat_map", choose(["FanOut", "FanTwo"])],
                "apply": lambda: ["apply", *choose([["PlusOne"], ["Even"]])],
                "mix": lambda: [
                    "iter_mix",
                    [self.ops, self._iter_part()],
                    choose([[1, 1], [1, 2], [0.7, 0.3]]),
                ],
                # Sorted names: without JAX Grain orders parts by insertion, with it by name.
                "mix_named": lambda: [
                    "iter_mix_named",
                    {"parts": {"a": self.ops, "b": self._iter_part()}, "weights": {"a": 2, "b": 1}},
                ],
                "interleave": lambda: [
                    "interleave",
                    [self.ops, self._iter_part(), self._iter_part()],
                    {"cycle_length": choose([1, 2, 5])},
                ],
                "user": lambda: ["user_twice"],
                "seeded_random_map": lambda: ["random_map", "add_rand"],
                "batch_fn": lambda: ["batch", choose([1, 2, 3]), {"batch_fn": "join_batch"}],
                "batch_and_pad": lambda: ["batch_and_pad", choose([1, 2, 4]), {"pad_value": -1}],
                "interleave_lazy": lambda: ["interleave_lazy", {"cycle_length": choose([1, 2, 4])}],
            }
            if self.endless:  # they may drop every element
                for name in ("filter", "flat_map", "apply"):
                    del options[name]
        if self.kind in ("packed", "fixed_dict", "vec4") or self.kind.endswith("_batch"):
            options["rekey"] = lambda: ["map", "rekey"]
        if self.kind == "packed" or self.kind.startswith("rekeyed"):
            # Batches of rows whose features are arrays are copied column by column.
            options["batch_of_rows"] = lambda: ["batch", choose([1, 2, 3])]
        if self.kind in ("int", "vec4", "fixed_dict"):
            options["batch"] = lambda: [
                "batch",
                choose([1, 2, 3]),
                {"drop_remainder": choose([True, False])},
            ]
        if self.kind in ("vec4", "batch", "vec4_batch", "fixed_dict_batch", "packed_batch"):
            options["rebatch"] = lambda: [
                "rebatch",
                choose([1, 2, 3, 7]),
                {"drop_remainder": choose([True, False])},
            ]
        if self.kind.startswith("tokens"):
            options |= {
                "first_fit": self._fit("first_fit"),
                "best_fit": self._fit("best_fit"),
            }
            if self.kind in ("tokens", "tokens2", "tokens_meta"):
                options["concat_split"] = self._concat_split
        if self.nones:  # Grain stacks numbers and `None` as Python objects
            options = {name: op for name, op in options.items() if not name.startswith("batch")}
        names = sorted(options)
        if self.rng.random() < 0.6:
            names = sorted(set(options) - for_any_kind) or names
        name = choose(names)
        self._take(name, options[name](), seed)

    def _take(self, name, op, seed):
        """Appends the stage `op`, or makes it the first where it joins datasets."""
        joins = name.startswith(("zip", "mix", "interleave")) and name != "interleave_lazy"
        if name == "cache_repeat":
            self.ops = [*self.ops, ["cache"]]
        elif name == "seeded_random_map":
            between = self.rng.choice([[], [["map", "add_one"]], [["thread_prefetch", 1]]])
            self.ops = [*self.ops, ["seed", seed], *between]
        elif name == "interleave_lazy":
            # Seven datasets of 0 to 6 elements, read in the order of the windows of a shuffle.
            self.ops = [["range", 7], ["shuffle", seed], ["map", "range_iter"]]
        self.ops = [op] if joins else [*self.ops, op]
        self.endless |= name == "repeat_endlessly"
        self._after(name)

    def _after(self, name):
        if name in ("map_with_index", "zip", "zip_strict"):
            self.kind = "tuple"
        elif name in ("first_fit", "best_fit", "concat_split"):
            self.kind = "packed"
        elif name == "rekey":
            self.kind = "rekeyed"
        elif name == "batch_of_rows":
            self.kind = "batch_of_rows"
        elif name == "batch_and_pad":
            self.kind = "batch"
        elif name == "batch":
            self.kind = "batch" if self.kind == "int" else self.kind + "_batch"
        # Grain's concat-then-split loses its position in JSON (its empty remainder is a tuple), and
        # its interleave keeps and changes the state it is given; a flat map's end state leaves the
        # old buffer in a used iterator, so a new one is restored here. States, and elements after
        # restoring in ours, are still compared.
        if name.startswith("interleave") or name == "concat_split":
            self.restores = False
        # Equivalent states differ in form after dropped elements (ours may be past them
        # already), if a cache contains a state of its parent, and if a window starts
        # between two elements of a concat-then-split (k rows of one, or none of the next).
        # Whether the parent has noticed its end differs, too, after a repetition of a repetition,
        # and where a buffer of an interleave prefetched a rebatch.
        shown = json.dumps(self.ops)
        # Repeated, Grain's interleave keeps its exhausted flags, and elements are lost.
        repeated_interleave = '"interleave' in shown and "iter_repeat" in shown
        self.theirs_restore = not repeated_interleave
        self.loose_states = (
            "cache" in shown
            or repeated_interleave
            or ('"interleave' in shown and "rebatch" in shown)
            or shown.count("iter_repeat") > 1
            or ("concat_split" in shown and "window_sh" in shown)
            or any(f'"{word}"' in shown for word in ("filter", "drop_mult_3", "Even", "flat_map"))
        )
        # Grain's rebatch restored at its end returns another, empty batch.
        if name == "rebatch":
            self.restores_end = False

    def _iter_part(self):
        part, _ = self._simple_part()
        part.append(["to_iter", READ])
        if self.rng.random() < 0.3:
            part.append(["filter", "is_even"])
        return part

    def _may_repeat_endlessly(self):
        """Whether some element is there for sure, so that an endless repetition goes on."""
        shown = json.dumps(self.ops)
        words = ("filter", "drop", "Even", "flat_map", "rebatch", "user", "limit", "range_iter")
        return not (self.endless or self.is_split or any(word in shown for word in words))

    def _features(self):
        if self.kind == "tokens2":
            return {"inputs": 12, "targets": 9}
        if self.kind == "tokens_group":
            return {"tokens": 12, "epoch": 12}
        return {"tokens": 12}

    def _fit(self, kind):
        def make():
            options = {
                "length_struct": self._features(),
                "num_packing_bins": self.rng.randint(1, 5),
            }
            if self.kind == "tokens_meta":
                options["meta_features"] = ["id"]
                if self.rng.random() < 0.5:
                    options["length_struct"]["id"] = 4
            if self.kind == "tokens_free_meta":
                options["meta_features"] = ["name"]
            if self.rng.random() < 0.3:
                options["shuffle_bins_group_by_feature"] = self.rng.choice(
                    sorted(options["length_struct"])
                )
            if self.rng.random() < 0.5:
                options["seed"] = self.rng.randrange(1000)
            if self.rng.random() < 0.4:
                options["shuffle_bins"] = False
            if self.rng.random() < 0.3:
                options["max_sequences_per_bin"] = self.rng.randint(1, 4)
            features = list(options["length_struct"])
            if self.rng.random() < 0.3:
                options["pack_alignment_struct"] = {
                    name: self.rng.choice([1, 2, 4]) for name in features
                }
            if self.rng.random() < 0.3:
                options["padding_struct"] = {name: self.rng.choice([-1, 7]) for name in features}
            return [kind, options]

        return make

    def _concat_split(self):
        lengths = self._features()
        options = {"length_struct": {k: self.rng.choice([n, 9, 20]) for k, n in lengths.items()}}
        if self.kind == "tokens_meta":
            options["length_struct"]["id"] = 8
            options["meta_features"] = ["id"]
        elif self.rng.random() < 0.3:
            options["split_full_length_features"] = False
        # With two features Grain writes the token past the end of a feature that is full already.
        if self.kind != "tokens2" and self.rng.random() < 0.3:
            options |= {
                "bos_handling": "REPLACE_FIRST_TOKEN_WITH_BOS",
                "bos_features": ["tokens"],
                "bos_token_id": 1,
            }
        return ["concat_split", options]

    # Whole pipelines -----------------------------------------------------------------------------

    def by_index(self):
        """A pipeline of random-access stages only."""
        self.source()
        for _ in range(self.rng.randint(0, 5)):
            self.map_stage()
        return self

    def by_iteration(self):
        """Random access, then sequential stages."""
        self.source()
        to_pack = self.rng.random() < 0.35
        for _ in range(self.rng.randint(0, 1 if to_pack else 3)):
            self.map_stage()
        if not self.droppable and self.rng.random() < 0.1:
            self._append(["repeat"])
            self.endless = ["repeat"] in self.ops
        self.payload(to_pack=to_pack)
        reading = READ
        if self.rng.random() < 0.1:
            reading = {"num_threads": 2, "prefetch_buffer_size": self.rng.choice([1, 4])}
        if self.kind == "int" and self.droppable and self.rng.random() < 0.1:
            reading = {**reading, "allow_nones": True}
            self.nones = True
        self.ops.append(["to_iter", reading])
        for _ in range(self.rng.randint(1, 4)):
            self.iter_stage()
        return self


def _outcome(action):
    """The result of `action()`, or the type of its exception."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def _same_error(theirs, ours, what):
    assert (theirs is None) == (ours is None), f"{what}: Grain {theirs!r}, ours {ours!r}"
    if theirs is not None:
        assert isinstance(ours, type(theirs)), f"{what}: Grain {theirs!r}, ours {ours!r}"


def _next(iterator):
    value, error = _outcome(lambda: next(iterator))
    return ("end", None) if isinstance(error, StopIteration) else (value, error)


def compare_by_index(ops, rng):
    theirs, ours = build(real, ops), build(grain, ops)
    assert len(ours) == len(theirs)
    n = len(theirs)
    places = [*range(min(n, 25)), *(rng.randrange(-2 * n, 5 * n + 1) for _ in range(15))]
    for i in places:
        expected, error = _outcome(lambda i=i: encode(theirs[i]))
        found, our_error = _outcome(lambda i=i: encode(ours[i]))
        _same_error(error, our_error, f"index {i}")
        assert found == expected, f"index {i}"


def compare_by_iteration(maker, rng):
    ops = maker.ops
    theirs, ours = iter(build(real, ops)), iter(build(grain, ops))
    states, elements, error = [], [], None
    while len(elements) < MAX_ELEMENTS:
        # As JSON: a checkpoint is a file, and a later step must not change an earlier state.
        states.append((json.dumps(theirs.get_state()), json.dumps(ours.get_state())))
        (expected, error), (found, our_error) = _next(theirs), _next(ours)
        _same_error(error, our_error, f"element {len(elements)}")
        if error is not None:
            break
        assert encode(found) == encode(expected), f"element {len(elements)}"
        if isinstance(expected, str):
            break
        elements.append(encode(expected))
    close(theirs)
    close(ours)
    compared = [[maker.compared(json.loads(state)) for state in pair] for pair in states]
    unlike = [k for k, (a, b) in enumerate(compared) if a != b]
    for k in unlike:
        assert maker.loose_states or k >= len(elements), f"state {k}: {states[k]}"
    if error is not None:
        return
    places = {0, rng.randrange(len(states)), rng.randrange(len(states)), len(states) - 1}
    for k in sorted(places | set(unlike[:2])):
        their_state, our_state = states[k]
        rest, budget = elements[k:], MAX_ELEMENTS - k
        grain_restores = maker.restores and (maker.restores_end or k < len(states) - 1)
        if grain_restores or not IS_GRAIN:
            if maker.theirs_restore:
                _continues(
                    grain, ops, their_state, rest, budget, f"ours from Grain's {their_state}"
                )
            _continues(grain, ops, our_state, rest, budget, f"ours from ours {our_state}")
        if grain_restores:
            _continues(real, ops, our_state, rest, budget, f"Grain from ours {our_state}")


def _continues(module, ops, state, expected, budget, what):  # noqa: PLR0917
    iterator = iter(build(module, ops))
    iterator.set_state(json.loads(state))
    assert take(iterator, budget) == expected, what
    close(iterator)


@pytest.fixture(autouse=True)
def _quiet():
    """Silences the warnings that packing logs about wasted space."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _compare(seed, maker, compare):
    rng = random.Random(f"compare {seed}")
    try:
        compare(maker, rng)
    except Exception as error:
        error.add_note(f"seed {seed}: build(grain, {maker.ops})")

        def differs(ops):
            smaller = copy.copy(maker)
            smaller.ops = ops
            return _differs(lambda: compare(smaller, random.Random(f"compare {seed}")))

        if not maker.endless:  # what is left might drop every element, endlessly
            error.add_note(f"smaller: build(grain, {shrunk(maker.ops, differs)})")
        raise


def _differs(comparing):
    """Whether `comparing` finds a difference, and not a pipeline that cannot be built."""
    try:
        comparing()
    except AssertionError:
        return True
    except Exception:
        return False
    return False


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_access_pipelines_agree(seeds):
    for seed in seeds:
        maker = Maker(f"by index {seed}").by_index()
        _compare(seed, maker, lambda maker, rng: compare_by_index(maker.ops, rng))


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_iterated_pipelines_agree(seeds):
    for seed in seeds:
        maker = Maker(f"by iteration {seed}").by_iteration()
        _compare(seed, maker, compare_by_iteration)


# Those of other tests: of workers, of a later Grain, and of grainmill alone.
ELSEWHERE = {"mp_prefetch", "multithread_prefetch", "reindex", "user_squares"} | lacking(real)


def test_generated_pipelines_have_every_stage():
    seeds = range(FIRST_SEED, FIRST_SEED + NUM_SEEDS)
    makers = [Maker(f"by iteration {seed}").by_iteration() for seed in seeds]
    makers += [Maker(f"by index {seed}").by_index() for seed in seeds]
    shown = json.dumps([maker.ops for maker in makers])
    assert {name for name in OPERATIONS if f'"{name}"' not in shown} == ELSEWHERE


EMPTY = [
    [["range", 0]],
    [["range", 0], ["shuffle", 1]],
    [["range", 0], ["repeat"]],
    [["range", 0], ["batch", 2]],
    [["range", 5], ["slice", 5, 5]],
    [["range", 5], ["batch", 9, {"drop_remainder": True}]],
    [["concat", [[["range", 0]], [["range", 3]]]]],
]


@pytest.mark.parametrize("ops", EMPTY, ids=json.dumps)
def test_empty_pipelines_agree(ops):
    theirs, ours = build(real, ops), build(grain, ops)
    assert len(ours) == len(theirs)
    assert [encode(x) for x in ours] == [encode(x) for x in theirs]
    for index in (0, 1, -1):
        expected, error = _outcome(lambda i=index: encode(theirs[i]))
        found, our_error = _outcome(lambda i=index: encode(ours[i]))
        _same_error(error, our_error, f"index {index}")
        assert found == expected


MISUSE = [
    [["range", 5], ["shuffle"]],
    [["range", 5], ["shuffle", -1]],
    [["range", 5], ["shuffle", 2**32]],
    [["range", 5], ["seed", -1], ["shuffle"]],
    [["range", 5], ["random_map", "add_rand"]],
    [["range", 5], ["repeat", 0]],
    [["range", 5], ["repeat"], ["repeat", 2]],
    [["range", 5], ["batch", 0]],
    [["range", 5], ["filter", "is_even"], ["map", "add_one"], ["batch", 2]],
    [["range", 5], ["flat_map", "FanTwo"], ["batch", 2]],
    [["mix", []]],
    [["mix", [[["range", 3]], [["range", 0]]]]],
    [["mix", [[["range", 3]], [["range", 3]]], [1, 0]]],
    [["concat", [[["range", 3], ["repeat"]]]]],
    [["zip", []]],
    [["zip", [[["range", 3]], [["range", 4]]]]],
    [["range", 5], ["to_iter", {"num_threads": -1}]],
    [["range", 5], ["to_iter", {"prefetch_buffer_size": -1}]],
    [["range", 5], ["to_iter"], ["random_map", "add_rand"]],
    [["range", 5], ["to_iter"], ["batch", 0]],
    [["range", 5], ["to_iter"], ["limit", 0]],
    [["range", 5], ["to_iter"], ["limit", -3]],
    [["range", 5], ["to_iter"], ["iter_repeat", 0]],
    [["range", 5], ["to_iter"], ["rebatch", 0]],
    [["range", 5], ["to_iter"], ["thread_prefetch", -1]],
    [["iter_mix", []]],
    [["iter_mix", [[["range", 3], ["to_iter"]], [["range", 3], ["to_iter"]]], [0, 1]]],
    [["iter_zip", [[["range", 3], ["to_iter"]], [["range", 4], ["to_iter"]]]]],
    [["iter_zip", [[["range", 4], ["to_iter"]], [["range", 3], ["to_iter"]]]]],
    [["range", 5], ["map", "to_dict"], ["batch", 2]],
    [["range", 5], ["map", "to_dict"], ["to_iter"], ["batch", 2]],
    [["range", 9], ["flat_map", "FanWide"]],
    [
        ["range", 5],
        ["map", "tokens"],
        ["to_iter"],
        ["first_fit", {"length_struct": {"tokens": 2}, "num_packing_bins": 2}],
    ],
    [
        ["range", 5],
        ["map", "tokens"],
        ["to_iter"],
        ["best_fit", {"length_struct": {"tokens": 2}, "num_packing_bins": 2}],
    ],
    [
        ["range", 5],
        ["map", "tokens2"],
        ["to_iter"],
        ["concat_split", {"length_struct": {"inputs": 4}}],
    ],
    [
        ["range", 5],
        ["map", "fixed_dict"],
        ["to_iter"],
        ["first_fit", {"length_struct": {"a": 4, "b": 4}, "num_packing_bins": 2}],
    ],
    [
        ["range", 5],
        ["map", "tokens"],
        ["to_iter"],
        ["concat_split", {"length_struct": {"tokens": 8}, "bos_token_id": 1}],
    ],
    [
        ["range", 5],
        ["map", "tokens"],
        ["to_iter"],
        [
            "concat_split",
            {
                "length_struct": {"tokens": 8},
                "bos_handling": "REPLACE_FIRST_TOKEN_WITH_BOS",
                "bos_features": ["tokens"],
            },
        ],
    ],
]


@pytest.mark.parametrize("ops", MISUSE, ids=json.dumps)
def test_misuse_raises_what_grain_raises(ops):
    _, theirs = _outcome(lambda: list(build(real, ops)))
    _, ours = _outcome(lambda: list(build(grain, ops)))
    _same_error(theirs, ours, json.dumps(ops))
    assert ours is not None
