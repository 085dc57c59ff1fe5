"""How the counts a loss takes off its batch make what it divides by: found by giving each of them other values.

A count that only divides is no harm: what it makes of the divisor is known then, and holds for the count of the whole batch.
One that does anything else (weights inside the sum, a branch, a slice) is another one on a part, and no rule makes up for that.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from partita.errors import Fault, Refused
from partita.runtime.batch import Share
from partita.runtime.look import Look
from partita.runtime.loss_sources import POINTS, Fit, form_of
from partita.runtime.loss_terms import Counts, terms

MOST = 8  # counts that are tried one by one


class _Reading(NamedTuple):
    """A term of a loss, as numbers."""

    kind: str
    by: float
    own: float  # the term's count

    def of(self, name: str) -> float:
        return self.own if name == "count" else self.by


@dataclass(frozen=True)
class _Seen:
    """A loss with some of its counts given."""

    loss: float
    read: tuple[_Reading, ...]
    values: tuple[float, ...]  # the counts' own


class Fits:
    """Tries the counts of a loss.

    Args:
        look: At the subject.
        whole: Samples looked at.
        parts: The same, in parts.
    """

    def __init__(self, look: Look, whole: Share, parts: Sequence[Share]) -> None:
        self.look, self.whole = look, whole
        first = self._seen(whole, {})
        assert first is not None, "this look has been before"
        self.base, self.parts = first, [self._seen(share, {}) for share in parts]

    def found(self) -> list[Fit | None]:
        """Per term, how a count makes what it divides by; None where it is as it is read.

        Raises:
            Refused: P114, if a count does something else.
        """
        counts = self.base.values
        fits: list[Fit | None] = [None] * len(self.base.read)
        if not counts or self._one_by_sample():
            return fits
        every = {k: v + 1 for k, v in enumerate(counts)}
        more = {k: v + 1000 for k, v in enumerate(counts)}
        if all(self._idle(self._try(given)) for given in (every, more, dict.fromkeys(every, 1.0))):
            return fits
        groups = self._groups()
        if len(groups) > MOST:
            raise Refused(_inside(len(counts), counts[0], "too many to be followed"))
        for group in groups:
            for j, fit in self._of(group).items():
                if fits[j] is not None:
                    raise Refused(_inside(group[0], counts[group[0]], "two counts make one divisor"))
                fits[j] = fit
        return [fit if fit and not _bare(fit) else None for fit in fits]

    # ---- one count
    def _groups(self) -> list[list[int]]:
        """Counts that are the same wherever one looks are one count, made more than once."""
        looks = [one.values for one in (self.base, *self.parts) if one is not None and len(one.values) == len(self.base.values)]
        groups: dict[tuple[float, ...], list[int]] = {}
        for k in range(len(self.base.values)):
            groups.setdefault(tuple(values[k] for values in looks), []).append(k)
        return list(groups.values())

    def _of(self, group: list[int]) -> dict[int, Fit]:
        """What a count makes of each term it divides."""
        k = group[0]
        own = self.base.values[k]
        points = dict.fromkeys([*map(float, POINTS), own + 1])
        seen = {v: self._try(dict.fromkeys(group, v)) for v in points}
        told = {v: one for v, one in seen.items() if one is not None and v >= 1}
        if all(self._idle(one) for one in told.values()):
            return {}
        if any([t.kind for t in one.read] != [t.kind for t in self.base.read] for one in told.values()):
            raise Refused(_inside(k, own, "the loss is made of other operations at another count"))
        fits: dict[int, Fit] = {}
        for j, mine in enumerate(self.base.read):
            for name in ("count", "by"):
                if any(one.read[j].of(name) != mine.of(name) for one in told.values()):
                    fits[j] = self._fit(k, name, self._at(seen, j, name), told)
                    break
        if not fits:
            raise Refused(_inside(k, own, "and the loss divides by the same at another count"))
        self._only_divides(k, told, next(iter(fits)))
        return fits

    def _at(self, seen: dict[float, _Seen | None], j: int, name: str) -> Callable[[float], float]:
        def at(v: float) -> float:
            one = seen.get(v)
            if one is None or j >= len(one.read):
                return math.nan
            term = one.read[j]
            return math.nan if term.kind != self.base.read[j].kind or math.isinf(term.by) else term.of(name)

        return at

    def _fit(self, k: int, name: str, at: Callable[[float], float], told: dict[float, _Seen]) -> Fit:
        own = self.base.values[k]
        form = form_of(at, tuple(map(float, POINTS))) if len(told) > 2 else None
        if form is None:
            raise Refused(_inside(k, own, "what the loss divides by is no multiple of it, however small it may be"))
        fit = (k, *form, name)
        mine = [one.values[k] for one in self.parts if one is not None]
        if not _bare(fit) and (len(mine) < len(self.parts) or abs(sum(mine) - own) > 1e-6 * abs(own)):
            raise Refused(_inside(k, own, f"in parts {' and '.join(f'{v:g}' for v in mine)}, which do not add up to it"))
        return fit

    def _only_divides(self, k: int, told: dict[float, _Seen], j: int) -> None:
        """Whether the loss is A + B / d, where d is what term j divides by."""
        base = self.base
        rows = [(one.loss, base.read[j].by / one.read[j].by) for one in told.values() if one.read[j].by]
        rows = [(loss, over) for loss, over in rows if math.isfinite(loss) and abs(over - 1) > 1e-6]
        if not rows:
            return
        slope = (rows[0][0] - base.loss) / (rows[0][1] - 1)
        for loss, over in rows:
            said = base.loss + slope * (over - 1)
            if abs(said - loss) > self.look.tolerance * 10 * max(abs(loss), abs(base.loss), abs(slope * over)):
                raise Refused(_inside(k, base.values[k], "and the loss depends on it by more than a division"))

    # ---- looks
    def _one_by_sample(self) -> bool:
        """Whether every sample has counts of its own, which stay the same on a part."""
        values = [v for one in self.parts if one is not None for v in one.values]
        return len(self.parts) > 1 and len(values) == len(self.base.values) and values == [*self.base.values]

    def _idle(self, one: _Seen | None) -> bool:
        """Whether the counts given changed nothing; one that the loss does not bear tells nothing either."""
        if one is None:
            return True
        same = one.loss == self.base.loss or abs(one.loss - self.base.loss) <= 1e-12 * abs(self.base.loss)
        return same and one.read == self.base.read

    def _try(self, given: dict[int, float]) -> _Seen | None:
        return self._seen(self.whole, given)

    def _seen(self, share: Share, given: dict[int, float]) -> _Seen | None:
        try:
            return self.look(share, _see, given=given)
        except Exception:  # the loss does not bear such a count
            return None


def _see(value: Any, counts: Counts) -> _Seen:
    assert counts.sources is not None, "sources are heard in every one of these looks"
    values = tuple(counts.sources.numbers)
    if isinstance(value, Tensor):
        read = tuple(_Reading(t.kind, float(t.by), float(t.count)) for t in terms(value, counts))
        return _Seen(float(value.detach()), read, values)
    by = float(value[1])
    return _Seen(float(value[0].detach()) / by if by else math.nan, (_Reading("divided", by, by),), values)


def _bare(fit: Fit) -> bool:
    """Whether what is divided by is a multiple of the count itself, as far as is known."""
    return fit[1] == "floor" and fit[2] <= 0


def _inside(k: int, value: float, have: str) -> Fault:
    return Fault(
        "P114",
        "the loss depends on a count that is taken off the batch, and on a part of the batch it is another one",
        have=f"count {k + 1} is {value:g} in a first look; {have}",
        law="the count of the whole batch is known when all parts have run, so it can only divide what is added up",
        cure="divide last, by a tensor: loss.sum() / mask.sum().clamp(min=1); or return the pair (loss.sum(), mask.sum())",
        at="loss",
    )
