"""Embedding and cross-entropy on a split vocabulary.

A rank holds the classes start .. start + size. What it computes, N being the number of targets:

    embedding       rows of its own classes, zero elsewhere: a summand of the whole value
    log-softmax     all_reduce(max) and all_reduce(sum) of N statistics, float32 at least; its own columns come out
    picking (nll)   minus the log-probabilities of its own targets: a summand of the whole loss

The backward moves nothing: the gradient of the picked values is one-hot, so its sum over all classes, which the softmax
needs, is known on every rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
PIECE = 1 << 18  # elements of half rows that are widened at a time: 1 MiB
Reduce = Callable[[Tensor, str], None]  # all_reduce in place, "max" or "sum"


@dataclass(frozen=True)
class Classes:
    """The classes this rank holds: `size` of `whole`, from `start` on."""

    start: int
    size: int
    whole: int

    def local(self, index: Tensor, what: str) -> tuple[Tensor, Tensor]:
        """Local numbers of global classes (0 where another rank holds them), and which are held here."""
        if index.numel() and index.device.type == "cpu":
            low, high = torch.aminmax(index)
            if low < 0 or high >= self.whole:
                raise IndexError(f"{what} {int(low if low < 0 else high)} is outside the {self.whole} classes")
        mine = (index >= self.start) & (index < self.start + self.size)
        return torch.where(mine, index - self.start, 0), mine


def embedding(tokens: Tensor, weight: Tensor, classes: Classes, padding: int | None = None) -> Tensor:
    """Rows of the classes held here, zero for the others. tokens: (...), int64; weight: (size, hidden)."""
    index, mine = classes.local(tokens, "token")
    inside = padding is not None and 0 <= padding - classes.start < classes.size
    rows = torch.embedding(weight, index, padding - classes.start if inside and padding is not None else -1)
    return rows * mine.unsqueeze(-1).to(rows.dtype)


@dataclass
class Known:
    """What the gradient of a log-softmax sums to over all classes, put here by whoever picked from it."""

    total: Tensor | None = None


@dataclass(frozen=True)
class Pick:
    """How targets are picked and reduced, as `F.nll_loss` says it: reduction "none", "mean" or "sum"."""

    classes: Classes
    reduction: str = "mean"
    ignore: int = -100
    known: Known = field(default_factory=Known)

    def forward(self, logs: Tensor, target: Tensor, shift: Tensor | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The summand of the loss. logs: (N, size), local; target: (N,); shift: (N,), to be taken off what is picked."""
        counted = target != self.ignore
        index, mine = self.classes.local(torch.where(counted, target, 0), "target")
        mine = mine & counted
        picked = wide(logs.gather(1, index.unsqueeze(1)).squeeze(1))
        picked = torch.where(mine, picked if shift is None else picked - shift, 0)
        count = counted.sum().to(picked.dtype) if self.reduction == "mean" else picked.new_ones(())
        loss = -picked if self.reduction == "none" else -picked.sum() / count
        return loss, (index, mine, self._weight(counted, count))

    def _weight(self, counted: Tensor, count: Tensor) -> Tensor:
        """Minus what a unit gradient of the loss is worth per target; (N,)."""
        return torch.where(counted, -1 / count, 0)


def _rows(x: Tensor) -> Tensor:
    """(N, C) of logits (C,), (N, C) or (N, C, d1, ...)."""
    return x.unsqueeze(0) if x.dim() == 1 else x.movedim(1, -1).reshape(-1, x.shape[1])


def _back(grad: Tensor, like: torch.Size) -> Tensor:
    """The gradient of `_rows`."""
    if len(like) <= 2:
        return grad.reshape(like)
    return grad.reshape(like[0], *like[2:], like[1]).movedim(-1, 1)


