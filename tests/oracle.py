"""Slow reference implementations of the engine's fast paths: orders, seeds, mixtures, packing.

They share no code with the engine, and follow the specification one index, one round or one token
at a time.
"""

import functools
import math

import numpy as np

WORD = 2**32


# --- random numbers ------------------------------------------------------------------------------


def seed_words(seed, count):
    """`count` words from C++'s `std::seed_seq{seed}`, as the standard defines `generate`."""
    words = [0x8B8B8B8B] * count
    if count >= 623:
        shift = 11
    elif count >= 68:
        shift = 7
    elif count >= 39:
        shift = 5
    elif count >= 7:
        shift = 3
    else:
        shift = (count - 1) // 2
    near = (count - shift) // 2
    far = near + shift
    given = [1, seed]  # the number of seeds, then the seeds
    first_pass = max(len(given), count)

    def folded(value):
        return value ^ (value >> 27)

    for k in range(first_pass):
        here, p, q, before = k % count, (k + near) % count, (k + far) % count, (k - 1) % count
        mixed = 1664525 * folded(words[here] ^ words[p] ^ words[before]) % WORD
        if k == 0:
            added = mixed + 1
        elif k < len(given):
            added = mixed + here + given[k]
        else:
            added = mixed + here
        words[p] = (words[p] + mixed) % WORD
        words[q] = (words[q] + added) % WORD
        words[here] = added % WORD
    for k in range(first_pass, first_pass + count):
        here, p, q, before = k % count, (k + near) % count, (k + far) % count, (k - 1) % count
        total = (words[here] + words[p] + words[before]) % WORD
        mixed = 1566083941 * folded(total) % WORD
        reduced = (mixed - here) % WORD
        words[p] ^= mixed
        words[q] ^= reduced
        words[here] = reduced
    return words


def encrypted(value, half, keys):
    """All rounds of the cipher on a block of `2 * half` bits; an int or an array of them."""
    low = 2**half - 1

    def rotated(x, by):
        return (x << by | x >> (half - by)) & low

    def scrambled(x):
        return (rotated(x, 1) & rotated(x, 8)) ^ rotated(x, 2)

    left, right = value >> half, value & low
    for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ scrambled(right) ^ (key_left & low)
        right = right ^ scrambled(left) ^ (key_right & low)
    return left << half | right


@functools.lru_cache(maxsize=128)
def smallest_block(seed, rounds):
    """The whole permutation of 16-bit blocks, cached as small sizes cycle-walk for many steps."""
    return encrypted(np.arange(2**16), 8, seed_words(seed, rounds)).tolist()


def index_shuffle(index, max_index, seed, rounds=4):
    """Where `index` goes in the permutation of `0..=max_index` that `seed` chooses.

    Blocks are large enough for `max_index`, so sizes 4^k + 1 give a permutation, unlike in Grain.
    """
    if max_index == 0:
        return 0
    half = (max(max_index.bit_length(), 16) + 1) // 2
    if half == 8:
        step = smallest_block(seed, rounds).__getitem__
    else:
        step = functools.partial(encrypted, half=half, keys=seed_words(seed, rounds))
    value = step(index)
    while value > max_index:
        value = step(value)
    return value


def shuffled(index, length, seed):
    """The position of the parent that a shuffled dataset has at `index`."""
    epoch, position = divmod(index, length)
    return epoch * length + index_shuffle(position, length - 1, (seed + epoch) % WORD)


def derived_seed(*seeds_and_depths):
    """The derived seed of a node, from `(seed, distance)` of the seeds upstream."""
    flat = [number for pair in seeds_and_depths for number in pair]
    return int(np.random.SeedSequence(flat).generate_state(1, np.uint32)[0])


def generator(seed, index):
    """The generator that `random_map` passes to the user's function for element `index`."""
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    return np.random.Generator(np.random.Philox(counter=[0, 0, 0, index], key=key))


# --- windows -------------------------------------------------------------------------------------


def window_shuffled(elements, window_size, seed):
    """The elements of an `IterDataset`, each window shuffled and delivered in reverse."""
    out = []
    for window, start in enumerate(range(0, len(elements), window_size)):
        held = elements[start : start + window_size]
        indices = [index_shuffle(k, len(held) - 1, seed + window) for k in range(len(held))]
        out += [held[index] for index in reversed(indices)]
    return out


