"""Batches equal `numpy.stack`, in memory that is reused but never while it is in use."""

import gc
import re
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from oracle_stack import assert_same, padded, stacked

from grainmill import _tree as tree
from grainmill._evaluate.batches import stack as stacking
from grainmill._evaluate.batches.stack import BatchBuilder, batch_and_pad, stack
from grainmill._native import Arena, copy_rows, scalars_to_rows

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024
UNLIKE = "Expected all input elements to have the same structure but got:"
ML_DTYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4]
DTYPES = [
    *map(np.dtype, ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", "g"]),
    *map(np.dtype, [">i4", ">f8", "S3", "U2", "V5", "M8[s]", "m8[D]", ">M8[us]", "O"]),
    np.dtype([("a", "i4"), ("b", "f8", (2,))]),
    np.dtype([("a", "u1"), ("b", "f8")], align=True),
    np.dtype([("a", ">i2"), ("b", "S2")]),
    np.dtype([("a", "i2"), ("b", "O")]),
    *map(np.dtype, ML_DTYPES),
]
LAYOUTS = {
    "c": lambda a: a,
    "fortran": np.asfortranarray,
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1] if a.ndim else a,
    "strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim else a,
    "readonly": lambda a: np.broadcast_to(a, a.shape),
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape) if a.ndim else a,
}
SCALARS = [np.int64(1), np.float32(2), np.uint8(3), np.bool_(1), np.str_("a"), np.bytes_(b"bc")]


def array_of(dtype, shape, seed):
    numbers = (np.arange(int(np.prod(shape))) * 7 + seed * 13) % 5
    array = np.zeros(shape, dtype)
    if dtype.names is not None:
        array[dtype.names[0]] = numbers.reshape(shape)
    elif dtype.type is np.void and dtype.kind == "V" and dtype.isbuiltin == 1:
        array = np.frombuffer(numbers.astype("u1").repeat(dtype.itemsize), dtype).reshape(shape)
    else:
        array[...] = numbers.astype(dtype).reshape(shape)
    return array


@st.composite
def leaves(draw, num_elements):
    """One leaf of every element."""
    values = {
        "int": st.integers(-(2**64), 2**64) | st.integers(-5, 5),
        "float": st.floats(allow_nan=False) | st.integers(-5, 5),
        "bool": st.booleans(),
        "str": st.text(st.characters(codec="utf-8"), max_size=4).map(lambda x: x.rstrip("\0")),
        "bytes": st.binary(max_size=4).map(lambda x: x.rstrip(b"\0")),
    }
    kind = draw(st.sampled_from(["array", "array", "scalar", *values]))
    if kind == "scalar":
        return [draw(st.sampled_from(SCALARS))] * num_elements
    if kind != "array":
        return draw(st.lists(values[kind], min_size=num_elements, max_size=num_elements))
    dtypes = [draw(st.sampled_from(DTYPES))]
    if draw(st.integers(0, 4)) == 0:
        dtypes = [np.dtype(name) for name in draw(st.permutations(["i4", "f4", "u1"]))]
    shape = draw(nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]
    return [layout(array_of(dtypes[i % len(dtypes)], shape, i)) for i in range(num_elements)]


@st.composite
def batches(draw):
    """Elements of one random structure."""
    num_elements = draw(st.integers(1, 9))

    def column(depth):
        kind = draw(st.sampled_from(["leaf", "leaf", "dict", "list", "tuple", "point", "none"]))
        if depth == 0 or kind == "leaf":
            return draw(leaves(num_elements))
        if kind == "none":
            return [None] * num_elements
        if kind == "dict":
            names = draw(st.lists(st.sampled_from("zyxwab"), unique=True, max_size=4))
            parts = [(name, column(depth - 1)) for name in names]
            orders = [parts, parts[::-1]]
            return [{k: v[i] for k, v in orders[i % 2]} for i in range(num_elements)]
        parts = [column(depth - 1) for _ in range(2)]
        make = {"list": list, "tuple": tuple, "point": lambda pair: Point(*pair)}[kind]
        return [make([part[i] for part in parts]) for i in range(num_elements)]

    return column(draw(st.integers(0, 2)))


def bytes_of(batch):
    return [leaf.tobytes() for leaf in tree.flatten(batch)[0]]


def push_and_finish(builder, *blocks):
    for block in blocks:
        builder.push(block)
    return builder.finish()


@pytest.fixture(scope="module")
def arena():
    return Arena(poison=True)


