"""Embedding on a plane: A B whose A is one-hot, so that only the table travels; its gradient is the A^T B."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from partita.runtime.grid.plane import Feed, Plane, Sum, own_last
from partita.runtime.grid.workspace import dense
from partita.runtime.kernels.vocabulary import Classes


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, plane: Plane, padding: int | None, label: str) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.plane, ctx.padding, ctx.label, ctx.shape = plane, padding, label, table.shape
        turns = [(distance, 0) for distance in range(plane.rows)]
        feed = Feed(plane, plane.row, dense(table), turns, dim=0, name="right", label=label)
        out = table.new_zeros(*tokens.shape, table.shape[1])
        for distance, _ in turns:
            rows = feed.next()
            if not plane.silent:  # a rehearsal's tokens cannot be read
                index, here = _classes(plane, distance, len(rows)).local(tokens, "token")
                out += rows[index] * here.unsqueeze(-1).to(out.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (tokens,), plane, grad = ctx.saved_tensors, ctx.plane, grads[0]
        counted = torch.ones_like(tokens, dtype=torch.bool) if ctx.padding is None else tokens != ctx.padding

        def compute(into: Tensor, distance: int) -> None:
            into.zero_()
            if not plane.silent:
                index, here = _classes(plane, distance, len(into)).local(tokens, "token")
                rows = grad * (here & counted).unsqueeze(-1).to(grad.dtype)
                into.index_add_(0, index.flatten(), rows.flatten(0, -2))

        total = Sum(plane, plane.row, grad.new_empty(ctx.shape), label=ctx.label)
        for distance in own_last(plane.rows):
            total.turn(distance, 0, partial(compute, distance=distance))
        return None, total.settle(0), None, None, None


def _classes(plane: Plane, distance: int, size: int) -> Classes:
    """Those of the block that far on down the column."""
    return Classes((plane.i + distance) % plane.rows * size, size, plane.rows * size)


def lookup(tokens: Tensor, table: Tensor, plane: Plane, padding: int | None = None, label: str = "") -> Tensor:
    """Rows of a table for tokens, with gradients.

    Args:
        tokens: Any shape, int64; the same on every column of the plane.
        table: (V/r, H/c).
        padding: Class whose row gets no gradient.

    Raises:
        IndexError: If a token is none of the V.
    """
    return _Lookup.apply(tokens, table, plane, padding, label)
