"""Finds the rule of a loss: read off the end of its graph, then checked on a few samples, whole against parts.

Both the loss and its gradients must agree, on a twin of the module and, where that runs, in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import Fault, Refused
from partita.runtime.batch import Batch, Share
from partita.runtime.look import Look
from partita.runtime.loss import ALIKE, READ, WORDS, Part, Rule, formed, part_of
from partita.runtime.loss_fits import Fits
from partita.runtime.loss_sources import Fit
from partita.runtime.loss_terms import Counts, Term, terms
from partita.runtime.loss_trials import Trials
from partita.runtime.random import Row
from partita.runtime.subject import Subject

PROBE = 4  # samples evaluated whole and in parts
PLACES = 4  # further places of the batch to look for samples whose loss says something


def find_rule(
    subject: Subject,
    module: nn.Module,
    batch: Batch,
    samples: int,
    draws: Sequence[Row] = (),
    look: Look | None = None,
) -> Rule:
    """The rule that fits, checked on a few samples of `batch`.

    Args:
        subject: Whose loss it is.
        module: Whole; it is not changed.
        batch: A global batch.
        samples: Its size.
        draws: Where the samples are in each draw of the forward pass.
        look: At the same, if there is one already.

    Raises:
        Refused: P114, if none fits.
    """
    return _Search(look or Look(subject, module, batch, samples, draws)).rule()


class _Search:
    def __init__(self, look: Look) -> None:
        self.look = look
        self.samples, self.count, self.first = look.samples, min(look.samples, PROBE), 0
        self.trouble = ""  # what a part of the batch raised

    def rule(self) -> Rule:
        faults, pair, read, telling = self._place()
        if faults:
            raise Refused(*faults)
        misses: dict[str, float] = {}
        self.reads = [read, *self._parts_read()]
        if not telling and not pair and len(read) != 1:
            raise Refused(_nothing(self.samples))
        fits = Fits(self.look, Share(self.first, self.count), self._shares()).found() if telling else []
        trials, tried = Trials(self.look, Share(self.first, self.count), self._shares()), (0.0, "")
        for rule in [Rule("pair", fits=fits)] if pair else self._candidates(read, fits):
            miss = self._miss(rule)
            if miss <= self.look.tolerance:
                settled = self._settled(rule)
                tried = max(tried, trials.worst(settled))
                if tried[0] <= self.look.tolerance * 10:
                    return settled
            misses[rule.kind] = min(miss, misses.get(rule.kind, math.inf))
        raise Refused(_uneven(*tried, self.count) if tried[1] else _no_rule(misses, self.count, self.trouble))

    def _place(self) -> tuple[list[Fault], bool, list[Term], bool]:
        """Look for samples whose loss says something: zero, or no number, is what it is where no target counts."""
        last = self.samples - self.count
        places = [last * k // PLACES for k in range(PLACES + 1)]
        seen = self.look(Share(0, self.count), self._read)
        for self.first in dict.fromkeys(places):
            found = self.look(Share(self.first, self.count), self._read)
            if found[0] or found[3]:
                return found
        self.first = 0
        return seen

    @staticmethod
    def _read(value: Any, counts: Counts) -> tuple[list[Fault], bool, list[Term], bool]:
        if faults := formed(value):
            return faults, False, [], False
        pair = not isinstance(value, Tensor)
        number = float((value[0] if pair else value).detach())
        return [], pair, [] if pair else _plain(terms(value, counts)), bool(number) and math.isfinite(number)

    def _parts_read(self) -> list[list[Term]]:
        try:
            return [self.look(s, self._read)[2] for s in self._shares()]
        except Exception as error:  # the module may not bear a part of the batch at all
            self.trouble = f"{type(error).__name__}: {error}"
            return []

    def _shares(self) -> list[Share]:
        return [Share(self.first, 1), Share(self.first + 1, self.count - 1)] if self.count > 1 else []

    def _steady(self) -> bool:
        """Whether the loss is made of the same terms whatever the samples."""
        return all([t.kind for t in read] == [t.kind for t in self.reads[0]] for read in self.reads)

    def _candidates(self, read: list[Term], fits: list[Fit | None]) -> list[Rule]:
        kinds = [(t.kind, k) for k, t in enumerate(read) if t.kind in READ] if self._steady() else []
        found = [Rule(kind, term=k, fits=fits) for kind, k in kinds]
        return [*found, *([] if any(fits) else [Rule("samples"), Rule("sum")])]

    def _settled(self, rule: Rule) -> Rule:
        """The rule with its expected weight, and what is to be watched."""
        weight = self.look(
            Share(self.first, self.count), lambda value, counts: part_of(rule, value, self.count, counts).numbers[1], given={}
        )
        nominal = 1.0 if rule.kind == "sum" else weight / self.count * self.samples or 1.0
        return replace(rule, nominal=nominal, ratios=self._ratios(rule))

    def _ratios(self, rule: Rule) -> Sequence[float | None]:
        """What each term divides by, over the rule's own count; None where it is not in proportion even in this look."""
        if rule.kind in ("pair", "sum") or not self._steady() or len(self.reads) < 2:
            return ()
        counts = [self.count, *(s.samples for s in self._shares())]
        by: list[float] = []
        for read, samples in zip(self.reads, counts, strict=True):
            by.append(float(read[rule.term].count) if rule.kind in READ else float(samples))
        ratios: list[float | None] = []
        for k, term in enumerate(self.reads[0]):
            seen = [float(read[k].count) / b for read, b in zip(self.reads, by, strict=True) if b]
            steady = term.kind != "other" and seen and all(abs(s - seen[0]) <= ALIKE * abs(seen[0]) for s in seen)
            ratios.append(seen[0] if steady else None)
        return ratios

    def _miss(self, rule: Rule) -> float:
        """Largest difference of loss and gradients, parts against whole, relative to the largest value."""
        whole = self._sums(rule, [Share(self.first, self.count)])
        try:
            return _apart(whole, self._sums(rule, self._shares())) if self.count > 1 else 0.0
        except Exception as error:  # the user's loss may not bear a part of the batch at all
            self.trouble = f"{type(error).__name__}: {error}"
            return math.inf

    def _sums(self, rule: Rule, cuts: list[Share]) -> tuple[float, list[Tensor]]:
        total = weight = 0.0
        grads = {n: torch.zeros_like(p) for n, p in self.look.module.named_parameters() if p.requires_grad}
        last: Part | None = None
        for share in cuts:

            def add(value: Any, counts: Counts, share: Share = share) -> tuple[Part, dict[str, Tensor]]:
                part = part_of(rule, value, share.samples, counts)
                return part, self.look.gradients(part.value) if part.adds else {}

            part, found = self.look(share, add, given={})
            mine, count = part.numbers
            if not part.adds:
                continue
            total, weight, last = total + mine, weight + count, part
            for name, g in found.items():
                grads[name] += g * float(part.by)
        by = 1.0 if rule.kind == "sum" else (last.read.whole(weight) if last and last.read else weight) or 1.0
        return total / by, [g / by for g in grads.values()]


