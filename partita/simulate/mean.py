"""Figures of a period: the mean of its steps; memory is that of the fullest."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from partita.cost.figures import Figures, Traffic, Why, total

Counted = Sequence[tuple[Figures, int]]  # of one kind of step, and how many of the period's steps are so


def mean_of(found: Counted) -> Figures:
    """The figures of the mean step of a period."""
    period = sum(count for _, count in found)
    fullest = max((one for one, _ in found), key=lambda one: one.peak)

    def mean(value: Callable[[Figures], float]) -> float:
        return sum(count * value(one) for one, count in found) / period

    low, high = (mean(lambda one, side=side: (one.step_seconds_band or (0.0, 0.0))[side]) for side in (0, 1))
    return replace(
        fullest,
        step_seconds=mean(lambda one: one.step_seconds),
        step_seconds_band=(low, high) if fullest.step_seconds_band else None,
        traffic=_traffic(found, period),
        flop=mean(lambda one: one.flop),
        compute_seconds=mean(lambda one: one.compute_seconds),
        exposed_communication_seconds=mean(lambda one: one.exposed_communication_seconds),
        bubble_fraction=mean(lambda one: one.bubble_fraction),
        opaque_share=max(one.opaque_share for one, _ in found),
        why=_why(found, period),
        notes=tuple(dict.fromkeys(note for one, _ in found for note in one.notes)),
    )


def _traffic(found: Counted, period: int) -> tuple[Traffic, ...]:
    return total([(row, count) for one, count in found for row in one.traffic], period)


def _why(found: Counted, period: int) -> tuple[Why, ...]:
    """The terms of all kinds of steps, each by its share of the period; the seconds still add up to the mean step."""
    terms: dict[tuple[str, str, str, str], Why] = {}
    for one, count in found:
        for term in one.why:
            key = term.term, term.formula, term.constant, term.source
            before = terms.get(key, replace(term, seconds=0.0))
            terms[key] = replace(before, seconds=before.seconds + term.seconds * count / period)
    return tuple(sorted(terms.values(), key=lambda term: -term.seconds))
