"""Two stages a rank in a V, the backward split: no bubble when F, I and W take as long, at the memory of 1F1B.

    stages    0 1 1 0      rank of each, p = 2

Source: Qi et al. 2024, "Pipeline parallelism with controllable memory", arXiv:2405.15362, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.program.schedules import Schedule, zbv
from partita.strategy import Case, Pipelined


@dataclass(frozen=True)
class ZBV(Pipelined):
    """Pipeline of two stages a rank: the first and the last share a rank."""

    name: ClassVar[str] = "zbv"

    def schedule(self, ranks: int) -> Schedule:
        return zbv(ranks, self.microbatches)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"pp": 2}, {"microbatches": 2}),
            Case({"dp": 2, "pp": 2}, {"microbatches": 2}),
        )