def _plain(read: list[Term]) -> list[Term]:
    """Terms as numbers: nothing of a graph is kept."""
    return [Term(t.kind, float(t.by), float(t.count), float(t.weight)) for t in read]


def _apart(whole: tuple[float, list[Tensor]], parts: tuple[float, list[Tensor]]) -> float:
    """Relative difference of two (loss, gradients): infinite if one is no number."""
    scale = max([abs(g).max().item() for g in whole[1] if g.numel()] or [0.0])
    apart = max([abs(a - b).max().item() for a, b in zip(whole[1], parts[1], strict=True) if a.numel()] or [0.0])
    value = abs(whole[0] - parts[0]) / max(abs(whole[0]), 1e-12)
    miss = max(value, apart / max(scale, 1e-12) if scale else apart)
    return math.inf if math.isnan(miss) else miss


def _nothing(samples: int) -> Fault:
    return Fault(
        "P114",
        "the loss of the first batch is zero or no number, so its rule cannot be found",
        have=f"{samples} samples, none of which has a target that counts",
        law="the rule of a loss is checked before step 1 on the first batch",
        cure="a first batch with targets, or the pair (sum, weight)",
        at="loss",
    )


def _uneven(miss: float, name: str, samples: int) -> Fault:
    return Fault(
        "P114",
        "the losses of parts give that of the batch only while all samples count alike",
        have=f"{samples} samples whole against split unevenly, with some of {name!r} marked as not counting: off by {miss:.1e}",
        law="a part divides by its own count: the count of the whole batch must be known as the sum of theirs",
        cure="divide last, by a tensor: loss.sum() / mask.sum().clamp(min=1); or return the pair (loss.sum(), mask.sum())",
        at="loss",
    )


def _no_rule(misses: dict[str, float], samples: int, trouble: str) -> Fault:
    tried = f"a part raised {trouble}; " * bool(trouble)
    tried += "; ".join(f"{WORDS[kind]}: off by {miss:.1e}" for kind, miss in misses.items())
    return Fault(
        "P114",
        "no rule gives the loss of a batch from the losses of its parts",
        have=f"{samples} samples whole against split unevenly, largest relative difference of loss and gradients: {tried}",
        law="parts of a batch are run by themselves, so a loss is a sum or a weighted mean of what each sample gives alone",
        cure="return the pair (sum, weight): the global loss is the sum of all sums over the sum of all weights",
        at="loss",
    )
