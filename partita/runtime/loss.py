"""How the loss of a batch follows from the losses of its parts.

    pair        (sum, weight) given by the user          global = Σ sum / Σ weight
    sum         a sum over samples                       global = Σ loss
    samples     a mean over samples                      global = Σ n · loss / Σ n
    counted     a mean over counted targets              global = Σ w · loss / Σ w,  w as cross-entropy or nll_loss counts it
    divided     something divided by a count             global = Σ c · loss / Σ c,  c the divisor

The rule is read off the loss's own graph and checked before step 1: a few samples are evaluated whole and in uneven parts, on a
copy in eval mode, and loss and gradients must agree. Averaging the ranks' losses instead is wrong as soon as counts differ.

One microbatch contributes loss · w / nominal to the gradient; `nominal` is the expected weight of the whole batch, so that the
final division by (Σ w / nominal) is by 1 whenever all counts are as expected.
"""

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partita.errors import Fault, Refused
from partita.runtime.batch import Batch, Share, taken
from partita.runtime.subject import Subject
from partita.runtime.through import Through

CROSS_ENTROPY, NLL = torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd  # pyright: ignore[reportAttributeAccessIssue]
DIVISIONS = {Tensor.div, Tensor.__truediv__, torch.div, torch.true_divide, torch.divide, Tensor.divide, Tensor.true_divide}
MEAN = 1  # torch's number for reduction="mean"
PROBE = 5  # samples evaluated whole and in parts
WIDE_LIMIT = 200_000_000  # parameters up to which the check runs on a float64 copy
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


# ---------------------------------------------------------------- finding the rule
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
            misses[kind] = max((self._miss(kind, cuts) for cuts in self._cuts()), default=0.0)
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

    def _cuts(self) -> list[list[Share]]:
        n = self.count
        ends = [k for k in (1, n - 2, n - 1) if 0 < k < n]
        return [[Share(0, k), Share(k, n - k)] for k in dict.fromkeys(ends)]

    def _value(self, share: Share) -> tuple[Any, Counts]:
        part = taken(self.batch, share, self.samples, self.device)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), Counts() as counts:
            warnings.simplefilter("ignore")  # of a handful of samples, nobody trains on them
            value = self.subject.evaluate(self.module, part)
        return value, counts

    def _miss(self, kind: str, cuts: list[Share]) -> float:
        """Largest difference, relative to the largest value, of loss and gradients: parts against whole."""
        rule = Rule(kind)
        whole = self._sums(rule, [Share(0, self.count)])
        try:
            parts = self._sums(rule, cuts)
        except Exception as error:  # noqa: BLE001  the user's loss may not bear a part of the batch at all
            self.trouble = f"{type(error).__name__}: {error}"
            return math.inf
        scale = max([abs(g).max().item() for g in whole[1] if g.numel()] or [0.0])
        apart = max([abs(a - b).max().item() for a, b in zip(whole[1], parts[1], strict=True) if a.numel()] or [0.0])
        value = abs(whole[0] - parts[0]) / max(abs(whole[0]), 1e-12)
        miss = max(value, apart / max(scale, 1e-12) if scale else apart)
        return miss if miss == miss else math.inf

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
