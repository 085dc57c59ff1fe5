"""LayerNorm and RMSNorm over features that are split: statistics are summed over the ranks that hold the other features.

    LayerNorm   forward    two all_reduces of a number a row: the sum, then the sum of squared differences from the mean
                backward   one all_reduce of two numbers a row: sum of g and of g x_hat
    RMSNorm     forward    one all_reduce of a number a row: the sum of squares
                backward   one all_reduce of a number a row: sum of g x_hat

    with g = dy weight and n the whole number of features
    LayerNorm   dx = (g - sum(g)/n - x_hat sum(g x_hat)/n) / std          RMSNorm   dx = (g - x_hat sum(g x_hat)/n) / rms

The variance is never a difference of two large numbers. Statistics are float32 at least. Gradients of weight and bias are sums
over the rows of this rank.

Sources: Ba, Kiros & Hinton 2016, arXiv:1607.06450, section 3; Zhang & Sennrich 2019, arXiv:1910.07467, section 3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.runtime.kernels.vocabulary import wide

Reduce = Callable[[Tensor, str], None]  # all_reduce in place, "sum"


@dataclass(frozen=True)
class _Kind:
    """Rows are scaled about their mean where they are centred, else about zero."""

    eps: float
    whole: int
    centred: bool
    reduce: Reduce


class _Norm(torch.autograd.Function):
    """Rows scaled to unit variance about their mean, or about zero, then by weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: _Kind) -> Tensor:
        at = wide(x)
        mean = at.new_zeros(())
        if kind.centred:
            mean = at.sum(-1, keepdim=True)
            kind.reduce(mean, "sum")
            at = at - mean.div_(kind.whole)
        square = at.square().sum(-1, keepdim=True)
        kind.reduce(square, "sum")
        scale = square.div_(kind.whole).add_(kind.eps).rsqrt_()
        ctx.save_for_backward(x, mean, scale, weight)
        ctx.kind = kind
        y = at * scale
        y = y if weight is None else y.mul_(weight)
        y = y if bias is None else y.add_(bias)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, mean, scale, weight), kind = ctx.saved_tensors, ctx.kind
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        dy, unit = wide(grads[0]), (wide(x) - mean) * scale
        dx = dweight = dbias = None
        rows = tuple(range(x.dim() - 1))
        if need_weight:
            dweight = (dy * unit).sum(rows).to(weight.dtype)
        if need_bias:
            dbias = dy.sum(rows).to(grads[0].dtype)
        if need_x:
            g = dy if weight is None else dy * weight
            sums = [*([g.sum(-1)] if kind.centred else []), (g * unit).sum(-1)]
            told = torch.stack(sums)
            kind.reduce(told, "sum")
            told.div_(kind.whole)
            dx = torch.addcmul(g, unit, told[-1].unsqueeze(-1), value=-1)
            dx = (dx - told[0].unsqueeze(-1) if kind.centred else dx).mul_(scale).to(x.dtype)
        return dx, dweight, dbias, None


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, whole: int, reduce: Reduce) -> Tensor:
    """This rank's features of a LayerNorm over the last dim.

    Args:
        x: (..., features of this rank).
        weight, bias: (features of this rank,), or None.
        whole: Features over all ranks.
        reduce: Sums a contiguous tensor over the ranks of the other features, in place.
    """
    return _Norm.apply(x, weight, bias, _Kind(eps, whole, centred=True, reduce=reduce))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, whole: int, reduce: Reduce) -> Tensor:
    """This rank's features of an RMSNorm over the last dim; arguments as in `layer_norm`."""
    return _Norm.apply(x, weight, None, _Kind(eps, whole, centred=False, reduce=reduce))
