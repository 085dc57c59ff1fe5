"""Finds the rule of a loss: read off the end of its graph, then checked on a few samples, whole against parts.

Both the loss and its gradients must agree, on a copy of the module in eval mode and, where that runs, in float64.
"""

import copy
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partita.errors import Fault, Refused
from partita.runtime.batch import Batch, Share, taken
from partita.runtime.loss import WORDS, Counts, Rule, part_of
from partita.runtime.subject import Subject

PROBE = 4  # samples evaluated whole and in parts
WIDE_LIMIT = 200_000_000  # parameters up to which the check runs on a float64 copy


def find_rule(subject: Subject, module: nn.Module, batch: Batch, samples: int) -> Rule:
    """The rule that fits, checked on a few samples of `batch`.

    Args:
        subject: Whose loss it is.
        module: Whole; it is not changed.
        batch: A global batch.
        samples: Its size.

    Raises:
        Refused: P114, if none fits.
    """
    return _Search(subject, module, batch, samples).rule()


class _Search:
    def __init__(self, subject: Subject, module: nn.Module, batch: Batch, samples: int) -> None:
        self.subject, self.samples = subject, samples
        self.module, self.batch, self.tolerance = _copy(subject, module, batch, samples)
        self.count = min(samples, PROBE)
        self.trouble = ""  # what a part of the batch raised
        self.device = next((p.device for p in self.module.parameters()), None)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]

    def rule(self) -> Rule:
        whole = Share(0, self.count)
        value, counts = self._value(whole)
        kinds = self._candidates(value, counts)
        misses: dict[str, float] = {}
        for kind in kinds:
            misses[kind] = self._miss(kind)
            if misses[kind] <= self.tolerance:
                _, weight = part_of(Rule(kind), value, self.count, counts).numbers
                return Rule(kind, 1.0 if kind == "sum" else weight / self.count * self.samples or 1.0)
        raise Refused(_no_rule(misses, self.count, self.trouble))

    def _candidates(self, value: Any, counts: Counts) -> list[str]:
        if isinstance(value, tuple | list) and len(value) == 2:
            return ["pair"]
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise Refused(
                Fault(
                    "P114",
                    f"the loss returned {shape}",
                    law="a loss is one number, or a pair (sum, weight): the sum of sums over the sum of weights",
                    cure="loss.mean(), or (loss.sum(), count)",
                    at="loss",
                )
            )
        open_to = ["samples", "sum"] + ["counted"] * counts.heard + ["divided"] * (counts.divisor is not None)
        first = [kind for kind in tail(value) if kind in open_to]
        return list(dict.fromkeys([*first, *open_to]))

    def _value(self, share: Share) -> tuple[Any, Counts]:
        part = taken(self.batch, share, self.samples, self.device)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), Counts() as counts:
            warnings.simplefilter("ignore")  # of a handful of samples, nobody trains on them
            value = self.subject.evaluate(self.module, part)
        return value, counts

    def _miss(self, kind: str) -> float:
        """Largest difference of loss and gradients, parts against whole, relative to the largest value."""
        rule = Rule(kind)
        whole = self._sums(rule, [Share(0, self.count)])
        try:
            return _apart(whole, self._sums(rule, [Share(0, 1), Share(1, self.count - 1)])) if self.count > 1 else 0.0
        except Exception as error:  # the user's loss may not bear a part of the batch at all
            self.trouble = f"{type(error).__name__}: {error}"
            return math.inf

    def _sums(self, rule: Rule, cuts: list[Share]) -> tuple[float, list[Tensor]]:
        total = weight = 0.0
        grads = [torch.zeros_like(p) for p in self.parameters]
        for share in cuts:
            value, counts = self._value(share)
            part = part_of(rule, value, share.samples, counts)
            mine, count = part.numbers
            if not count:
                continue
            total, weight = total + mine, weight + count
            if part.total.requires_grad:
                for sum_of, g in zip(grads, torch.autograd.grad(part.total, self.parameters, allow_unused=True), strict=True):
                    sum_of += g if g is not None else 0
        by = 1.0 if rule.kind == "sum" else weight or 1.0
        return total / by, [g / by for g in grads]


def _apart(whole: tuple[float, list[Tensor]], parts: tuple[float, list[Tensor]]) -> float:
    """Relative difference of two (loss, gradients): infinite if one is no number."""
    scale = max([abs(g).max().item() for g in whole[1] if g.numel()] or [0.0])
    apart = max([abs(a - b).max().item() for a, b in zip(whole[1], parts[1], strict=True) if a.numel()] or [0.0])
    value = abs(whole[0] - parts[0]) / max(abs(whole[0]), 1e-12)
    miss = max(value, apart / max(scale, 1e-12) if scale else apart)
    return math.inf if math.isnan(miss) else miss


def _copy(subject: Subject, module: nn.Module, batch: Batch, samples: int) -> tuple[nn.Module, Batch, float]:
    """A copy in eval mode, wide where that runs, the batch for it, and the tolerance of a comparison."""
    own = copy.deepcopy(module).eval()
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in own.parameters())
    if sum(p.numel() for p in own.parameters()) <= WIDE_LIMIT:
        try:
            wide = copy.deepcopy(own).double()
            floats = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, batch)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                device = next((p.device for p in wide.parameters()), None)
                subject.evaluate(wide, taken(floats, Share(0, min(samples, 2)), samples, device))
        except (RuntimeError, TypeError, ValueError):
            pass  # it insists on its own dtype
        else:
            return wide, floats, 1e-5
    return own, batch, 3e-2 if half else 1e-4


# ---- the end of the loss's graph
PASSING = (
    "MulBackward0",
    "ToCopyBackward0",
    "ViewBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "CloneBackward0",
    "NegBackward0",
    "AliasBackward0",
)
ENDS: dict[str, str] = {
    "NllLossBackward0": "counted",
    "NllLoss2DBackward0": "counted",
    "MeanBackward0": "samples",
    "MseLossBackward0": "samples",
    "SumBackward0": "sum",
    "DivBackward0": "divided",
}


def tail(loss: Tensor) -> list[str]:
    """The rules the last ops of a loss suggest, most likely first."""
    found: list[str] = []
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop(0)
        name = node.name() if node is not None else ""
        nexts = [n for n, _ in node.next_functions if n is not None] if node is not None else []
        if name in ENDS:
            found.append(ENDS[name])
            if name == "DivBackward0":
                todo += nexts  # by a constant: what lies below decides
        elif name == "AddBackward0" or (name in PASSING and len(nexts) == 1):
            todo += nexts
    return list(dict.fromkeys(found))


def _no_rule(misses: dict[str, float], samples: int, trouble: str) -> Fault:
    tried = f"a part raised {trouble}; " * bool(trouble)
    tried += "; ".join(f"{WORDS[kind]}: off by {miss:.1e}" for kind, miss in misses.items())
    return Fault(
        "P114",
        "no rule gives the loss of a batch from the losses of its parts",
        have=f"{samples} samples whole against split unevenly, largest relative difference of loss and gradients: {tried}",
        law="the loss is computed on parts of the batch, so it must be a sum or a weighted mean of what samples contribute",
        cure="return the pair (sum, weight): the global loss is the sum of all sums over the sum of all weights",
        at="loss",
    )
