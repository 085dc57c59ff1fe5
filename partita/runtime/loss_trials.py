"""Tries a rule on batches in which other samples count than in the first one.

A first batch whose samples all count alike tells nothing of what a loss does when they do not. So the rule is tried on the same
samples with some of their targets taken away: by the values with which losses mark what does not count, in one tensor of the
batch at a time. Whatever a loss makes of that, the rule must make the whole of it from the parts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from partita.runtime.batch import Batch, Share
from partita.runtime.look import Look
from partita.runtime.loss import Part, Rule, joined, part_of
from partita.runtime.loss_terms import Counts

MARKS = {-100, -1, 0}  # integers that stand for what does not count, besides those the loss itself names
UNCHECKED = "ctc_loss"  # reads where its targets point to, whatever is there
Seen = tuple[float, float, float, Part]  # loss, total and weight of a part


class Trials:
    """Batches in which some samples do not count.

    Args:
        look: At the subject.
        whole: Samples looked at.
        parts: The same, in parts.
    """

    def __init__(self, look: Look, whole: Share, parts: Sequence[Share]) -> None:
        self.whole, self.parts = whole, list(parts)
        names: set[str] = set()
        self.marks, self.checked = set(MARKS), True
        judge = look.subject.loss
        noted = replace(look.subject, loss=lambda output, batch: judge(output, _Noted(batch, names)))
        self.look, look.subject = look, noted
        try:
            self.outputs: dict[Share, Any] = {share: look.output(share) for share in (whole, *parts)}
            once = self._seen(whole, Rule("samples"), look.batch)
            again = self._seen(whole, Rule("samples"), look.batch)
            if not once or not again or once[0] != again[0]:
                self.outputs = {}  # the loss changes what it is given
        except Exception:  # the whole may run where a part does not
            self.outputs = {}
        finally:
            look.subject = replace(noted, loss=judge)
        self.names = sorted(names)
        if not names:  # the model itself may be given the targets, but it may also go where its inputs lead it
            self.outputs, self.names = {}, sorted(name for name, value in look.batch.items() if _counts(value))

    def worst(self, rule: Rule) -> tuple[float, str]:
        """(largest relative difference, whole against parts; name of the tensor that was changed)."""
        worst = 0.0, ""
        for name in self.names if self.parts else []:
            for batch in self._changed(name):
                miss = self._miss(rule, batch)
                worst = max(worst, (miss, name))
        return worst

    def _changed(self, name: str) -> Iterator[Batch]:
        """Batches with some samples of one entry marked: the first one alone, then the third in part and all after it."""
        value, samples = self.look.batch[name], self.look.samples
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.dim() and t.shape[0] == samples]
        kinds = [t.dtype for t in tensors]
        whole = any(not k.is_floating_point and k != torch.bool for k in kinds)
        for mark in self._marks(tensors) if whole else (0,):
            for fill in (self._one, self._late):
                if tensors:
                    yield {**self.look.batch, name: tree_map(lambda t, m=mark, f=fill: f(t, m), value)}

    def _marks(self, tensors: list[Tensor]) -> list[int]:
        """Marks to be tried; one that a loss does not bear is left out when it is."""
        low, high = (int(getattr(torch.cat([t.flatten() for t in tensors]), end)()) for end in ("min", "max"))
        return sorted(m for m in self.marks if self.checked or low <= m <= high)

    def _one(self, t: Any, mark: int) -> Any:
        return _filled(t, self.look.samples, mark, lambda u: [u[self.whole.first]])

    def _late(self, t: Any, mark: int) -> Any:
        first, last = self.whole.first, self.whole.first + self.whole.samples

        def rows(u: Tensor) -> list[Tensor]:
            half = u[first + 2 : first + 3]
            return [half[:, half.shape[1] // 2 :] if u.dim() > 1 else half, u[first + 3 : last]]

        return _filled(t, self.look.samples, mark, rows)

    def _miss(self, rule: Rule, batch: Batch) -> float:
        whole = self._seen(self.whole, rule, batch)
        parts = [self._seen(share, rule, batch) for share in self.parts]
        if whole is None or not math.isfinite(whole[0]) or any(one is None or one[3].strays for one in parts):
            return 0.0  # the loss does not bear this, or a step would end by name
        adding = [one for one in parts if one is not None and one[3].adds]
        reads = [one[3].read for one in adding if one[3].read is not None]
        total, weight = sum(one[1] for one in adding), sum(one[2] for one in adding)
        said = joined(rule, total, weight, reads[-1] if reads else None, blank=False)
        return abs(said - whole[0]) / max(abs(whole[0]), 1e-12) if math.isfinite(said) else math.inf

    def _seen(self, share: Share, rule: Rule, batch: Batch) -> Seen | None:
        def see(value: Any, counts: Counts) -> Seen:
            self.marks |= counts.marks
            self.checked &= counts.sources is None or UNCHECKED not in counts.sources.called
            part = part_of(rule, value, share.samples, counts)
            pair = not isinstance(value, Tensor)
            by = float(value[1]) if pair else 1.0
            loss = float((value[0] if pair else value).detach())
            return loss / by if by else math.nan, *part.numbers, part

        try:
            if self.outputs:
                return self.look.judged(self.outputs[share], share, batch, see)
            return self.look(share, see, batch=batch, given={})
        except Exception:  # no such target, for this loss
            return None


def _filled(t: Any, samples: int, mark: int, rows: Callable[[Tensor], list[Tensor]]) -> Any:
    if not isinstance(t, Tensor) or not t.dim() or t.shape[0] != samples:
        return t
    t = t.clone()
    for row in rows(t):
        row.fill_(mark if not t.is_floating_point() and t.dtype != torch.bool and (mark >= 0 or t.dtype.is_signed) else 0)
    return t


def _counts(value: Any) -> bool:
    """Whether an entry of a batch may say what counts: integers, or a mask."""
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return any(not t.is_floating_point() or bool(((t == 0) | (t == 1)).all()) for t in tensors)


class _Noted(dict[str, Any]):
    """A batch that notes what is read of it."""

    def __init__(self, batch: Batch, names: set[str]) -> None:
        super().__init__(batch)
        self._names = names

    def __getitem__(self, name: str) -> Any:
        self._names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._names.add(name)
        return super().get(name, default)

    def values(self) -> Any:
        self._names.update(self)
        return super().values()

    def items(self) -> Any:
        self._names.update(self)
        return super().items()
