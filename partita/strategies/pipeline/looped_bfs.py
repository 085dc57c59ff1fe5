"""Breadth first: all microbatches of a stage, then all of the next stage of the rank.

    rank 0    F0 F1 F2 F3 of stage 0, F0 F1 F2 F3 of stage 2, then back

Source: Lamy-Poirier 2022, "Breadth-first pipeline parallelism", arXiv:2211.05953, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.program.schedules import Schedule, looped_bfs
from partita.strategy import Case, Pipelined


@dataclass(frozen=True)
class LoopedBFS(Pipelined):
    """Pipeline of `virtual` stages a rank, one after another.

    Args:
        virtual: Stages a rank holds.
    """

    name: ClassVar[str] = "looped_bfs"

    virtual: int = 2  # stages a rank

    def schedule(self, ranks: int) -> Schedule:
        return looped_bfs(ranks, self.microbatches, self.virtual)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"pp": 2}, {"microbatches": 2}),
            Case({"dp": 2, "pp": 2}, {"microbatches": 2}),
        )
