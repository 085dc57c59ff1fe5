"""One forward, one backward: the bubble of GPipe, with at most p microbatches alive.

    rank 0    F0 F1 .  .  B0 F2 B1 F3 ...      bubble (p - 1) / (m + p - 1); p - r microbatches alive on rank r
    rank 1    .  F0 B0 F1 B1 F2 B2 F3 ...

Source: Narayanan et al. 2020, "Memory-efficient pipeline-parallel DNN training", arXiv:2006.09503 (PipeDream-flush).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.program.schedules import Schedule, one_f_one_b
from partita.strategy import Case, Pipelined


@dataclass(frozen=True)
class OneFOneB(Pipelined):
    """Pipeline of one stage a rank that keeps as few microbatches alive as can be."""

    name: ClassVar[str] = "one_f_one_b"

    def schedule(self, ranks: int) -> Schedule:
        return one_f_one_b(ranks, self.microbatches)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"pp": 2}, {"microbatches": 2}),
            Case({"dp": 2, "pp": 2}, {"microbatches": 2}),
        )