@settings(max_examples=150)
@given(elements=batches(), cuts=st.lists(st.integers(1, 4), max_size=9), room=st.integers(0, 5))
def test_builder_matches_numpy_stack(arena, elements, cuts, room):
    builder = BatchBuilder(len(elements) + room, arena)
    rest = elements
    for cut in cuts:
        builder.push(rest[:cut])
        rest = rest[cut:]
    assert_same(push_and_finish(builder, rest), stacked(elements))


def outcome(arena, *blocks):
    builder = BatchBuilder(40, arena)
    try:
        return push_and_finish(builder, *blocks)
    except ValueError as failure:
        return str(failure)


@settings(max_examples=100)
@given(several=st.lists(batches(), min_size=1, max_size=4), data=st.data())
def test_the_engine_and_leaf_by_leaf_give_the_same(arena, several, data):
    elements = [element for one in several for element in one]
    cut = data.draw(st.integers(1, len(elements)))
    blocks = elements[:cut], elements[cut:]
    found = outcome(arena, *blocks)
    with mock.patch.object(stacking, "_layout_of", return_value=None):
        expected = outcome(arena, *blocks)
    if isinstance(expected, str):
        assert found == expected
    else:
        assert_same(found, expected)


def nested(i, value):
    part = (np.full(3, i), {"z": value, "n": None}, [np.zeros((2, 1), np.int8)])
    return {"b": part, "a": {"c": {"d": np.float32(i)}}}


def test_nested_elements_are_copied_by_the_engine(arena):
    builder = BatchBuilder(6, arena)
    for kind in (int, float, str, lambda i: np.full(2, i)):
        elements = [nested(i, kind(i)) for i in range(6)]
        builder.push(elements[:2])
        builder.push(elements[2:])
        assert builder.targets is not None
        assert_same(builder.finish(), stacked(elements))


@pytest.mark.parametrize("other", [2.5, np.float16(3), np.zeros(2), None, [1]])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_batch_goes_on_leaf_by_leaf_from_an_element_that_differs(arena, other, at):
    elements = [nested(i, i) for i in range(5)]
    elements[at] = nested(at, other)
    builder = BatchBuilder(5, arena)
    builder.push(elements[:1])
    if np.ndim(other) == 0 and other is not None:
        builder.push(elements[1:])
        assert_same(builder.finish(), stacked(elements))
        return
    with pytest.raises(ValueError, match=re.escape(f"{UNLIKE} at `['b'][1]['z']` element 0 has")):
        push_and_finish(builder, elements[1:])


@pytest.mark.parametrize("kind", "US")
def test_strings_of_no_dimension_keep_their_width(arena, kind):
    elements = [np.array("a", f"{kind}9"), np.array("b", f"{kind}9"), np.array("c", f"{kind}3")]
    assert stack(elements, arena).dtype == np.dtype(f"{kind}9")
    assert_same(stack(elements, arena), stacked(elements))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [1, 2, 300])
def test_every_dtype_matches_numpy_stack(arena, dtype, num_elements):
    elements = [array_of(dtype, (3, 2), seed) for seed in range(num_elements)]
    assert_same(stack(elements, arena), stacked(elements))
    scalars = [element[0, 0] for element in elements]
    assert_same(stack(scalars, arena), stacked(scalars))


def test_other_libraries_arrays_become_numpy_arrays(arena, tmp_path):
    elements = [{"x": jnp.full((2, 3), i, jnp.bfloat16), "y": jnp.int32(i)} for i in range(3)]
    assert_same(stack(elements, arena), stacked(elements))
    np.save(tmp_path / "rows.npy", np.arange(2000.0).reshape(2, 1000))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    assert type(mapped[0]) is np.memmap
    assert_same(stack([mapped[0], mapped[1]], arena), np.arange(2000.0).reshape(2, 1000))


def test_containers_keep_their_types(arena):
    element = OrderedDict(b=1, a=defaultdict(int, z=Point(1, (2,)), c=[3.0]))
    batch = stack([element, element], arena)
    assert_same(batch, stacked([element, element]))
    assert type(batch["a"]["z"]) is Point
    assert list(stack([{"b": 1, "a": 2}], arena)) == ["a", "b"]


