"""Every stage that has a state, and combinations, as pipelines for tests of resuming.

Each is finite and short, so that all positions in it can be tried.
"""

from pipelines import build


def _parts(*bounds, then=()):
    return [[["range", *b], ["to_iter"], *then] for b in bounds]


_PACK = {"length_struct": {"tokens": 12}, "num_packing_bins": 3}
_TOKENS = [["range", 14], ["map", "tokens"], ["to_iter", {"num_threads": 0}]]
_TOKENS2 = [["range", 12], ["map", "tokens2"], ["to_iter", {"num_threads": 0}]]
_META = [["range", 10], ["map", "tokens_meta"], ["to_iter", {"num_threads": 0}]]
_FREE_META = [["range", 10], ["map", "tokens_free_meta"], ["to_iter", {"num_threads": 0}]]
_GROUP = [["range", 16], ["map", "tokens_group"], ["to_iter", {"num_threads": 0}]]


def _fits(**options):
    """A packing node of each kind that fits whole sequences."""
    return [(kind, [kind, {**_PACK, **options}]) for kind in ("first_fit", "best_fit")]


STAGES = {
    # Reading by index: inline, and prefetched by threads.
    "read_inline": [["range", 9], ["map", "add_one"], ["to_iter", {"num_threads": 0}]],
    "read_default": [["source", [5, 3, 8, 1, 9]], ["map", "add_one"], ["to_iter"]],
    "read_small_buffer": [
        ["range", 11],
        ["map", "add_one"],
        ["to_iter", {"num_threads": 2, "prefetch_buffer_size": 2}],
    ],
    "read_shuffle_repeat": [["range", 5], ["shuffle", 3], ["repeat", 3], ["to_iter"]],
    "read_filter": [["range", 13], ["filter", "not_mult_3"], ["to_iter"]],
    "read_filter_allow_nones": [
        ["range", 9],
        ["filter", "is_even"],
        ["to_iter", {"allow_nones": True}],
    ],
    "read_map_drops": [["range", 11], ["map", "drop_mult_3"], ["to_iter"]],
    "read_random_map": [["range", 7], ["random_map", "rand_u32", {"seed": 3}], ["to_iter"]],
    "read_map_with_index": [
        ["range", 4],
        ["map_with_index", "pair"],
        ["repeat", 2],
        ["to_iter"],
    ],
    "read_batch": [["range", 11], ["shuffle", 1], ["batch", 3], ["to_iter"]],
    "read_mix": [["mix", [[["range", 6]], [["range", 100, 110]]], [1, 2]], ["to_iter"]],
    "read_concatenate": [["concat", [[["range", 4]], [["range", 9, 13]]]], ["to_iter"]],
    "read_select": [
        ["select", [[["range", 4]], [["range", 9, 13]]], [[0, 1], [1, 3], [0, 0], [1, 1]]],
        ["to_iter"],
    ],
    "read_zip": [["zip", [[["range", 4]], [["range", 9, 13]]]], ["to_iter"]],
    "read_flat_map": [["range", 5], ["flat_map", "FanOut"], ["to_iter"]],
    "read_window_shuffle": [["range", 12], ["window_shuffle", 4, 7], ["to_iter"]],
    "read_window_shuffle_ragged": [["range", 11], ["window_shuffle", 4, 7], ["to_iter"]],
    # Element by element.
    "map": [["range", 6], ["to_iter"], ["map", "times_two"]],
    "filter": [["range", 12], ["to_iter"], ["filter", "not_mult_3"]],
    "filter_keeps_none": [["range", 12], ["to_iter"], ["filter", "is_small"]],
    "random_map": [["range", 7], ["to_iter"], ["random_map", "rand_u32", {"seed": 4}]],
    "random_map_default_seed": [
        ["range", 7],
        ["seed", 9],
        ["to_iter"],
        ["map", "add_one"],
        ["random_map", "rand_u32"],
    ],
    "map_with_index": [["range", 7], ["to_iter"], ["map_with_index", "pair"]],
    "apply": [["range", 8], ["to_iter"], ["apply", "PlusOne", "Even", "Indexed"]],
    "options": [
        ["range", 8],
        ["to_iter"],
        ["options", {"filter_warn_threshold_ratio": None}],
        ["filter", "is_even"],
    ],
    # Batches.
    "batch": [["range", 11], ["to_iter"], ["batch", 3]],
    "batch_drop": [["range", 11], ["to_iter"], ["batch", 3, {"drop_remainder": True}]],
    "batch_fn": [["range", 11], ["to_iter"], ["batch", 3, {"batch_fn": "join_batch"}]],
    "batch_and_pad": [["range", 7], ["to_iter"], ["batch_and_pad", 3]],
    "batch_of_batches": [["range", 12], ["to_iter"], ["batch", 2], ["batch", 3]],
    "rebatch_up": [["range", 10], ["map", "vec4"], ["batch", 3], ["to_iter"], ["rebatch", 4]],
    "rebatch_down": [["range", 11], ["batch", 4], ["to_iter"], ["rebatch", 3]],
    "rebatch_drop": [
        ["range", 11],
        ["batch", 4],
        ["to_iter"],
        ["rebatch", 3, {"drop_remainder": True}],
    ],
    # Other sequential stages.
    "window_shuffle": [["range", 14], ["to_iter"], ["window_shuffle", 4, 9]],
    "window_shuffle_whole": [["range", 6], ["to_iter"], ["window_shuffle", 100, 1]],
    "window_shuffle_even": [["range", 8], ["to_iter"], ["window_shuffle", 4, 1]],
    "flat_map": [["range", 7], ["to_iter"], ["flat_map", "FanOut"]],
    "limit": [["range", 9], ["to_iter"], ["limit", 4]],
    "take_while": [["range", 9], ["to_iter"], ["take_while", "is_small"], ["map", "add_one"]],
    "take_while_beyond": [["range", 3], ["to_iter"], ["take_while", "is_small"]],
    "limit_beyond": [["range", 3], ["to_iter"], ["limit", 9]],
    "repeat": [["range", 4], ["to_iter"], ["iter_repeat", 3]],
    "cache_repeat": [["range", 4], ["to_iter"], ["map", "add_one"], ["cache"], ["iter_repeat", 3]],
    "thread_prefetch": [["range", 9], ["to_iter"], ["map", "add_one"], ["thread_prefetch", 3]],
    "thread_prefetch_inline": [["range", 9], ["to_iter"], ["thread_prefetch", 0]],
    # Several parents.
    "mix": [["iter_mix", _parts([9], [100, 112]), [1, 2]]],
    "mix_equal": [["iter_mix", _parts([4], [100, 105], [200, 203])]],
    "mix_named": [
        [
            "iter_mix_named",
            {
                "parts": {"b": _parts([5])[0], "a": _parts([100, 110])[0]},
                "weights": {"b": 1, "a": 2},
            },
        ]
    ],
    "mix_of_mixes": [
        ["iter_mix", [[["iter_mix", _parts([6], [100, 106])]], *_parts([200, 209])], [0.7, 0.3]]
    ],
    "zip": [["iter_zip", _parts([5], [9, 14])]],
    "zip_loose": [["iter_zip", _parts([3], [10, 15]), {"strict": False}]],
    "interleave": [["interleave", _parts([3], [10, 11], [20, 24], [30, 32]), {"cycle_length": 2}]],
    "interleave_all": [["interleave", _parts([3], [10, 12], [20, 21]), {"cycle_length": 10}]],
    "interleave_one": [["interleave", _parts([3], [10, 12], [20, 21]), {"cycle_length": 1}]],
    "interleave_lazy": [
        ["range", 1, 6],
        ["map", "range_iter"],
        ["interleave_lazy", {"cycle_length": 2}],
    ],
    # Workers.
    "mp_prefetch": [["range", 11], ["map", "add_one"], ["to_iter"], ["mp_prefetch", 3, 1]],
    "mp_prefetch_one": [["range", 6], ["to_iter"], ["mp_prefetch", 1, 2]],
    "mp_prefetch_idle": [["range", 2], ["to_iter"], ["mp_prefetch", 4, 1]],
    "mp_prefetch_batch": [
        ["range", 13],
        ["shuffle", 3],
        ["to_iter"],
        ["batch", 2],
        ["mp_prefetch", 3, 2],
    ],
    "mp_prefetch_unequal": [
        ["range", 20],
        ["to_iter"],
        ["filter", "is_small"],
        ["mp_prefetch", 3, 1],
    ],
    "mp_prefetch_random_map": [
        ["range", 9],
        ["to_iter"],
        ["random_map", "rand_u32", {"seed": 1}],
        ["map_with_index", "pair"],
        ["mp_prefetch", 2, 1],
    ],
    "mp_prefetch_sequential": [
        ["range", 11],
        ["shuffle", 2],
        ["to_iter"],
        ["mp_prefetch", 3, 1, {"sequential_slice": True}],
    ],
    "multithread_prefetch": [["range", 11], ["to_iter"], ["multithread_prefetch", 3, 2]],
    "multithread_prefetch_inline": [["range", 7], ["to_iter"], ["multithread_prefetch", 2, 0]],
    "multithread_prefetch_window_shuffle": [
        ["range", 13],
        ["to_iter"],
        ["window_shuffle", 3, 2],
        ["multithread_prefetch", 2, 1],
        ["batch", 2],
    ],
    "multithread_prefetch_in_mp_prefetch": [
        ["range", 9],
        ["to_iter"],
        ["multithread_prefetch", 3, 1],
        ["mp_prefetch", 2, 1],
    ],
    "mp_prefetch_interleave": [
        ["interleave", _parts([3], [10, 11], [20, 24], [30, 32]), {"cycle_length": 2}],
        ["mp_prefetch", 2, 1],
    ],
    "mp_prefetch_repeat": [["range", 5], ["to_iter"], ["mp_prefetch", 2, 1], ["iter_repeat", 2]],
    "mp_prefetch_user_iter": [
        ["range", 7],
        ["to_iter"],
        ["user_twice"],
        ["map", "add_one"],
        ["mp_prefetch", 2, 1],
    ],
    "mp_prefetch_packed": [*_TOKENS, ["first_fit", _PACK], ["mp_prefetch", 2, 1]],
    # Packing.
    **{f"{kind}": [*_TOKENS, node] for kind, node in _fits()},
    **{f"{kind}_seed": [*_TOKENS, node] for kind, node in _fits(seed=3)},
    **{f"{kind}_in_order": [*_TOKENS, node] for kind, node in _fits(shuffle_bins=False)},
    **{f"{kind}_max_sequences": [*_TOKENS, n] for kind, n in _fits(max_sequences_per_bin=2)},
    **{f"{kind}_align": [*_TOKENS, n] for kind, n in _fits(pack_alignment_struct={"tokens": 4})},
    **{f"{kind}_padding": [*_TOKENS, n] for kind, n in _fits(padding_struct={"tokens": -1})},
    **{
        f"{kind}_two_features": [*_TOKENS2, node]
        for kind, node in _fits(length_struct={"inputs": 12, "targets": 9})
    },
    **{
        f"{kind}_packed_meta": [*_META, node]
        for kind, node in _fits(length_struct={"tokens": 12, "id": 4}, meta_features=["id"])
    },
    **{f"{kind}_free_meta": [*_FREE_META, n] for kind, n in _fits(meta_features=["name"])},
    **{
        f"{kind}_group": [*_GROUP, node]
        for kind, node in _fits(
            length_struct={"tokens": 12, "epoch": 12}, shuffle_bins_group_by_feature="epoch"
        )
    },
    "concat_split": [*_TOKENS, ["concat_split", {"length_struct": {"tokens": 8}}]],
    "concat_split_exact": [*_TOKENS, ["concat_split", {"length_struct": {"tokens": 9}}]],
    "concat_split_small": [*_TOKENS, ["concat_split", {"length_struct": {"tokens": 3}}]],
    "concat_split_no_split": [
        *_TOKENS,
        [
            "concat_split",
            {"length_struct": {"tokens": 9}, "split_full_length_features": False},
        ],
    ],
    "concat_split_bos": [
        *_TOKENS,
        [
            "concat_split",
            {
                "length_struct": {"tokens": 8},
                "bos_handling": "REPLACE_FIRST_TOKEN_WITH_BOS",
                "bos_features": ["tokens"],
                "bos_token_id": 1,
            },
        ],
    ],
    "concat_split_two_features": [
        *_TOKENS2,
        ["concat_split", {"length_struct": {"inputs": 8, "targets": 6}}],
    ],
    "concat_split_meta": [
        *_META,
        ["concat_split", {"length_struct": {"tokens": 8, "id": 3}, "meta_features": ["id"]}],
    ],
    # Users' own datasets, as source, in the middle and at the end.
    "user_map": [["range", 7], ["shuffle", 2], ["user_map"], ["map", "add_one"], ["to_iter"]],
    "user_map_filtered": [["range", 9], ["filter", "is_even"], ["user_map"], ["to_iter"]],
    "user_iter": [["range", 5], ["to_iter"], ["user_twice"]],
    "user_iter_in_the_middle": [
        ["range", 7],
        ["to_iter"],
        ["map", "add_one"],
        ["user_twice"],
        ["map_with_index", "pair"],
        ["batch", 3],
    ],
    "user_iter_source": [["user_squares", 7], ["filter", "is_even"], ["batch", 2]],
    "user_iter_prefetched": [["user_squares", 7], ["user_twice"], ["thread_prefetch", 2]],
    "user_iter_mixed": [
        ["iter_mix", [[["user_squares", 7]], [["range", 5], ["to_iter"], ["user_twice"]]]]
    ],
    # Combinations of stages that have a state.
    "window_shuffle_batch": [["range", 13], ["to_iter"], ["window_shuffle", 5, 2], ["batch", 3]],
    "batch_window_shuffle": [["range", 13], ["to_iter"], ["batch", 2], ["window_shuffle", 3, 2]],
    "window_shuffle_twice": [
        ["range", 13],
        ["to_iter"],
        ["window_shuffle", 5, 2],
        ["window_shuffle", 3, 4],
    ],
    "flat_map_window_shuffle": [
        ["range", 7],
        ["to_iter"],
        ["flat_map", "FanOut"],
        ["window_shuffle", 4, 2],
        ["map_with_index", "pair"],
    ],
    "limit_repeat": [["range", 9], ["to_iter"], ["limit", 4], ["iter_repeat", 3]],
    "repeat_limit": [["range", 4], ["to_iter"], ["iter_repeat"], ["limit", 11]],
    "repeat_window_shuffle": [
        ["range", 5],
        ["to_iter"],
        ["window_shuffle", 3, 2],
        ["iter_repeat", 2],
    ],
    "repeat_mix": [
        [
            "iter_mix",
            [
                [["range", 3], ["to_iter"], ["iter_repeat"]],
                [["range", 100, 106], ["to_iter"], ["filter", "is_even"]],
            ],
            [1, 1],
        ]
    ],
    "mix_random_map_batch": [
        ["iter_mix", _parts([9], [100, 112]), [1, 2]],
        ["random_map", "rand_u32", {"seed": 1}],
        ["batch", 2],
    ],
    "zip_of_stages": [
        [
            "iter_zip",
            [
                [["range", 9], ["to_iter"], ["filter", "is_even"]],
                [["range", 5], ["to_iter"], ["window_shuffle", 2, 1]],
            ],
        ]
    ],
    "interleave_of_stages": [
        ["interleave", _parts([7], [10, 13], [20, 26], then=[["batch", 2]]), {"cycle_length": 2}],
        ["map_with_index", "pair"],
    ],
    "interleave_made_ahead": [
        [
            "interleave",
            _parts([7], [10, 13], [20, 26], [30, 31], then=[["batch", 2]]),
            {"cycle_length": 2, "iter_buffer_size": 3},
        ],
    ],
    "interleave_window_shuffle": [
        ["interleave", _parts([4], [10, 13], [20, 26]), {"cycle_length": 2}],
        ["window_shuffle", 4, 2],
    ],
    "interleave_repeat": [
        ["interleave", _parts([3], [10, 12], [20, 21]), {"cycle_length": 2}],
        ["iter_repeat", 2],
    ],
    "interleave_cache_repeat": [
        ["interleave", _parts([3], [10, 12], [20, 21]), {"cycle_length": 2}],
        ["cache"],
        ["iter_repeat", 2],
    ],
    "prefetch_in_the_middle": [
        ["range", 13],
        ["to_iter"],
        ["thread_prefetch", 2],
        ["filter", "not_mult_3"],
        ["batch", 2],
        ["thread_prefetch", 2],
    ],
    "prefetch_window_shuffle": [
        ["range", 11],
        ["to_iter"],
        ["window_shuffle", 4, 2],
        ["thread_prefetch", 3],
    ],
    "packed_and_batched": [
        *_TOKENS,
        ["first_fit", _PACK],
        ["batch", 2],
        ["thread_prefetch", 1],
    ],
    "concat_split_batched": [
        *_TOKENS,
        ["concat_split", {"length_struct": {"tokens": 8}}],
        ["batch", 2],
    ],
    "packed_window_shuffle": [
        *_TOKENS,
        ["best_fit", {**_PACK, "num_packing_bins": 2}],
        ["window_shuffle", 3, 1],
    ],
    "mix_of_packed": [
        [
            "iter_mix",
            [
                [*_TOKENS, ["first_fit", _PACK]],
                [*_TOKENS, ["concat_split", {"length_struct": {"tokens": 12}}]],
            ],
            [1, 2],
        ],
        ["batch", 2],
    ],
    "main_job": [
        ["range", 20],
        ["seed", 7],
        ["shuffle"],
        ["repeat", 2],
        ["getslice", 1, None, 2],
        ["map", "tokens"],
        ["to_iter"],
        ["first_fit", _PACK],
        ["batch", 2, {"drop_remainder": True}],
    ],
    # Nothing at all.
    "empty": [["range", 0], ["to_iter"], ["map", "add_one"]],
    "empty_batch": [["range", 0], ["to_iter"], ["batch", 3]],
    "empty_window_shuffle": [["range", 0], ["to_iter"], ["window_shuffle", 3, 1]],
    "empty_packed": [["range", 0], ["map", "tokens"], ["to_iter"], ["first_fit", _PACK]],
    "empty_repeat": [["range", 0], ["to_iter"], ["iter_repeat", 2]],
    "all_filtered": [["range", 5], ["to_iter"], ["filter", "is_small"], ["map", "add_one"]],
}


def make(g, name):
    """The stage `name`, built with module `g`."""
    return build(g, STAGES[name])
