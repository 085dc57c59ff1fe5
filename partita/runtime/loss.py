"""How the loss of a batch follows from the losses of its parts.

    pair        (sum, weight) given by the user          global = Σ sum / Σ weight
    sum         a sum over samples                       global = Σ loss
    samples     a mean over samples                      global = Σ n · loss / Σ n
    counted     a mean over counted targets              global = Σ w · loss / Σ w,  w as cross-entropy or nll_loss counts it
    divided     something divided by a count             global = Σ c · loss / Σ c,  c the divisor

The rule is found by `loss_rule` before step 1. Averaging the ranks' losses instead is wrong as soon as counts differ.

One microbatch contributes loss · w / nominal to the gradient; `nominal` is the expected weight of the whole batch, so that the
final division by (Σ w / nominal) is by 1 whenever all counts are as expected.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.runtime.through import Through

CROSS_ENTROPY, NLL = torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd  # pyright: ignore[reportAttributeAccessIssue]
DIVISIONS = {Tensor.div, Tensor.__truediv__, torch.div, torch.true_divide, torch.divide, Tensor.divide, Tensor.true_divide}
MEAN = 1  # torch's number for reduction="mean"
WORDS = {
    "pair": "the pair's own sum and weight",
    "sum": "a sum over samples",
    "samples": "a mean over samples",
    "counted": "a mean over counted targets",
    "divided": "a division by a count",
}


@dataclass(frozen=True)
class Rule:
    """How parts add up.

    Args:
        kind: A key of `WORDS`.
        nominal: Expected weight of the whole batch.
    """

    kind: str
    nominal: float = 1.0


class Counts(Through):
    """Hears, while a loss runs, by what it is divided: counted targets, or an explicit count."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Tensor | float = 0.0
        self.divisor: Tensor | None = None
        self.heard = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is CROSS_ENTROPY or func is NLL:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._count(*args, **kwargs)
        elif func in DIVISIONS and isinstance(out, Tensor) and not out.dim():
            by = args[1] if len(args) > 1 else kwargs.get("other")
            if isinstance(by, Tensor) and not by.requires_grad and by.dim() == 0:
                self.divisor = by
        return out

    def _count(
        self,
        given: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        *_: Any,
        **__: Any,
    ) -> None:
        if reduction != MEAN:
            return
        self.heard = True
        if target.is_floating_point():  # class probabilities: every target counts
            self.counted = self.counted + target.numel() / target.shape[1 if target.dim() > 1 else 0]
            return
        counts = target != ignore_index
        self.counted = self.counted + (counts.sum().double() if weight is None else weight[target[counts]].sum().double())


@contextmanager
def heard(rule: Rule | None) -> Iterator[Counts | None]:
    """Listen while a loss runs, if its rule needs it."""
    if rule is not None and rule.kind not in ("counted", "divided"):
        yield None
        return
    counts = Counts()
    with counts:
        yield counts


@dataclass
class Part:
    """The loss of one part of a batch: `total` = loss · weight, with its graph, and the weight."""

    total: Tensor
    weight: Tensor | float

    @property
    def numbers(self) -> tuple[float, float]:
        """(total, weight) as plain numbers."""
        weight = self.weight.detach() if isinstance(self.weight, Tensor) else self.weight
        return float(self.total.detach()), float(weight)

    def contribution(self, rule: Rule) -> Tensor:
        """What to differentiate."""
        return self.total if rule.nominal == 1.0 else self.total / rule.nominal


def part_of(rule: Rule, value: Any, samples: int, counts: Counts | None) -> Part:
    """A loss value as the rule reads it."""
    if rule.kind == "pair":
        return Part(value[0], value[1])
    if rule.kind == "sum":
        return Part(value, 1.0)
    if rule.kind == "samples":
        return Part(value * samples, float(samples))
    assert counts is not None
    weight = counts.counted if rule.kind == "counted" else counts.divisor
    assert weight is not None, "a rule that listens has heard something"
    return Part(value * weight, weight)


def joined(rule: Rule, total: float, weight: float) -> float:
    """The global loss from the sums over all parts."""
    return total if rule.kind == "sum" else total / weight if weight else math.nan