def test_types_registered_with_jax_are_containers(arena):
    class Pair:
        def __init__(self, left, right):
            self.left, self.right = left, right

    jax.tree_util.register_pytree_node(
        Pair, lambda pair: ((pair.left, pair.right), None), lambda _, parts: Pair(*parts)
    )
    batch = stack([Pair(1, np.zeros(3)), Pair(2, np.ones(3))], arena)
    assert batch.left.tolist() == [1, 2]
    assert batch.right.tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("elements", "place", "expected", "found"),
    [
        ([np.zeros(3), np.zeros(3), np.zeros(2)], "", r"shape \(3,\)", r"2 has shape \(2,\)"),
        ([{"a": 1, "b": [1, np.zeros(2)]}, {"a": 1, "b": [1, np.zeros((2, 1))]}],
         "at `['b'][1]` ", r"shape \(2,\)", r"1 has shape \(2, 1\)"),
        ([{"a": 1}, {"b": 1}], "", r"a dict of \['a'\]", r"1 has a dict of \['b'\]"),
        ([{"a": 1}, {"a": 1, "b": 1}], "", r"a dict of \['a'\]", "1 has a dict of "),
        ([{"a": 1}, {"a": 1}, 3], "", "a dict of", "2 has a value of type int"),
        ([{"a": 1}, {"a": [1]}], "at `['a']` ", "a value of type int", "1 has a list of"),
        ([{"a": np.zeros(())}, {"a": {}}], "at `['a']` ", r"shape \(\)", "has an empty dict"),
        ([(1, 2), (1, 2, 3)], "", "a tuple of", "1 has a tuple of"),
        ([(1, 2), [1, 2]], "", "a tuple of", "1 has a list of"),
        ([None, 1], "", "an empty NoneType", "1 has a value of type int"),
        ([1, None], "", "a value of type int", "1 has an empty NoneType"),
        ([1, np.zeros(2)], "", "a value of type int", r"1 has shape \(2,\)"),
        (["a", "b", np.array(["a"])], "", "a value of type str", r"2 has shape \(1,\)"),
        ([np.datetime64("2020"), 1.5], "", ".*dtype datetime64", "1 has a value of type float"),
        ([np.zeros(2), np.zeros(2, "M8[s]")], "", ".*dtype float64", ".*dtype datetime64"),
    ],
)  # fmt: skip
def test_unlike_elements_are_named(arena, elements, place, expected, found):
    message = f"{UNLIKE} {re.escape(place)}element 0 has {expected}.* and element .*{found}"
    for cut in range(len(elements)):
        builder = BatchBuilder(10, arena)
        with pytest.raises(ValueError, match=message):
            push_and_finish(builder, elements[:cut], elements[cut:])
        builder.push(elements[:1])
        assert_same(builder.finish(), stacked(elements[:1]))


def test_batch_accepts_no_more_rows_than_its_size(arena):
    builder = BatchBuilder(2, arena)
    with pytest.raises(ValueError, match="a batch holds 2 elements, got 3"):
        builder.push([1, 2, 3])
    with pytest.raises(ValueError, match="at least 1 element, got 0"):
        builder.finish()
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
        BatchBuilder(0, arena)


def test_batch_larger_than_the_allocated_rows_grows(arena, monkeypatch):
    monkeypatch.setattr(stacking, "_RESERVED_BYTES", 1 << 14)
    builder = BatchBuilder(2**62, arena)
    for i in range(40):
        builder.push([np.full(1 << 12, i, "u1")])
    batch = builder.finish()
    assert batch.shape == (40, 1 << 12)
    assert (batch == np.arange(40)[:, None]).all()


def test_earlier_batches_never_change_while_alive(arena):
    rng = np.random.default_rng(0)
    builder = BatchBuilder(4, arena)
    alive = []
    for step in range(200):
        builder.push([{"x": np.full(1000, step + i), "y": float(step)} for i in range(4)])
        batch = builder.finish()
        view = {"x": batch["x"][1:, ::3], "y": batch["y"]}
        alive.append((view, bytes_of(view)))
        del batch, view
        if len(alive) > 6:
            del alive[rng.integers(len(alive))]
        assert all(bytes_of(view) == expected for view, expected in alive)


def test_memory_of_a_dropped_batch_is_reused():
    arena = Arena(poison=True)
    elements = [np.arange(1000) for _ in range(4)]
    addresses = set()
    for _ in range(20):
        batch = stack(elements, arena)
        assert batch.ctypes.data % 64 == 0
        addresses.add(batch.ctypes.data)
        del batch
    assert len(addresses) == 1


def test_batch_outlives_builder_and_arena():
    arena = Arena(poison=True)
    batch = stack([np.arange(1000)] * 3, arena)[1]
    del arena
    gc.collect()
    assert batch.tolist() == list(range(1000))


def test_jax_array_made_of_a_batch_keeps_its_values():
    builder = BatchBuilder(8, Arena(poison=True))
    kept = []
    for step in range(20):
        builder.push([np.full(4096, step, np.float32) for _ in range(8)])
        kept.append(jnp.asarray(builder.finish()))
    for step, array in enumerate(kept):
        assert (np.asarray(array) == step).all()


