"""The backward of the weights fills the gaps (ZB-H1): a third of the bubble of 1F1B at its memory.

    rank 0    F0 F1 .  I0 W0 F2 I1 W1 ...      I passes the gradient on; nobody waits for W
    rank 1    .  F0 I0 F1 I1 W0 F2 I2 ...

Source: Qi et al. 2023, "Zero bubble pipeline parallelism", arXiv:2401.10241, section 2.2 (ZB-H1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.program.schedules import Schedule, zero_bubble
from partita.strategy import Case, Pipelined


@dataclass(frozen=True)
class ZeroBubble(Pipelined):
    """Pipeline of one stage a rank whose backward is split into input and weights."""

    name: ClassVar[str] = "zero_bubble"

    def schedule(self, ranks: int) -> Schedule:
        return zero_bubble(ranks, self.microbatches)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"pp": 2}, {"microbatches": 2}),
            Case({"dp": 2, "pp": 2}, {"microbatches": 2}),
        )
