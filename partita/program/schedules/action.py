"""What a pipeline schedule is: who runs which pass of which microbatch on which stage, in which order.  Pure data.

A stage is a run of consecutive blocks of the model; a rank holds one stage or several. A pass is written as torch prints it:
`2F0` is the forward of microbatch 0 on stage 2.

    F  forward
    B  whole backward
    I  backward of the input: what the stage before waits for
    W  backward of the weights: nobody waits for it, so it can fill a gap      B = I then W
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Pass(StrEnum):
    """What is computed."""

    FORWARD = "F"
    INPUT = "I"
    WEIGHT = "W"
    BACKWARD = "B"


class Action(NamedTuple):
    """One pass of one microbatch on one stage.

    Example:
        >>> print(Action(2, Pass.FORWARD, 0))
        2F0
    """

    stage: int
    kind: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The order in which every rank of a pipeline works in one step.

    Args:
        name: Of the method, or of the user's file.
        order: Per rank, its actions in order.
        placement: Per stage, the rank that holds it.
        microbatches: Of a step.
    """

    name: str
    order: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the stages it holds, from the first."""
        return tuple(tuple(s for s, at in enumerate(self.placement) if at == rank) for rank in range(self.ranks))

    @property
    def splits_backward(self) -> bool:
        """Some backward is run as I and W."""
        return any(a.kind is Pass.INPUT for row in self.order for a in row)


def loop(ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """Placement in turns: stage s on rank s mod ranks.

    Example:
        >>> loop(2, 2)
        (0, 1, 0, 1)
    """
    return tuple(range(ranks)) * virtual


def vee(ranks: int) -> tuple[int, ...]:
    """Placement down and up again: the first and the last stage share a rank.

    Example:
        >>> vee(3)
        (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))


def needs(action: Action, stages: int) -> tuple[int, Pass] | None:
    """The (stage, pass) of the same microbatch that must have ended before; of a backward, I or B ends it.

    What a rank itself must have run before (the forward before its backward, I before W) is a matter of its own order.
    """
    stage, kind, _ = action
    if kind is Pass.WEIGHT:
        return (stage, Pass.INPUT)
    if kind is Pass.FORWARD:
        return (stage - 1, Pass.FORWARD) if stage else None
    return (stage + 1, Pass.INPUT) if stage < stages - 1 else (stage, Pass.FORWARD)


def rows(order: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Freeze an order."""
    return tuple(map(tuple, order))
