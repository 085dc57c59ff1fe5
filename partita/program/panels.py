"""What the products of a grid move: a rewrite says it from here, and the runtime's kernels do it.

A mesh of r rows and c columns; rank (i, j) holds block (i, j) of every operand. It talks to the ranks of its row over axis
`col` (the number of the column varies) and to those of its column over axis `row`. A dim that one operand cuts over the rows
and another over the columns is walked in L = lcm(r, c) equal panels, each inside one block of either cut.

    product   over col                     over row                     elements over the whole mesh
    A B       A, L/c panels a block        B, L/r panels a block        (c-1)|A| + (r-1)|B|
    A B^T     C, L/c panels a block        B, L/r panels a block        (c-1)|C| + (r-1)|B|
    A^T B     A, L/c panels a block        C, L/r panels a block        (c-1)|A| + (r-1)|C|

    cube X W  gathers of X over x ranks and of W over w, z-1 exchanges of a block of Y        (x-1)|X| + (w-1)|W| + (z-1)|Y|

All of it is exchanges, a send and a receive each: in every turn each rank works on another panel, sends one and receives one,
so all ranks make the same calls.

Sources: Xu et al. 2021, arXiv:2104.05343, section 3.1, algorithms 1 to 3 (square meshes; broadcasts and reductions for the
exchanges, the same volume); Bian et al. 2021, arXiv:2105.14450, section 3 (the cube).
"""

from dataclasses import dataclass
from math import lcm


@dataclass(frozen=True, slots=True)
class Moved:
    """One call of a rank: the op, which of the product's axes it goes over, and bytes of its large side."""

    op: str
    over: str
    nbytes: int


def panel_count(rows: int, columns: int) -> int:
    """Panels of a dim that is cut over the rows here and over the columns there."""
    return lcm(rows, columns)


def ab(rows: int, columns: int, a: int, b: int) -> list[Moved]:
    """The calls of C = A B, in order on each axis. a, b: bytes of a rank's block of A and of B."""
    count = panel_count(rows, columns)
    return [*exchanges("col", columns, a, count // columns), *exchanges("row", rows, b, count // rows)]


def abt(rows: int, columns: int, b: int, c: int) -> list[Moved]:
    """The calls of C = A B^T. b, c: bytes of a rank's block of B and of C."""
    return ab(rows, columns, c, b)


def atb(rows: int, columns: int, a: int, c: int) -> list[Moved]:
    """The calls of C = A^T B. a, c: bytes of a rank's block of A and of C."""
    return ab(rows, columns, a, c)


def lookup(rows: int, table: int) -> list[Moved]:
    """The calls of an embedding, and of its gradient: blocks of the table. table: bytes of a rank's block."""
    return exchanges("row", rows, table)


def cube(inputs: int, weights: int, outputs: int, x: int, w: int, y: int) -> list[Moved]:
    """The calls of Y = X W on a cube, forward. x, w, y: bytes of a rank's block; the sizes of the axes come first."""
    moved = [*gathers("weights", weights, w * weights), *gathers("inputs", inputs, x * inputs)]
    return [*moved, *exchanges("outputs", outputs, y)]


def cube_backward(inputs: int, weights: int, outputs: int, x: int, w: int, y: int) -> list[Moved]:
    """The calls of both gradients on a cube, from what was gathered in the forward pass and kept."""
    moved = [*gathers("outputs", outputs, y * outputs), *exchanges("inputs", inputs, x)]
    return [*moved, *exchanges("weights", weights, w)]


def exchanges(over: str, size: int, block: int, panels: int = 1) -> list[Moved]:
    """The exchanges of all blocks over an axis of `size` ranks, each of so many panels. block: bytes."""
    each = block // panels
    return [Moved("send", over, each), Moved("receive", over, each)] * ((size - 1) * panels)


def gathers(over: str, size: int, nbytes: int) -> list[Moved]:
    """An all-gather that makes `nbytes` over an axis of `size` ranks."""
    return [Moved("all_gather", over, nbytes)] * (size > 1)
