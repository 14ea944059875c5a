"""A slow reference implementation of packing: every sequence checks every bin."""

from __future__ import annotations

import numpy as np


def fit(elements, capacities, num_bins, *, best_fit, max_sequences=None, alignment=None):
    """Batches of rows, each a list of (starts by feature, element)."""
    alignment = alignment or dict.fromkeys(capacities, 1)
    batches, bins = [], _empty(capacities, num_bins)
    for element in elements:
        fitting = _fitting(bins, element, capacities, max_sequences)
        if not fitting:
            batches.append([row for _, row in bins if row])
            bins = _empty(capacities, num_bins)
            fitting = _fitting(bins, element, capacities, max_sequences)
        chosen = fitting[0]
        if best_fit:
            chosen = max(fitting, key=lambda b: (sum(bins[b][0].values()), -b))
        used, row = bins[chosen]
        row.append((dict(used), element))
        for name in capacities:
            end = used[name] + len(element[name])
            used[name] = -(-end // alignment[name]) * alignment[name]
    rows = [row for _, row in bins if row]
    return [*batches, rows] if rows else batches


def _empty(capacities, num_bins):
    return [(dict.fromkeys(capacities, 0), []) for _ in range(num_bins)]


def _fitting(bins, element, capacities, max_sequences):
    return [
        number
        for number, (used, row) in enumerate(bins)
        if all(used[name] + len(element[name]) <= length for name, length in capacities.items())
        and (max_sequences is None or len(row) < max_sequences)
    ]


def row_arrays(row, capacities, padding=None):
    """A row of `fit` as an element."""
    arrays = {}
    for name, length in capacities.items():
        values = [(padding or {}).get(name, 0)] * length
        segment_ids, positions = [0] * length, [0] * length
        for segment, (starts, element) in enumerate(row, start=1):
            for position, value in enumerate(element[name]):
                at = starts[name] + position
                values[at], segment_ids[at], positions[at] = value, segment, position
        arrays[name] = np.array(values)
        arrays[f"{name}_segment_ids"] = np.array(segment_ids)
        arrays[f"{name}_positions"] = np.array(positions)
    return arrays
