"""Y = X W^T on a cube of ranks: no operand is held twice, and the result is cut as the next product wants it.

Rank (j, i, l) of axes inputs x weights x outputs; W lies as torch keeps it, outputs x inputs.

    X   rows cut by (.., j), features by l      gathered over inputs          what is gathered lies one after another
    W   rows cut by (j, i),  columns by l       gathered over weights
    Y   rows cut by (.., l), features by j      its sum shared out over outputs

    forward   Y[.., l] = sum over l of X[.., all j][rows of l] W[j, all i; l]^T
    backward  dY gathered over outputs; dX = sum over j of dY W, shared out over inputs; dW = sum of dY^T X, over weights

Y's rows and features are cut as X's with inputs and outputs changed about, so the next product runs on `turned` axes.

Source: Bian et al. 2021, arXiv:2105.14450, section 3 (with the sum shared out in turn, and W cut along its outputs).
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partita.runtime.grid.plane import Sum, own_last
from partita.runtime.grid.workspace import Workspace
from partita.runtime.net import Net, Work


@dataclass
class Cube:
    """A cube of ranks.

    Args:
        inputs, weights, outputs: Axes of the mesh, by what travels over them; one of size 1 moves nothing.
        keep: What is gathered in the forward pass is kept for the backward; else it is gathered again.
        silent, overlapped: As of a `Plane`.
    """

    net: Net
    inputs: str
    weights: str
    outputs: str
    keep: bool = False
    silent: bool = False
    overlapped: bool = True
    space: Workspace = field(default_factory=Workspace)

    def __post_init__(self) -> None:
        self.space = self.space if not self.silent else Workspace(keeps=False)

    @property
    def turned(self) -> "Cube":
        """The cube of the next product; the buffers are the same."""
        return replace(self, inputs=self.outputs, outputs=self.inputs)


def _gather(cube: Cube, t: Tensor, axis: str, name: str | None, label: str) -> tuple[Tensor, Work | None]:
    """Begin to gather along dim 0, into the named buffer or into new memory."""
    ranks = cube.net.size(axis)
    t = t.contiguous()
    if ranks == 1:
        return t, None
    shape = (ranks * t.shape[0], *t.shape[1:])
    out = t.new_empty(shape) if name is None else cube.space.take(name, shape, t)
    return out, None if cube.silent else cube.net.all_gather_into(out, t, axis, label=label, overlapped=cube.overlapped)


def _settled(begun: tuple[Tensor, Work | None]) -> Tensor:
    out, work = begun
    if work is not None:
        work.wait()
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, cube: Cube, label: str) -> Tensor:
        ctx.cube, ctx.label = cube, label
        of_w, of_x = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        weights = _gather(cube, w, cube.weights, None if cube.keep and of_x else "weights", label)
        rows = _gather(cube, x, cube.inputs, None if cube.keep and of_w else "inputs", label)
        all_w, all_x = _settled(weights), _settled(rows)
        ctx.save_for_backward(*((all_x, all_w) if cube.keep else (x, w)))
        return _shared_out(cube, cube.outputs, all_x, all_w.t(), label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, w), cube, label = ctx.saved_tensors, ctx.cube, ctx.label
        of_x, of_w, *_ = ctx.needs_input_grad
        weights = _gather(cube, w, cube.weights, "weights", label) if of_x and not cube.keep else (w, None)
        rows = _gather(cube, x, cube.inputs, "inputs", label) if of_w and not cube.keep else (x, None)
        y = _settled(_gather(cube, grads[0], cube.outputs, "outputs", label))
        dx = _shared_out(cube, cube.inputs, y, _settled(weights), label) if of_x else None
        dw = _shared_out(cube, cube.weights, y.t(), _settled(rows), label) if of_w else None
        return dx, dw, None, None


def _shared_out(cube: Cube, axis: str, a: Tensor, b: Tensor, label: str) -> Tensor:
    """This rank's rows of the sum over the axis of A B."""
    ranks, me = cube.net.size(axis), cube.net.coordinate.get(axis, 0)
    size = a.shape[0] // ranks
    total = Sum(cube, axis, a.new_empty(size, b.shape[1]), label=label)
    for distance in own_last(ranks):
        rows = a.narrow(0, (me + distance) % ranks * size, size)
        total.turn(distance, 0, partial(_multiply, rows, b))
    return total.settle(0)


def _multiply(a: Tensor, b: Tensor, into: Tensor) -> None:
    torch.mm(a, b, out=into)


def cube_ab(x: Tensor, w: Tensor, cube: Cube, label: str = "") -> Tensor:
    """X W^T with gradients.

    Args:
        x: (rows.., K/z), rows cut last over `inputs`; leading dims free, the first of them is the one that is cut.
        w: (N/(x w), K/z), rows cut over `inputs`, then `weights`; columns over `outputs`.

    Returns:
        (rows.., N/x), rows cut last over `outputs`; the first leading dim changes where the two axes differ in size.
    """
    y = _Product.apply(x.flatten(0, -2), w, cube, label)
    return y.unflatten(0, (-1, *x.shape[1:-1])) if x.dim() > 2 else y
