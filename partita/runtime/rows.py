"""Rows of tensors on their way over a data axis: packed for all ranks, sent, and put back in their place.

    a: 5 rows, b: 2 rows, 2 ranks         rank 0            rank 1
    packed (ranks, width)                 a0 a1 a2 b0       a3 a4 .  b1        each tensor padded by itself
    reduce_scatter gives a rank           its line of the sum over ranks
    all_gather of each rank's line        all lines: every row of every tensor

A number without dims has no rows: it stands in every line.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from partita.program.sharding import chunk, own, padded


class Lines:
    """Tensors sent together: where each of them stands in the line of a rank.

    Args:
        shapes: Of the tensors as a rank holds them before they are shared out.
        ranks: On the axis.
        rank: This one's coordinate on it.
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: int, rank: int) -> None:
        self.shapes, self.ranks, self.rank = list(shapes), ranks, rank
        self.sizes = [padded(s, ranks) // ranks for s in shapes]
        self.width = sum(self.sizes)
        self.even = all(not s or s[0] % ranks == 0 for s in shapes)

    def pack(self, tensors: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
        """(ranks * width,): every rank's line; zeros for None and for padding."""
        whole = self.even and all(t is not None for t in tensors)
        make = torch.empty if whole else torch.zeros
        lines = make((self.ranks, self.width), dtype=dtype, device=device)
        for t, room in zip(tensors, lines.split(self.sizes, 1), strict=True):
            if t is not None:
                _spread(room, t, self.ranks)
        return lines.view(-1)

    def line(self, pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """(width,): this rank's line, from its rows of each tensor."""
        found = torch.zeros(self.width, dtype=dtype, device=device)
        for piece, room in zip(pieces, found.split(self.sizes), strict=True):
            room[: piece.numel()].copy_(piece.reshape(-1))
        return found

    def rows(self, line: Tensor) -> list[Tensor]:
        """This rank's rows of each tensor, as views of its line."""
        found = []
        for shape, room in zip(self.shapes, line.split(self.sizes), strict=True):
            mine = (own(shape[0], self.ranks, self.rank)[1], *shape[1:]) if shape else ()
            found.append(room[: math.prod(mine)].view(mine))
        return found

    def unpack(self, lines: Tensor, tensors: Sequence[Tensor]) -> None:
        """Write all rows of all lines into the tensors."""
        for t, room in zip(tensors, lines.view(self.ranks, self.width).split(self.sizes, 1), strict=True):
            _collect(t, room, self.ranks)


def piece_of(t: Tensor, ranks: int, rank: int) -> Tensor:
    """This rank's rows, as a view; a number is everyone's."""
    return t.narrow(0, *own(t.shape[0], ranks, rank)) if t.dim() else t


def _parts(t: Tensor, room: Tensor, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """(rows of the tensor, where they stand in the lines): the ranks with all their rows together, then the one with fewer."""
    flat, rows = t.reshape(-1), t.shape[0]
    size = chunk(rows, ranks)
    full = rows // size if size else 0
    each = room.shape[1]
    found = [(flat[: full * each].view(full, each), room[:full])] if full else []
    rest = flat[full * each :]
    return found + ([(rest, room[full, : rest.numel()])] if rest.numel() else [])


def _spread(room: Tensor, t: Tensor, ranks: int) -> None:
    if not t.dim():
        room.copy_(t.expand(room.shape))
        return
    for part, place in _parts(t, room, ranks):
        place.copy_(part)


def _collect(t: Tensor, room: Tensor, ranks: int) -> None:
    if not t.dim():
        t.copy_(room[0, 0])
        return
    if not t.is_contiguous():
        whole = torch.empty(t.shape, dtype=t.dtype, device=t.device)
        _collect(whole, room, ranks)
        t.copy_(whole)
        return
    for part, place in _parts(t, room, ranks):
        part.copy_(place)
