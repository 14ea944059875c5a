"""A slow reference implementation of `Program`: random-access plans, one position at a time."""

import numpy as np

from grainmill._native import index_shuffle
from grainmill._plan import random_access as plan


def choose(proportions, position):
    """The number of the mixture's dataset at `position`, and the position in it."""
    rest, a, b = sum(proportions), position, position + 1
    for number, proportion in enumerate(proportions):
        step = rest - proportion
        next_a, next_b = a * step // rest, b * step // rest
        if a - next_a != b - next_b:
            return number, b - next_b - 1
        rest, a, b = step, next_a, next_b
    raise AssertionError("no dataset was chosen")


def _parent_position(node, position):
    """The position in the parent of a stage that only reorders."""
    if isinstance(node, plan.Seed):
        return position
    if isinstance(node, plan.Repeat):
        return position if node.reseed_each_epoch else position % node.parent.length
    epoch, index = divmod(position, node.length)
    if isinstance(node, plan.Shuffle):
        seed = (node.seed + epoch) % 2**32
        return epoch * node.length + index_shuffle(index, node.length - 1, seed, 4)
    if isinstance(node, plan.WindowShuffle):
        size = node.window_size
        if node.length % size == 0:
            epoch, index = 0, position
        window, within = divmod(index, size)
        number = epoch * -(-node.length // size) + window
        if node.length % size:
            size = min(size, node.length - window * size)
        return position - within + index_shuffle(within, size - 1, (node.seed + number) % 2**32, 4)
    record = node.start + index * node.step if isinstance(node, plan.Slice) else None
    if isinstance(node, plan.Take):
        record = int(node.indices[index])
    return record + epoch * node.parent.length


def _chosen(node, position):
    """The parent of a mixture or concatenation at `position`, and the position in it."""
    if isinstance(node, plan.Mix):
        number, key = choose(node.proportions, position)
        return node.parents[number], key
    epoch, record = divmod(position, sum(parent.length for parent in node.parents))
    for parent in node.parents:
        if record < parent.length:
            return parent, record + epoch * parent.length
        record -= parent.length
    raise AssertionError("no parent was chosen")


def element(node, position):  # noqa: PLR0911
    """The element at `position`."""
    if isinstance(node, plan.Map):
        x = element(node.parent, position)
        if x is None:
            return None
        if isinstance(node, plan.RandomMap):
            words = np.random.SeedSequence(node.seed).generate_state(4, np.uint32)
            key = words.view(np.uint64)
            bits = np.random.Philox(counter=[0, 0, 0, position], key=key)
            return node.function(x, np.random.Generator(bits))
        if isinstance(node, plan.MapWithIndex):
            return node.function(position, x)
        if isinstance(node, plan.Filter):
            return x if node.function(x) else None
        return node.function(x)
    if isinstance(node, plan.Mix | plan.Concatenate):
        return element(*_chosen(node, position))
    if isinstance(node, plan.Range):
        return node.numbers[position % node.length]
    if isinstance(node, plan.Source):
        return node.source[position % node.length if node.wraps else position]
    if isinstance(node, plan.Batch):
        epoch, number = divmod(position, node.length)
        first = number * node.batch_size
        stop = min(node.parent.length, first + node.batch_size)
        offset = epoch * node.parent.length
        return np.stack([element(node.parent, offset + i) for i in range(first, stop)])
    if isinstance(node, plan.FlatMap):
        parent_position, number = divmod(position, node.transform.max_fan_out)
        elements = node.transform.flat_map(element(node.parent, parent_position))
        return elements[number] if number < len(elements) else None
    if isinstance(node, plan.Zip):
        return tuple(element(parent, position) for parent in node.parents)
    return element(node.parent, _parent_position(node, position))


def origin(node, position):
    """The source node, the record in it and the epoch of the element at `position`."""
    if isinstance(node, plan.Mix | plan.Concatenate):
        return origin(*_chosen(node, position))
    if isinstance(node, plan.Map):
        return origin(node.parent, position)
    if isinstance(node, plan.FlatMap):
        return origin(node.parent, position // node.transform.max_fan_out)
    if isinstance(node, plan.Source) and not node.wraps:
        return node, position, 0
    if not node.parents or isinstance(node, plan.Batch | plan.Zip | plan.Select):
        epoch, record = divmod(position, node.length)
        return node, record, epoch
    return origin(node.parent, _parent_position(node, position))
