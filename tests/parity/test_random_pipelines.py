"""Random pipelines equal those of Grain 0.2.18: elements, lengths, states, and types of errors.

Every pipeline is generated from one seed, so a failure reports the seed and the operations that
reproduce it. The generator avoids known defects of Grain; comments name them.
"""

import json
import logging
import os
import random

import grain as real
import pytest
from pipelines import build, close, encode, take
from under_test import IS_GRAIN, grain

NUM_PIPELINES = int(os.environ.get("GRAINMILL_PARITY_PIPELINES", "320"))
PER_TEST = 20
FIRST_SEED = int(os.environ.get("GRAINMILL_PARITY_SEED", "0"))
MAX_ELEMENTS = 40

# Inline: Grain starts 16 threads for every iterator otherwise, and the elements are the same.
READ = {"num_threads": 0, "prefetch_buffer_size": 0}


class Maker:
    """Draws one pipeline as operations; `kind` is the current kind of its elements."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.ops = []
        self.length = 0
        self.kind = "int"
        self.droppable = False
        self.has_seed = False
        self.loose_states = False
        self.restores = True
        self.restores_end = True
        self.compared = lambda state: state

    # Stages --------------------------------------------------------------------------------------

    def source(self):
        pick = self.rng.randrange(6)
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
        trial = build(real, [*self.ops, op])
        # Empty datasets are covered by `EMPTY`; a chain of them tests little.
        if len(trial) == 0:
            return
        self.ops.append(op)
        self.length = min(len(trial), 10**6)
        self.droppable |= (
            name in ("filter", "flat_map") or op[1:] == ["drop_mult_3"] or "Even" in op
        )
        self.has_seed |= name == "seed"
        if name == "batch":
            self.kind = "batch" if self.kind == "int" else "batches"

    def payload(self):
        """Turns ints into dicts of arrays, for what packs or stacks trees."""
        if self.kind != "int":
            return
        pick = self.rng.choice(["none", "vec4", "tokens", "tokens2", "fixed_dict", "tokens_meta"])
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
        }
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
            }
        if self.kind in ("int", "vec4", "fixed_dict"):
            options["batch"] = lambda: [
                "batch",
                choose([1, 2, 3]),
                {"drop_remainder": choose([True, False])},
            ]
        if self.kind in ("vec4", "batch"):
            options["rebatch"] = lambda: [
                "rebatch",
                choose([1, 2, 3, 7]),
                {"drop_remainder": choose([True, False])},
            ]
        if self.kind.startswith("tokens"):
            options |= {
                "first_fit": self._fit("first_fit"),
                "best_fit": self._fit("best_fit"),
                "concat_split": self._concat_split,
            }
        name = choose(sorted(options))
        op = options[name]()
        joins = name in ("zip", "mix", "mix_named", "interleave")
        if name == "cache_repeat":
            self.ops = [*self.ops, ["cache"]]
        self.ops = [op] if joins else [*self.ops, op]
        self._after(name)

    def _after(self, name):
        if name in ("map_with_index", "zip"):
            self.kind = "tuple"
        elif name in ("first_fit", "best_fit", "concat_split"):
            self.kind = "packed"
        elif name == "batch":
            self.kind = "batch" if self.kind == "int" else self.kind + "_batch"
        # Grain's concat-then-split loses its position in JSON (its empty remainder is a tuple), and
        # its interleave keeps and changes the state it is given; a flat map's end state leaves the
        # old buffer in a used iterator, so a new one is restored here. States, and elements after
        # restoring in ours, are still compared.
        if name in ("interleave", "concat_split"):
            self.restores = False
        # Equivalent states differ in form after dropped elements (ours may be past them
        # already), if a cache contains a state of its parent, and if a window starts
        # between two elements of a concat-then-split (k rows of one, or none of the next).
        shown = json.dumps(self.ops)
        self.loose_states = (
            "cache" in shown
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

    def _features(self):
        if self.kind == "tokens2":
            return {"inputs": 12, "targets": 9}
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
                options["seed"] = self.rng.randrange(1000)
            if self.rng.random() < 0.4:
                options["shuffle_bins"] = False
            if self.rng.random() < 0.3:
                options["max_sequences_per_bin"] = self.rng.randint(1, 4)
            if self.rng.random() < 0.3 and self.kind == "tokens":
                options["pack_alignment_struct"] = {"tokens": self.rng.choice([2, 4])}
            if self.rng.random() < 0.3 and self.kind == "tokens":
                options["padding_struct"] = {"tokens": -1}
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
        for _ in range(self.rng.randint(0, 3)):
            self.map_stage()
        self.payload()
        self.ops.append(["to_iter", READ])
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
            _continues(grain, ops, their_state, rest, budget, f"ours from Grain's {their_state}")
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


def _batches_of_seeds(total):
    return [
        range(s, min(s + PER_TEST, FIRST_SEED + total))
        for s in range(FIRST_SEED, FIRST_SEED + total, PER_TEST)
    ]


def _compare(seed, maker, compare):
    rng = random.Random(f"compare {seed}")
    try:
        compare(rng)
    except Exception as error:
        error.add_note(f"seed {seed}: {json.dumps(maker.ops)}")
        raise


@pytest.mark.parametrize("seeds", _batches_of_seeds(NUM_PIPELINES // 2), ids=str)
def test_random_access_pipelines_agree(seeds):
    for seed in seeds:
        maker = Maker(f"by index {seed}").by_index()
        _compare(seed, maker, lambda rng, ops=maker.ops: compare_by_index(ops, rng))


@pytest.mark.parametrize("seeds", _batches_of_seeds(NUM_PIPELINES // 2), ids=str)
def test_iterated_pipelines_agree(seeds):
    for seed in seeds:
        maker = Maker(f"by iteration {seed}").by_iteration()
        _compare(
            seed,
            maker,
            lambda rng, m=maker: compare_by_iteration(m, rng),
        )


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
