"""The kinds of steps a period is made of: a method that talks in every q-th step, or says more in it, has rounds of two kinds.

    period 4      send | . . . |      when = (3,)      rounds: 3 steps without it, 1 step with it

A Program holds all events once; `Repeat.when` says in which steps those of a segment happen. Whatever reads a step reads it of
one round; figures are means over the period.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.program.program import Program


@dataclass(frozen=True)
class Round:
    """Steps of a period that do the same.

    Args:
        roles: The program of one such step, of each role.
        first: Number of the first such step.
        count: How many of the period's steps are so.
    """

    roles: tuple[Program, ...]
    first: int
    count: int


def rounds_of(roles: Sequence[Program]) -> list[Round]:
    """The kinds of steps of a period, in the order in which they first happen; their counts add up to the period."""
    period = max(role.period for role in roles)
    found: dict[tuple[tuple[bool, ...], ...], list[int]] = {}
    for number in range(period):
        found.setdefault(tuple(role.kind(number) for role in roles), []).append(number)
    return [Round(tuple(role.step(some[0]) for role in roles), some[0], len(some)) for some in found.values()]


def usual(roles: Sequence[Program]) -> tuple[Program, ...]:
    """The most frequent kind of step."""
    return max(rounds_of(roles), key=lambda r: r.count).roles