def test_slot_is_writable_memory_that_its_views_keep():
    arena = Arena(poison=True)
    slot = arena.slot(4000)
    assert len(slot) == 4000
    floats = np.frombuffer(slot, np.float32)
    floats[:] = 2.5
    del slot
    gc.collect()
    others = [np.frombuffer(arena.slot(4000), np.uint8) for _ in range(5)]
    assert (floats == 2.5).all()
    assert arena.free_bytes == 0
    del others
    assert arena.free_bytes > 0


def test_elements_that_are_views_of_the_batch_are_copied(arena):
    rows = arena.array((4, 5000), np.dtype("f8"))
    rows[:] = np.arange(4)[:, None]
    assert copy_rows(rows, [rows[3], rows[2], rows[1]], 0, hot=False) == 3
    assert rows[:, 0].tolist() == [3.0, 2.0, 2.0, 3.0]


def test_rows_beyond_the_end_are_not_copied(arena):
    rows = arena.array((4, 2), np.dtype("f8"))
    elements = [np.ones(2)] * 6
    assert copy_rows(rows, elements, 0, hot=False) == 4
    assert copy_rows(rows, elements, 3, hot=False) == 1
    assert copy_rows(rows, elements, 9, hot=False) == 0


@pytest.mark.parametrize(
    "dtype", ["O", *(["T"] if hasattr(np.dtypes, "StringDType") else []), [("a", "O")]]
)
def test_slots_hold_no_references(arena, dtype):
    with pytest.raises(TypeError, match="cannot be stored in a slot"):
        arena.array((3,), np.dtype(dtype))
    with pytest.raises(ValueError, match="array of plain values"):
        copy_rows(np.empty((3, 1), dtype), [np.empty(1, dtype)], 0, hot=False)


@given(data=st.data(), batch_size=st.integers(1, 40))
def test_rows_of_columns_stack_like_elements(data, batch_size):
    builder = BatchBuilder(batch_size, Arena())
    elements = []
    shapes = {"tokens": (3,), "weight": ()}
    while len(elements) < batch_size:
        # The dtype may change within a batch.
        dtypes = {key: data.draw(st.sampled_from(DTYPES[:6])) for key in shapes}
        num_rows = data.draw(st.integers(1, 8))
        columns = {
            key: array_of(dtypes[key], (num_rows, *shape), len(elements))
            for key, shape in shapes.items()
        }
        most = min(num_rows, batch_size - len(elements))
        order = data.draw(st.permutations(range(num_rows)))[: data.draw(st.integers(1, most))]
        elements += [{key: column[row] for key, column in columns.items()} for row in order]
        builder.push_rows(columns, np.array(order))
        assert len(builder) == len(elements)
    assert_same(builder.finish(), stacked(elements))


def test_rows_of_columns_continue_after_other_rows(arena):
    builder = BatchBuilder(6, arena)
    column = np.arange(8, dtype=np.int32).reshape(4, 2)
    builder.push([{"x": column[3]}])
    builder.push_rows({"x": column}, np.array([2, 0]))
    builder.push([{"x": column[1]}])
    builder.push_rows({"x": column}, np.array([1, 1]))
    np.testing.assert_array_equal(builder.finish()["x"], column[[3, 2, 0, 1, 1, 1]])
    builder.push_rows({"x": column}, np.array([0]))
    with pytest.raises(
        ValueError, match=r"at `\['x'\]` element 0 has shape .* element 1 has shape"
    ):
        builder.push_rows({"x": column[:, :1]}, np.array([0]))
    builder.push_rows({"x": column}, np.array([0]))
    with pytest.raises(ValueError, match=UNLIKE):
        builder.push_rows({"y": column}, np.array([0]))
    with pytest.raises(ValueError, match="a batch holds 6 elements, got 7"):
        builder.push_rows({"x": column}, np.zeros(7, np.int64))


def test_impossible_sizes_are_errors(arena):
    with pytest.raises(ValueError, match="too large"):
        arena.array((2**40, 2**40), np.dtype("f8"))
    with pytest.raises(MemoryError, match="no memory for a slot"):
        arena.slot(2**62)


@given(st.lists(st.integers(-(2**65), 2**65)) | st.lists(st.booleans()) | st.lists(st.floats())
       | st.lists(st.booleans() | st.floats() | st.integers() | st.none()))  # fmt: skip
def test_scalars_to_rows_matches_numpy_or_declines(values):
    rows = scalars_to_rows(values)
    kinds = set(map(type, values))
    fits = all(type(v) is not int or -(2**63) <= v < 2**63 for v in values)
    if len(kinds) != 1 or kinds == {type(None)} or not fits:
        assert rows is None
    else:
        assert_same(rows, np.stack(values))


