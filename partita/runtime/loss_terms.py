"""What a loss divides by, read off its graph from the end down to the reductions.

    loss = Σ_k  c_k · (Σ elements)_k / d_k        term k divides the sum of its elements by  d_k / c_k

    sum   d = 1        mean   d = its elements        cross-entropy, nll   d = counted targets, or their class weights

Only what is linear is followed: sums, differences, products and quotients with numbers. Where a count is kept away from zero
before it divides (`clamp(min=1)`, `+ 1e-8`) `loss_sources` says which count that is, for it is counts that add up over parts.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from partita.runtime.loss_sources import Finish, Number, Sources
from partita.runtime.through import Through

CROSS_ENTROPY, NLL = torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd  # pyright: ignore[reportAttributeAccessIssue]
MEAN, SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
COMPARING = {"eq", "ne", "gt", "lt", "ge", "le", "__eq__", "__ne__", "__gt__", "__lt__", "__ge__", "__le__"}
# Of the graph, by the name of the node. "SumBackward" is our own: it makes a Partial value whole.
PASSING = {
    "ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0",
    "CloneBackward0", "AliasBackward0", "SumBackward",
}  # fmt: skip
MEANS = {"MeanBackward0", "MeanBackward1"}
SUMS = {"SumBackward0", "SumBackward1", "NansumBackward0"}
REDUCING = {
    "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "BinaryCrossEntropyBackward0", "SoftMarginLossBackward0",
}  # fmt: skip
SUMMING = {"NllLossBackward0", "NllLoss2DBackward0"}  # sums if they do not take the mean, which `Counts` hears of
LINEAR = {"AddBackward0": 1, "SubBackward0": -1, "RsubBackward1": -1}  # sign of the operand scaled by alpha


@dataclass(frozen=True)
class Term:
    """One linear term of a loss.

    Args:
        kind: "counted", "averaged", "divided", "sum", or "other" when it could not be read.
        by: What the sum of its elements is divided by.
        count: The same without the factors it is multiplied by, which may change from step to step.
        weight: What adds up over parts to what the whole divides by; `by` itself, unless a count is kept away from zero.
        finish, scale: The divisor of the whole is finish(weight · scale) / scale.
    """

    kind: str
    by: Number = 0.0
    count: Number = 0.0
    weight: Number = 0.0
    finish: Finish = ()
    scale: Number = 1.0

    def whole(self, weight: float) -> float:
        """What the whole divides by, from the weights of all parts."""
        if not self.finish:
            return weight
        value: Any = torch.tensor(weight * float(self.scale), dtype=torch.float64)
        for func, args, kwargs in self.finish:
            value = func(value, *args, **kwargs)
        return float(value) / float(self.scale)


class Counts(Through):
    """Hears, while a loss runs, what its graph does not tell: the targets that count, and where other counts come from."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: dict[Any, Number] = {}  # graph node of a loss -> its targets that count
        self.sources: Sources | None = None  # if they are heard as well
        self.marks: set[int] = set()  # integers that targets are compared with, or are left out for

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (func is CROSS_ENTROPY or func is NLL) and isinstance(out, Tensor) and out.grad_fn is not None:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._count(out.grad_fn, *args, **kwargs)
        elif func.__name__ in COMPARING and len(args) == 2 and isinstance(args[0], Tensor) and isinstance(args[1], int):
            self.marks.update((args[1] - 1, args[1], args[1] + 1) if args[0].dtype != torch.bool else ())
        return out

    def _count(
        self,
        node: Any,
        given: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        *_: Any,
        **__: Any,
    ) -> None:
        self.marks.add(ignore_index)
        if reduction != MEAN:
            return
        if target.is_floating_point():  # class probabilities: every target counts
            self.counted[node] = float(target.numel() // target.shape[1 if target.dim() > 1 else 0])
            return
        counts = target != ignore_index
        self.counted[node] = counts.sum().double() if weight is None else weight[target[counts]].sum().double()


# ---------------------------------------------------------------- reading a graph
@dataclass(frozen=True)
class _Way:
    """From a node of the graph to the loss: its value is divided by `by`."""

    by: Number = 1.0
    count: Number = 1.0
    divided: bool = False

    def over(self, number: Number) -> "_Way":
        return _Way(self.by * number, self.count * number, divided=True)

    def times(self, number: Number) -> "_Way":
        zero = isinstance(number, float) and not number
        return replace(self, by=math.inf if zero else self.by / number, divided=True)


@dataclass
class _Reader:
    counts: Counts | None
    found: list[Term] = field(default_factory=list)

    def read(self, node: Any, way: _Way) -> None:
        name = node.name()
        nexts = [(k, n) for k, (n, _) in enumerate(node.next_functions) if n is not None]
        if self.counts is not None and node in self.counts.counted:
            self._term("counted", way.over(self.counts.counted[node]))
        elif name in MEANS or name in SUMS:
            inner = way.over(float(node._saved_self_sym_numel)) if name in MEANS else way
            if len(nexts) == 1 and nexts[0][1].name() == "StackBackward0":
                for below, _ in nexts[0][1].next_functions:
                    if below is not None:
                        self.read(below, inner)
            else:
                self._term("averaged" if name in MEANS else "sum", self._within(nexts, inner))
        elif name in SUMMING and node._saved_reduction == SUM:
            self._term("sum", way)
        elif name in REDUCING and node._saved_reduction:
            mean = node._saved_reduction == MEAN
            self._term("averaged" if mean else "sum", way.over(float(node._saved_self.numel())) if mean else way)
        else:
            self._linear(node, name, nexts, way)

    def _within(self, nexts: list[tuple[int, Any]], way: _Way) -> _Way:
        """The way on through numbers by which every element of a sum is multiplied or divided."""
        while len(nexts) == 1:
            node = nexts[0][1]
            name, nexts = node.name(), [(k, n) for k, (n, _) in enumerate(node.next_functions) if n is not None]
            if name == "NegBackward0":
                way = replace(way, by=-way.by)
            elif name in ("MulBackward0", "DivBackward0") and len(nexts) == 1:
                k = nexts[0][0]
                other = node._saved_other if k == 0 else node._saved_self
                if other is None or other.dim() or other.requires_grad or (name == "DivBackward0" and k == 1):
                    return way
                way = way.times(_number(other)) if name == "MulBackward0" else way.over(_number(other))
            elif name not in PASSING:
                return way
        return way

    def _linear(self, node: Any, name: str, nexts: list[tuple[int, Any]], way: _Way) -> None:
        if name in PASSING and len(nexts) == 1:
            self.read(nexts[0][1], way)
        elif name == "NegBackward0":
            self.read(nexts[0][1], replace(way, by=-way.by))
        elif name in LINEAR:
            for k, below in nexts:
                factor = LINEAR[name] * node._saved_alpha if k == 1 or name == "RsubBackward1" else 1
                self.read(below, way if factor == 1 else replace(way, by=way.by / factor))
        elif name in ("MulBackward0", "DivBackward0") and len(nexts) == 1:
            self._scaled(node, name, *nexts[0], way)
        elif way.divided and node.next_functions:
            self._term("sum", way)  # unknown itself, but what it is divided by is known
        else:
            self.found.append(Term("other"))

    def _scaled(self, node: Any, name: str, k: int, below: Any, way: _Way) -> None:
        other = node._saved_other if k == 0 else node._saved_self
        if other is None or other.numel() != 1 or (name == "DivBackward0" and k == 1):
            self.found.append(Term("other"))
        elif name == "MulBackward0":
            self.read(below, way.times(_number(other)))
        else:
            self.read(below, way.over(_number(other)))

    def _term(self, kind: str, way: _Way) -> None:
        kind = "divided" if kind == "sum" and way.divided else kind
        term = Term(kind, way.by, way.count, way.by)
        if kind in ("sum", "divided") and self.found and self._same(self.found[-1], term):
            return  # a sum that is written out
        self.found.append(term)

    @staticmethod
    def _same(one: Term, other: Term) -> bool:
        return one.kind == other.kind and one.by is other.by and one.count is other.count


def _number(t: Tensor) -> Number:
    """A factor: a plain number where it costs no wait for a device."""
    return float(t) if t.device.type == "cpu" else t.detach().double().reshape(())


def terms(loss: Tensor, counts: Counts | None) -> list[Term]:
    """The terms of a loss, in the order of its graph."""
    reader = _Reader(counts)
    if loss.grad_fn is not None:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # nobody else is to hear of it
            reader.read(loss.grad_fn, _Way())
    return reader.found
