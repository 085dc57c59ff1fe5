"""Gradients that go smaller than they are: how much of a flat buffer of n elements of v bytes goes, over K ranks.

top_k       all_gather K k v, all_gather K k 4                                              k = ratio n
quantized   all_to_all of b bits an element, all_to_all v a bucket; back all_gather n v, or the same again
low rank    all_reduce of P and of what is too small, all_reduce of Q: (rows + columns) r v a matrix
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from partita.program.events import Collective, Phase
from partita.program.program import Program
from partita.program.relaxing import Lane, call, is_cut

KEY = "int32"
WHOLE = 32  # bits that stand for no quantisation


@dataclass(frozen=True)
class TopK:
    """The largest elements go, the rest is kept for later.

    Args:
        ratio: Share that goes.
        momentum: Kept by each rank before anything is chosen; 0: none.
    """

    ratio: float
    momentum: float

    def count(self, size: int) -> int:
        """Elements that go among `size`."""
        return max(1, round(self.ratio * size))

    def calls(self, lane: Lane, axis: str, ranks: int) -> list[Collective]:
        """What one step of a lane sends."""
        count = ranks * self.count(lane.size)
        kinds = (lane.dtype, "values"), (KEY, "keys")
        return [call("all_gather", axis, count, dtype, Phase.SYNC, what) for dtype, what in kinds]


@dataclass(frozen=True)
class Quantized:
    """Every element goes in a few bits, with a scale for each bucket of them.

    Args:
        bits: Of an element; `WHOLE`: as it is.
        bucket: Elements that share a scale.
        both: The means come back in as few bits.
    """

    bits: int
    bucket: int
    both: bool

    def packed(self, width: int) -> int:
        """Bytes of a shard of `width` elements."""
        return -(-width * self.bits // 8)

    def scales(self, width: int) -> int:
        """Buckets of a shard."""
        return -(-width // self.bucket)

    def calls(self, lane: Lane, axis: str, ranks: int) -> list[Collective]:
        """What one step of a lane sends."""
        width = lane.width(ranks)
        whole = [call("all_gather", axis, ranks * width, lane.dtype, Phase.SYNC, "means")]
        if self.bits == WHOLE:
            return [call("all_to_all", axis, ranks * width, lane.dtype, Phase.SYNC, "gradients"), *whole]
        sizes = (self.packed(width), "uint8", "levels"), (self.scales(width), lane.dtype, "scales")

        def few(op: str) -> list[Collective]:
            return [call(op, axis, ranks * size, dtype, Phase.SYNC, what) for size, dtype, what in sizes]

        return few("all_to_all") + (few("all_gather") if self.both else whole)


@dataclass(frozen=True)
class LowRank:
    """Matrices go as products of two thin ones.

    Args:
        rank: Columns of each.
    """

    rank: int

    def thin(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """(rows, columns) of a parameter that goes as a product; None: it would not be smaller."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        return (rows, columns) if (rows + columns) * self.rank < rows * columns else None

    def calls(self, shapes: Sequence[tuple[Sequence[int], int]], dtype: str, axis: str) -> list[Collective]:
        """What one step of a lane sends: shapes of its parameters, and how many there are of each."""
        left = right = plain = 0
        for shape, copies in shapes:
            found = self.thin(shape)
            if found is None:
                plain += copies * math.prod(shape)
            else:
                left, right = left + copies * found[0] * self.rank, right + copies * found[1] * self.rank
        sizes = (left + plain, "left"), (right, "right")
        return [call("all_reduce", axis, size, dtype, Phase.SYNC, what) for size, what in sizes if size]


def shapes_of(program: Program) -> list[list[tuple[tuple[int, ...], int]]]:
    """Of each lane, the shapes of its parameters and how many copies there are of each."""
    copies, found = program.copies(), {False: [], True: []}
    for t in program.parameters():
        if t.id in program.gradients:
            found[is_cut(t)].append((program.local_shape(t.id), copies.get(t.id, 1)))
    return [some for some in found.values() if some]