class OwnFloat(np.float64):
    pass


NUMBER_TYPES = [np.bool_, *(np.dtype(char).type for char in "bBhHiIlLqQefdgFDG")]
OTHER_TYPES = [np.str_, np.bytes_, lambda x: np.timedelta64(x, "s"), OwnFloat]


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from([0, 0, 0, 1])), min_size=1),
       st.tuples(*[st.sampled_from(NUMBER_TYPES + OTHER_TYPES)] * 2))  # fmt: skip
def test_numpys_scalars_are_stacked_or_declined(drawn, kinds):
    values = [kinds[which](number) for number, which in drawn]
    rows = scalars_to_rows(values)
    if len(set(map(type, values))) == 1 and type(values[0]) in NUMBER_TYPES:
        assert_same(rows, np.stack(values))
    else:
        assert rows is None


@settings(max_examples=50)
@given(
    elements=st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=1, max_size=5),
    extra=st.integers(0, 3),
    pad_value=st.integers(0, 1),
)
def test_batch_and_pad_matches_oracle(elements, extra, pad_value):
    elements = [{"x": e, "y": (np.full((2, 3), e), np.float32([e]))} for e in elements]
    batch_size = len(elements) + extra
    expected = padded(elements, batch_size, pad_value)
    assert_same(batch_and_pad(elements, batch_size=batch_size, pad_value=pad_value), expected)


@pytest.mark.parametrize("num_values", [0, 4])
def test_batch_and_pad_refuses_none_and_too_many(num_values):
    with pytest.raises(ValueError, match=f"Cannot batch {num_values} values"):
        batch_and_pad([1] * num_values, batch_size=3)


def test_tree_without_jax_keeps_order_and_none(arena, monkeypatch):
    monkeypatch.setattr(tree, "jax_installed", lambda: False)
    batch = stack([{"b": 1, "a": None}, {"a": None, "b": 2}], arena)
    assert list(batch) == ["b", "a"]
    assert batch["a"].dtype == object
    assert batch["a"].tolist() == [None, None]


@settings(max_examples=50)
@given(elements=batches())
def test_flatten_matches_jax(elements):
    for element in elements:
        found, structure = tree.flatten(element)
        paths, _ = jax.tree_util.tree_flatten_with_path(element)
        assert [id(leaf) for leaf in found] == [id(leaf) for _, leaf in paths]
        named = tree.flatten_with_path(element)
        assert [path for path, _ in named] == [jax.tree_util.keystr(path) for path, _ in paths]
        rebuilt = jax.tree_util.tree_structure(structure.unflatten(found))
        assert rebuilt == jax.tree_util.tree_structure(element)
        assert tree.flatten(element)[1] == structure


def test_a_layout_holds_no_element():
    element = {"a": np.arange(5000), "b": 1}
    builder = BatchBuilder(3, Arena())
    builder.push([element] * 3)
    layout = builder.layout
    watched = weakref.ref(element["a"]), weakref.ref(builder.finish()["a"])
    del element
    assert [ref() for ref in watched] == [None, None]
    builder.expect(layout)
    kind, ((first, rows), (second, values)) = builder.targets.columns
    assert (kind, first, rows.shape, second, values) == (dict, "a", (3, 5000), "b", [])


@settings(max_examples=100)
@given(data=st.data(), has_jax=st.booleans())
def test_the_order_of_keys_does_not_matter(data, has_jax):
    """Also where the engine gives up, keys cannot be sorted, and for batches that are joined."""
    keys = data.draw(st.lists(st.sampled_from(["a", "b", "c", 1, (2,)]), min_size=1, unique=True))
    odd = data.draw(st.integers(0, 7))  # the row that has another dtype, if there are so many

    def element(row):
        order = data.draw(st.permutations(keys))
        dtype = np.float64 if row == odd else np.int32
        return {key: np.full(2, 10 * row + keys.index(key), dtype) for key in order}

    elements = [{"x": element(row), "y": (element(row), row)} for row in range(6)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "jax_installed", lambda: has_jax)
        patch.setattr(stacking, "jax_installed", lambda: has_jax)
        whole = stack(elements)
        for key, column in [*whole["x"].items(), *whole["y"][0].items()]:
            expected = np.stack([element["x"][key] for element in elements])
            assert_same(column, expected)
        if not has_jax:
            assert list(whole["x"]) == list(elements[0]["x"])
        if len(set(map(type, keys))) == 1:  # else joined batches need the same order
            parts = [stack(elements[:3]), stack(elements[3:])]
            joined = tree.map_structure(lambda *each: np.concatenate(each), *parts)
            assert_same(joined["x"], whole["x"])
