"""Pickles long chains of plans and datasets in pieces, whatever the limit on recursion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PIECE_LEN = 25
_PIECES_LEN = _PIECE_LEN**2


def each_once(
    end: Any,
    parents_of: Callable[[Any], tuple[Any, ...]],
    is_known: Callable[[Any], bool] | None = None,
) -> Iterator[Any]:
    """Yields all that `end` is made of and then `end`, each once and after its parents.

    It does not go beyond those for which `is_known` is true.
    """
    seen: set[int] = set()
    pending = [(end, False)]
    while pending:
        step, parents_are_known = pending.pop()
        if parents_are_known:
            yield step
        elif id(step) not in seen:
            seen.add(id(step))
            pending.append((step, True))
            if step is end or is_known is None or not is_known(step):
                pending += [(parent, False) for parent in reversed(parents_of(step))]


def in_pieces(
    step: Any,
    reduced: Any,
    parents_of: Callable[[Any], tuple[Any, ...]],
    depth_of: Callable[[Any], int],
) -> Any:
    """What `__reduce_ex__` of `step` returns instead of `reduced`.

    Every so many steps one has others above it pickled first, from the source on. So each finds
    its parents pickled already, as a pickle has every object once.
    """
    depth = depth_of(step)
    if not isinstance(reduced, tuple) or depth % _PIECE_LEN:
        return reduced
    if depth % _PIECES_LEN:
        walked = each_once(step, parents_of, lambda other: not depth_of(other) % _PIECES_LEN)
        above = [other for other in walked if not depth_of(other) % _PIECE_LEN]
    else:
        walked = each_once(step, parents_of)
        above = [other for other in walked if not depth_of(other) % _PIECES_LEN]
    above = above[:-1]  # without itself
    make, arguments, *rest = reduced
    return (_made, (above, make, arguments), *rest) if above else reduced


def _made(_: list[Any], make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return make(*arguments)
