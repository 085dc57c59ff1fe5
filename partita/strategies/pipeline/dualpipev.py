"""Two stages a rank in a V, forward of one and backward of the other in turn.

    stages    0 1 1 0      rank of each, p = 2; at least 2 p microbatches

Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", arXiv:2412.19437, section 3.2.1, cut in half to a V.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.program.schedules import Schedule, dualpipev
from partita.strategy import Case, Pipelined


@dataclass(frozen=True)
class DualPipeV(Pipelined):
    """Pipeline of two stages a rank: the first and the last share a rank."""

    name: ClassVar[str] = "dualpipev"

    def schedule(self, ranks: int) -> Schedule:
        return dualpipev(ranks, self.microbatches)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"pp": 2}, {"microbatches": 4}),
            Case({"dp": 2, "pp": 2}, {"microbatches": 4}),
        )