def window_shuffled_index(index, length, window_size, seed):
    """The parent's position at `index` of a `MapDataset` whose length the window divides."""
    assert length % window_size == 0
    window, position = divmod(index, window_size)
    return index_shuffle(position, window_size - 1, seed + window) + window * window_size


# --- mixtures ------------------------------------------------------------------------------------


def proportions(weights):
    """Weights as the integers that mixing uses."""
    return [int(weight * (100 / min(weights))) for weight in weights]


def mixed(num_elements, weights):
    """`(dataset number, position in it)` of the first elements of an endless mixture."""
    counts = proportions(weights)

    def left_to_rest(position, rest, weight):
        return position * (rest - weight) // rest

    out = []
    for k in range(num_elements):
        rest, low, high = sum(counts), k, k + 1
        for number, weight in enumerate(counts):
            next_low, next_high = (
                left_to_rest(low, rest, weight),
                left_to_rest(high, rest, weight),
            )
            if high - next_high > low - next_low:
                out.append((number, high - next_high - 1))
                break
            rest -= weight
            low, high = next_low, next_high
    return out


def mixed_length(lengths, weights):
    """The nominal length of a mixture of `MapDataset`s."""
    counts = proportions(weights)
    return int(min(n / (w / sum(counts)) for n, w in zip(lengths, counts, strict=True)))


def iter_mixed(datasets, weights):
    """The elements of a mixture of `IterDataset`s, up to the first turn of an exhausted one."""
    out = []
    for number, position in mixed(sum(map(len, datasets)) + 1, weights):
        if position >= len(datasets[number]):
            break
        out.append(datasets[number][position])
    return out


# --- workers -------------------------------------------------------------------------------------


def every_nth(elements, num_workers):
    """The elements that each worker reads."""
    return [list(elements)[worker::num_workers] for worker in range(num_workers)]


def pieces(elements, num_workers):
    """Ranges of consecutive elements, one for each worker, the longer ones first."""
    rest, out = list(elements), []
    for left in range(num_workers, 0, -1):
        size = math.ceil(len(rest) / left)
        out.append(rest[:size])
        rest = rest[size:]
    return out


def in_turn(shares):
    """One element of each share in turn; exhausted shares are skipped."""
    shares, out = [list(share) for share in shares], []
    while any(shares):
        out += [share.pop(0) for share in shares if share]
    return out


# --- packing -------------------------------------------------------------------------------------


def fitted(sequences, capacity, num_bins, *, best, max_sequences=None, alignment=1):
    """Rows of `[(start, sequence)]`: whole sequences in order, rows in order of bins."""
    rows, bins = [], [[] for _ in range(num_bins)]

    def used(content):
        if not content:
            return 0
        start, last = content[-1]
        return math.ceil((start + len(last)) / alignment) * alignment

    def candidates(sequence):
        return [
            content
            for content in bins
            if used(content) + len(sequence) <= capacity
            and (max_sequences is None or len(content) < max_sequences)
        ]

    for sequence in sequences:
        fitting = candidates(sequence)
        if not fitting:
            rows += [content for content in bins if content]
            bins = [[] for _ in range(num_bins)]
            fitting = candidates(sequence)
        # `max` returns the first of the fullest.
        chosen = max(fitting, key=used) if best else fitting[0]
        chosen.append((used(chosen), sequence))
    return rows + [content for content in bins if content]


def concatenated(sequences, capacity):
    """Rows of `[(start, segment)]`: the concatenated tokens, split wherever a row is full."""
    rows, row, filled = [], [], 0
    for sequence in sequences:
        rest = list(sequence)
        while rest:
            segment, rest = rest[: capacity - filled], rest[capacity - filled :]
            row.append((filled, segment))
            filled += len(segment)
            if filled == capacity:
                rows.append(row)
                row, filled = [], 0
    return rows + ([row] if row else [])


def packed_row(content, capacity, *, padding=0):
    """`(values, segment ids, positions)` of a row, as lists."""
    values, segments, positions = [padding] * capacity, [0] * capacity, [0] * capacity
    for segment, (start, sequence) in enumerate(content, start=1):
        for k, token in enumerate(sequence):
            values[start + k], segments[start + k], positions[start + k] = token, segment, k
    return values, segments, positions


def bin_order(num_rows, seed, rows_before):
    """The order in which the rows of one packed batch are delivered if bins are shuffled."""
    return [int(k) for k in np.random.default_rng(seed + rows_before).permuted(range(num_rows))]
