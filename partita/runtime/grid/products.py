"""The three products of a plane: C = A B, C = A B^T, C = A^T B, each the gradients of the other two.

    rank (i, j) holds A[i,j], B[i,j] and gets C[i,j]

    A B      C[i,j]  = sum over l of A[i,l] B[l,j]       panels of A travel along the rows, of B along the columns
    A B^T    C[i,l]  = sum over j of A[i,j] B[l,j]^T     panels of B along the columns, summands of C along the rows
    A^T B    C[l,j]  = sum over i of A[i,l]^T B[i,j]     panels of A along the rows, summands of C along the columns

These are SUMMA's products; its broadcasts and reductions go in turns (see `plane.py`), so that no root serves a row alone.

No transposed operand is ever sent or copied: a block may be the transposed view of one that lies row by row (torch keeps the
weight of a linear layer as outputs x inputs), and what a rank receives or returns lies in the same order.

Source: van de Geijn & Watts 1997, SUMMA, doi:10.1002/(SICI)1096-9128(199704)9:4<255::AID-CPE250>3.0.CO;2-2; Xu et al. 2021,
arXiv:2104.05343, section 3.1.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partita.runtime.grid.plane import Feed, Plane, Sum
from partita.runtime.grid.workspace import dense

Grad = Callable[[], Tensor | None]


def multiply_ab(a: Tensor, b: Tensor, plane: Plane, label: str = "") -> Tensor:
    """This rank's block of A B. a: (M/r, K/c), b: (K/r, N/c); walked in panels of K."""
    a, b = dense(a), dense(b)
    turns = plane.turns(plane.col)
    left = Feed(plane, plane.col, a, turns, dim=1, name="left", label=label)
    right = Feed(plane, plane.row, b, plane.turns(plane.row), dim=0, name="right", label=label)
    out = torch.mm(left.next(), right.next())
    for _ in turns[1:]:
        out.addmm_(left.next(), right.next())
    return out


def multiply_abt(a: Tensor, b: Tensor, plane: Plane, label: str = "") -> Tensor:
    """This rank's block of A B^T. a: (M/r, K/c), b: (N/r, K/c); walked in panels of N."""
    a, b = dense(a), dense(b)
    turns = plane.turns(plane.col)
    right = Feed(plane, plane.row, b, plane.turns(plane.row), dim=0, name="right", label=label)
    out = a.new_empty(a.shape[0], b.shape[0] * plane.rows // plane.columns)
    total = Sum(plane, plane.col, out, dim=1, parts=len(turns) // plane.columns, label=label)
    for turn in turns:
        total.turn(*turn, lambda into: torch.mm(a, right.next().t(), out=into))
    return total.settle(0)


def multiply_atb(a: Tensor, b: Tensor, plane: Plane, label: str = "", *, upright: bool = True) -> Tensor:
    """This rank's block of A^T B. a: (K/r, M/c), b: (K/r, N/c); walked in panels of M.

    Args:
        upright: The result lies row by row; else column by column.
    """
    a, b = dense(a), dense(b)
    turns = plane.turns(plane.row)
    left = Feed(plane, plane.col, a, plane.turns(plane.col), dim=1, name="left", label=label)
    shape = (a.shape[1] * plane.columns // plane.rows, b.shape[1])
    out = a.new_empty(shape) if upright else a.new_empty(shape[::-1]).t()
    total = Sum(plane, plane.row, out, dim=0, parts=len(turns) // plane.rows, label=label)
    for turn in turns:
        total.turn(*turn, lambda into: torch.mm(left.next().t(), b, out=into))
    return total.settle(0)


def _in_order(of_a: Grad, of_b: Grad, *, weight_first: bool) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients, the one of b first where torch's own product makes it first."""
    if weight_first:
        b = of_b()
        return of_a(), b
    return of_a(), of_b()


class _AB(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, plane: Plane, label: str, weight_first: bool) -> Tensor:  # noqa: FBT001
        ctx.save_for_backward(a, b)
        ctx.plane, ctx.label, ctx.weight_first = plane, label, weight_first
        return multiply_ab(a, b, plane, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a, b), (c,) = ctx.saved_tensors, grads
        need_a, need_b, *_ = ctx.needs_input_grad

        def of_a() -> Tensor | None:
            return multiply_abt(c, b, ctx.plane, ctx.label) if need_a else None

        def of_b() -> Tensor | None:
            return multiply_atb(a, c, ctx.plane, ctx.label, upright=b.is_contiguous()) if need_b else None

        return *_in_order(of_a, of_b, weight_first=ctx.weight_first), None, None, None


class _ABT(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, plane: Plane, label: str, weight_first: bool) -> Tensor:  # noqa: FBT001
        ctx.save_for_backward(a, b)
        ctx.plane, ctx.label, ctx.weight_first = plane, label, weight_first
        return multiply_abt(a, b, plane, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a, b), (c,) = ctx.saved_tensors, grads
        need_a, need_b, *_ = ctx.needs_input_grad

        def of_a() -> Tensor | None:
            return multiply_ab(c, b, ctx.plane, ctx.label) if need_a else None

        def of_b() -> Tensor | None:
            return multiply_atb(c, a, ctx.plane, ctx.label, upright=b.is_contiguous()) if need_b else None

        return *_in_order(of_a, of_b, weight_first=ctx.weight_first), None, None, None


class _ATB(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, plane: Plane, label: str) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.plane, ctx.label = plane, label
        return multiply_atb(a, b, plane, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a, b), (c,) = ctx.saved_tensors, grads
        need_a, need_b, *_ = ctx.needs_input_grad
        grad_a = multiply_abt(b, c, ctx.plane, ctx.label) if need_a else None
        grad_b = multiply_ab(a, c, ctx.plane, ctx.label) if need_b else None
        return grad_a, grad_b, None, None


def ab(a: Tensor, b: Tensor, plane: Plane, label: str = "", *, weight_first: bool = False) -> Tensor:
    """A B with gradients. a: (..., K/c), b: (K/r, N/c), also as a transposed view -> (..., N/c)."""
    return _AB.apply(a.flatten(0, -2), b, plane, label, weight_first).unflatten(0, a.shape[:-1])


def abt(a: Tensor, b: Tensor, plane: Plane, label: str = "", *, weight_first: bool = False) -> Tensor:
    """A B^T with gradients. a: (..., K/c), b: (N/r, K/c) -> (..., N/c)."""
    return _ABT.apply(a.flatten(0, -2), b, plane, label, weight_first).unflatten(0, a.shape[:-1])


def atb(a: Tensor, b: Tensor, plane: Plane, label: str = "") -> Tensor:
    """A^T B with gradients. a: (..., M/c), b: (..., N/c), rows cut over `row` -> (M/r, N/c)."""
    return _ATB.apply(a.flatten(0, -2), b.flatten(0, -2), plane, label)