def normaliser(rows: Tensor, reduce: Reduce) -> Tensor:
    """log-sum-exp over all classes, (N, 1), float32 at least. rows: (N, size), local."""
    top = wide(rows.amax(1, keepdim=True))
    reduce(top, "max")
    top = torch.where(top.isinf(), 0, top)
    total = torch.cat([less(*some).exp_().sum(1, keepdim=True) for some in pieces(rows, top)])
    reduce(total, "sum")
    return total.log_().add_(top)


def wide(x: Tensor) -> Tensor:
    """float32 at least."""
    return x.float() if x.dtype in HALF else x


def less(rows: Tensor, by: Tensor) -> Tensor:
    """The difference of rows and statistics, float32 at least: never two wide copies of half rows at once."""
    return wide(rows).sub_(by) if rows.dtype in HALF else rows - by


def pieces(rows: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of several tensors; few at a time where they are to be widened, so that no whole wide copy is made."""
    few = max(1, PIECE // max(1, rows.shape[1])) if rows.dtype in HALF else max(1, len(rows))
    return zip(*(t.split(few) for t in (rows, *others)), strict=True)


class CrossEntropy(torch.autograd.Function):
    """A summand of `F.cross_entropy` of local logits (N, size) and whole targets (N,)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, pick: Pick, reduce: Reduce) -> Tensor:
        rows = _rows(logits)
        norm = normaliser(rows, reduce)
        loss, (index, mine, weight) = pick.forward(rows, target.reshape(-1), norm.squeeze(1))
        ctx.save_for_backward(logits, norm, index, mine, weight)
        shape = target.shape if pick.reduction == "none" else ()
        return loss.reshape(shape).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, norm, index, mine, weight = ctx.saved_tensors
        total = weight * wide(grads[0]).reshape(-1)  # of each row over all classes
        own, rows = torch.where(mine, total, 0), _rows(logits)
        found = []
        for some, n, t, i, o in pieces(rows, norm, total, index, own):
            grad = less(some, n).exp_().mul_(-t.unsqueeze(1)).scatter_add_(1, i.unsqueeze(1), o.unsqueeze(1))
            found.append(grad.to(logits.dtype))
        return _back(found[0] if len(found) == 1 else torch.cat(found), logits.shape), None, None, None


class LogSoftmax(torch.autograd.Function):
    """The local columns of a log-softmax along `dim`, whose gradient's sum over classes will be `known`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, known: Known, reduce: Reduce) -> Tensor:
        rows = x.movedim(dim, -1).reshape(-1, x.shape[dim])
        out = less(rows, normaliser(rows, reduce))
        ctx.known, ctx.dim = known, dim
        out = out.reshape(x.movedim(dim, -1).shape).movedim(-1, dim).to(x.dtype)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,), grad = ctx.saved_tensors, grads[0]
        assert ctx.known.total is not None, "a log-softmax over a split dim was read by something else than a loss"
        moved = out.movedim(ctx.dim, -1)
        total = ctx.known.total.reshape(*moved.shape[:-1], 1).to(grad.dtype)
        return grad - (moved.exp() * total).movedim(-1, ctx.dim), None, None, None


class Picked(torch.autograd.Function):
    """A summand of `F.nll_loss` of local log-probabilities (N, size) and whole targets (N,)."""

    @staticmethod
    def forward(ctx: Any, logs: Tensor, target: Tensor, pick: Pick) -> Tensor:
        loss, (index, mine, weight) = pick.forward(_rows(logs), target.reshape(-1))
        ctx.pick, ctx.like = pick, logs.shape
        ctx.save_for_backward(index, mine, weight)
        return loss.reshape(target.shape if pick.reduction == "none" else ()).to(logs.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        index, mine, weight = ctx.saved_tensors
        total = weight * wide(grads[0]).reshape(-1)
        ctx.pick.known.total = total
        grad = total.new_zeros(len(index), ctx.pick.classes.size)
        grad.scatter_(1, index.unsqueeze(1), torch.where(mine, total, 0).unsqueeze(1))
        return _back(grad.to(grads[0].dtype), ctx.like), None, None
