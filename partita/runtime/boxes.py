"""Which boxes of a whole tensor a rank holds, whether boxes tile it, and where two boxes cross.

A box is (offset, shape) in the whole. A rank has the product of the ranges it holds of each dim, so a part cut from a fused
matrix is several boxes:

    whole rows   q q q q k k k k v v v v        rank 1 of 2 holds rows 2-3, 6-7 and 10-11: three boxes
    local rows       q q     k k     v v
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Range = tuple[int, int]  # start and length along a dim
Placement = Sequence[tuple[str, int, Sequence[Range]]]  # for each cut: the axis, the dim, and the ranges of it this rank holds


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a whole tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """This box as an index into the whole."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """This box as an index into a tensor that holds `outer`, which must contain it."""
        return tuple(slice(a - b, a - b + n) for a, n, b in zip(self.offset, self.shape, outer.offset, strict=True))


def spans(shape: Sequence[int], placement: Placement) -> list[list[Range]]:
    """The ranges of the whole that a part of shape `shape` holds along each dim; cuts of one dim by several axes intersect."""
    found: list[list[Range]] = [[(0, n)] for n in shape]
    for dim in {dim for _, dim, _ in placement}:
        cuts = [joined(ranges) for _, at, ranges in placement if at == dim]
        kept = cuts[0]
        for other in cuts[1:]:
            kept = [r for a in kept for b in other if (r := _both(a, b))[1] > 0]
        have = sum(n for _, n in kept)
        assert have == shape[dim], f"dim {dim} of a part holds {shape[dim]} indices, its placement says {have}"
        found[dim] = kept
    return found


def joined(ranges: Sequence[Range]) -> list[Range]:
    """The same indices in as few ranges as possible, empty ones left out."""
    out: list[Range] = []
    for start, length in ranges:
        if out and start == sum(out[-1]):
            out[-1] = out[-1][0], out[-1][1] + length
        elif length:
            out.append((start, length))
    return out


def _both(a: Range, b: Range) -> Range:
    start = max(a[0], b[0])
    return start, min(sum(a), sum(b)) - start


def parts(found: list[list[Range]]) -> Iterator[tuple[Box, Box]]:
    """Each non-empty box of the whole with the box of the local tensor that holds it."""
    local = [[(at, n) for at, (_, n) in zip(_starts(ranges), ranges, strict=True)] for ranges in found]
    for whole, mine in zip(itertools.product(*found), itertools.product(*local), strict=True):
        box = Box(tuple(a for a, _ in whole), tuple(n for _, n in whole))
        if box.size:
            yield box, Box(tuple(a for a, _ in mine), box.shape)


def _starts(ranges: list[Range]) -> Iterator[int]:
    return itertools.accumulate((n for _, n in ranges[:-1]), initial=0) if ranges else iter(())


def extent(found: list[list[Range]]) -> tuple[int, ...]:
    """The smallest whole that contains the part: the largest over all ranks is the whole."""
    return tuple(max((sum(r) for r in ranges), default=0) for ranges in found)


def crossing(a: Box, b: Box) -> Box | None:
    """What two boxes have in common."""
    low = tuple(map(max, a.offset, b.offset))
    high = tuple(min(i + n, j + m) for i, n, j, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True))
    if any(i >= j for i, j in zip(low, high, strict=True)):
        return None
    return Box(low, tuple(j - i for i, j in zip(low, high, strict=True)))


def gap(boxes: Sequence[Box], shape: Sequence[int], dim: int = 0) -> str:
    """Why the boxes do not tile a tensor of this shape, each element once; empty if they do.

    The cut is a grid of slabs: along each dim the boxes' ranges are equal or disjoint.
    """
    if math.prod(shape) == 0:
        return "an empty tensor has pieces" if boxes else ""
    if dim == len(shape):
        return "" if len(boxes) == 1 else f"{len(boxes)} pieces hold the same elements"
    slabs: dict[Range, list[Box]] = {}
    for box in boxes:
        slabs.setdefault((box.offset[dim], box.shape[dim]), []).append(box)
    at = 0
    for start, length in sorted(slabs):
        if start != at:
            kind = "missing" if start > at else "held twice"
            return f"elements {min(start, at)} to {max(start, at) - 1} of dim {dim} are {kind}"
        at = start + length
    if at != shape[dim]:
        return f"the pieces reach element {at} of {shape[dim]} of dim {dim}"
    return next((found for inside in slabs.values() if (found := gap(inside, shape, dim + 1))), "")
