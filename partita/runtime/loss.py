"""How the loss of a batch follows from the losses of its parts.

    pair        (sum, weight) given by the user          global = Σ sum / Σ weight
    sum         a sum over samples                       global = Σ loss
    samples     a mean over samples                      global = Σ n · loss / Σ n
    counted     a mean over counted targets              global = Σ w · loss / Σ w,  w as cross-entropy or nll_loss counts it
    averaged    a mean over elements                     global = Σ m · loss / Σ m,  m its elements
    divided     something divided by a count             global = Σ c · loss / Σ c,  c the divisor

The rule is found by `loss_rule` before step 1. Averaging the ranks' losses instead is wrong as soon as counts differ.

One microbatch contributes loss · w / nominal to the gradient; `nominal` is the expected weight of the whole batch, so that the
final division by (Σ w / nominal) is by 1 whenever all counts are as expected. A loss of several terms fits one weight only
while what each term divides by stays in proportion to it: that is watched in every microbatch.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partita.errors import Fault
from partita.runtime.loss_sources import Fit, Sources, due, finish_of
from partita.runtime.loss_terms import Counts, Number, Term, terms

WORDS = {
    "pair": "the pair's own sum and weight",
    "sum": "a sum over samples",
    "samples": "a mean over samples",
    "counted": "a mean over counted targets",
    "averaged": "a mean over elements",
    "divided": "a division by a count",
}
READ = ("counted", "averaged", "divided")  # kinds whose weight is read off a term of the loss
ALIKE = 1e-6  # relative difference up to which two divisors are in proportion


@dataclass(frozen=True)
class Rule:
    """How parts add up.

    Args:
        kind: A key of `WORDS`.
        nominal: Expected weight of the whole batch.
        term: Which term of the loss gives the weight.
        ratios: Per term: the count it divides by, over that of the rule's own term or the samples; None for one that need not
            be watched.
        fits: Per term (of a pair: of its weight): how a count the loss takes off the batch makes what it divides by; None
            where that is read as it is.
    """

    kind: str
    nominal: float = 1.0
    term: int = 0
    ratios: Sequence[float | None] = ()
    fits: Sequence[Fit | None] = ()

    @property
    def traces(self) -> bool:
        """Whether sources of counts are heard in every microbatch."""
        return any(self.fits)

    @property
    def watches(self) -> bool:
        """Whether the terms of the loss are looked at in every microbatch."""
        own = self.term if self.kind in READ else None
        return any(r is not None for k, r in enumerate(self.ratios) if k != own)


@contextmanager
def heard(rule: Rule | None, batch: Any = None) -> Iterator[Counts | None]:
    """Listen while a loss runs on a batch, if its rule needs it."""
    if rule is not None and rule.kind not in ("counted", "divided") and not rule.watches and not rule.traces:
        yield None
        return
    counts = Counts()
    with counts:
        counts.sources = Sources(batch) if rule is not None and rule.traces else None
        with counts.sources or nullcontext():
            yield counts


@dataclass(frozen=True)
class Part:
    """The loss of one part of a batch: loss · by, where weights add up over parts.

    Args:
        value: The loss, with its graph; of a pair, its sum.
        by: What makes it a sum over samples.
        weight: Its share of what the whole divides by.
        read: The term the weight was read off.
        strays: How a term left the proportion it must keep; empty if none did.
    """

    value: Tensor
    by: Number
    weight: Number
    read: Term | None = None
    strays: str = ""

    @property
    def total(self) -> Number:
        """Loss · by, without its graph, in float64."""
        return self.value.detach().double().reshape(()) * self.by

    @property
    def adds(self) -> bool:
        """Whether it is to be added up: not where nothing counts and the loss is 0 / 0."""
        total, weight = self.numbers
        return bool(weight) or (bool(self.by) and math.isfinite(total))

    @property
    def numbers(self) -> tuple[float, float]:
        """(total, weight) as plain numbers."""
        return float(self.total), float(self.weight)

    def contribution(self, rule: Rule) -> Tensor:
        """What to differentiate."""
        factor = self.by / rule.nominal
        return self.value if isinstance(factor, float) and factor == 1.0 else self.value * factor


def part_of(rule: Rule, value: Any, samples: int, counts: Counts | None) -> Part:
    """A loss value as the rule reads it."""
    if rule.kind == "pair":
        return _pair(rule, value, counts)
    read = terms(value, counts) if rule.kind in READ or rule.watches else []
    if rule.kind in READ:
        other = rule.term >= len(read) or read[rule.term].kind != rule.kind or math.isinf(float(read[rule.term].by))
        if other and not float(value.detach()):
            return Part(value, 0.0, 0.0)  # no target counts here, and the loss says zero
        if other:
            return Part(value, math.nan, math.nan, strays="the loss is made of other operations than in the first look")
        read, strays = _fitted(rule, read, counts, _near(value))
        one = read[rule.term]
        if not float(one.by) and math.isinf(float(value.detach())):
            strays = "on a part of the batch nothing counts, and what is divided by that count is not zero"
        return Part(value, one.by, one.weight, one, strays or _strays(rule, read, one.count))
    weight = 1.0 if rule.kind == "sum" else float(samples)
    return Part(value, weight, weight, strays=_strays(rule, read, weight))


def _pair(rule: Rule, value: Any, counts: Counts | None) -> Part:
    weight = value[1].detach() if isinstance(value[1], Tensor) else float(value[1])
    if not rule.traces:
        return Part(value[0], 1.0, weight)
    (one,), strays = _fitted(rule, [Term("divided", weight, weight, weight)], counts, _near(value[0]))
    return Part(value[0], 1.0, one.weight, one, strays)


def _near(value: Tensor) -> float:
    """Relative difference up to which numbers of a loss are the same."""
    return ALIKE if value.dtype not in (torch.float16, torch.bfloat16) else 1e-2


def _fitted(rule: Rule, read: list[Term], counts: Counts | None, near: float) -> tuple[list[Term], str]:
    """Terms with the weights their sources give, and how one divides by something else than its source says."""
    if not rule.traces or counts is None:
        return read, ""
    found = list(read)
    for k, fit in enumerate(rule.fits[: len(read)]):
        if fit is None:
            continue
        source, scale, values = fit[0], fit[3], counts.sources.values if counts.sources else []
        if source >= len(values):
            return found, "the loss takes fewer counts off the batch than in the first look"
        count, term = float(values[source]), read[k]
        said, given = float(due(fit, count)), float(term.count if fit[4] == "count" else term.by)
        if abs(said - given) > near * abs(said):
            return found, f"one term divides by {given:g} where its count of {count:g} says {said:g}"
        factor = (float(term.by) / given if given else 0.0) if fit[4] == "count" else 1.0
        weight = scale * count
        back = 1 / (scale * factor) if factor else 1.0
        found[k] = replace(term, count=weight, weight=weight * factor, finish=finish_of(fit), scale=back)
    return found, ""


def _strays(rule: Rule, read: list[Term], own: Number) -> str:
    if not rule.watches:
        return ""
    if len(read) != len(rule.ratios):
        return f"the loss has {len(read)} terms, and had {len(rule.ratios)}"
    for term, ratio in zip(read, rule.ratios, strict=True):
        if ratio is not None:
            count, due = float(term.count), ratio * float(own)
            if term.kind == "other" or abs(count - due) > ALIKE * abs(due):
                return f"one term divides by {abs(count):g} where {abs(due):g} would keep it in proportion"
    return ""


def formed(value: Any) -> list[Fault]:
    """What is wrong with the form of a loss: it is one number that depends on parameters, or a pair."""
    law = "a loss is one number, or a pair (sum, weight): the sum of sums over the sum of weights"
    pair = isinstance(value, tuple | list) and len(value) == 2
    number = value[0] if pair else value
    cure = "loss.mean(), or (loss.sum(), count)"
    if not isinstance(number, Tensor) or number.numel() != 1 or number.is_complex():
        kind = type(number).__name__
        if isinstance(number, Tensor):
            kind = f"a tensor of shape {tuple(number.shape)} and dtype {number.dtype}"
        what = f"the loss returned {'a pair whose sum is ' * pair}{kind}"
        return [Fault("P114", what, law=law, cure=cure, at="loss")]
    if not number.requires_grad:
        what, law = "the loss depends on no parameter that trains", "a step follows the gradient of the loss"
        cure = "a module with parameters that require a gradient; no detach() or no_grad() between them and the loss"
        return [Fault("P114", what, law=law, cure=cure, at="loss")]
    return []


def joined(rule: Rule, total: float, weight: float, read: Term | None = None, *, blank: bool = True) -> float:
    """The global loss from the sums over all parts; `blank` is whether a loss that divides by zero is no number."""
    if rule.kind == "sum":
        return total
    by = divisor(weight, read)
    return total / by if by else math.nan if blank else total


def divisor(weight: float, read: Term | None) -> float:
    """What the whole loss divides by, from the weights of all parts."""
    return read.whole(weight) if read is not None else weight
