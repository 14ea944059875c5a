"""Smaller pipelines that fail as a larger one does."""


def shrunk(ops, fails, budget=60):
    """`ops` without what is not needed for `fails(ops)`; tries at most `budget` pipelines."""
    tries = iter(range(budget))
    changed = True
    while changed:
        changed = False
        for candidate in _smaller(ops):
            if next(tries, None) is None:
                return ops
            if fails(candidate):
                ops, changed = candidate, True
                break
    return ops


def _smaller(ops):
    """Pipelines with one operation less, or with one of several joined datasets alone."""
    for position in range(len(ops) - 1, 0, -1):
        yield ops[:position] + ops[position + 1 :]
    if not ops:
        return
    for argument in ops[0][1:]:
        parts = argument.get("parts", {}).values() if isinstance(argument, dict) else argument
        for part in parts if not isinstance(parts, int | str) else ():
            if isinstance(part, list) and part and isinstance(part[0], list):
                yield part + ops[1:]
