"""All forwards, then all backwards: the simplest pipeline, and the one that keeps the most activations.

    rank 0    F0 F1 F2 F3 .  .  B0 B1 B2 B3      bubble (p - 1) / (m + p - 1); m microbatches alive on every rank
    rank 1    .  F0 F1 F2 F3 B0 B1 B2 B3 .

Source: Huang et al. 2019, "GPipe", arXiv:1811.06965, section 2.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.program.schedules import Schedule, gpipe
from partita.strategy import Case, Pipelined


@dataclass(frozen=True)
class GPipe(Pipelined):
    """Pipeline of one stage a rank, filled and drained once a step."""

    name: ClassVar[str] = "gpipe"

    def schedule(self, ranks: int) -> Schedule:
        return gpipe(ranks, self.microbatches)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"pp": 2}, {"microbatches": 2}),
            Case({"dp": 2, "pp": 2}, {"microbatches": 2}),
        )
