"""How a rank's part of a tensor is cut from the whole: for each cut an axis, a dim, and the ranges of that dim it holds."""

from collections.abc import Sequence

Ranges = tuple[tuple[int, int], ...]  # (start, length), ascending
Cut = tuple[str, int, Ranges]  # axis, dim, ranges of the whole dim that this rank holds
Spans = list[Ranges]  # per dim


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """The indices in both, as ascending ranges."""
    found = []
    for s, n in a:
        for t, m in b:
            start, end = max(s, t), min(s + n, t + m)
            if start < end:
                found.append((start, end - start))
    return tuple(sorted(found))


def spans_of(shape: Sequence[int], cuts: Sequence[Cut]) -> Spans:
    """What a rank holds of a tensor of whole `shape`, per dim."""
    spans: Spans = [((0, n),) for n in shape]
    for _, dim, ranges in cuts:
        spans[dim] = intersect(spans[dim], tuple(tuple(r) for r in ranges))  # type: ignore[misc]
    return spans


def slice_of(held: Ranges, first: int, length: int) -> Ranges:
    """Of the indices in ascending ranges, so many from number `first` on.

    Example:
        >>> slice_of(((0, 2), (6, 2)), 1, 2)
        ((1, 1), (6, 1))
    """
    found, at = [], 0
    for start, n in held:
        low, high = max(first, at), min(first + length, at + n)
        if low < high:
            found.append((start + low - at, high - low))
        at += n
    return tuple(found)
