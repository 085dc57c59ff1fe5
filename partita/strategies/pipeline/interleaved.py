"""One forward, one backward over several stages a rank: the bubble shrinks by their number, messages grow by it.

    stages    0 1 0 1      rank of each, p = 2, virtual = 2; bubble (p - 1) / (virtual m + p - 1)

Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", arXiv:2104.04473, section 2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.program.schedules import Schedule, interleaved
from partita.strategy import Case, Pipelined


@dataclass(frozen=True)
class Interleaved(Pipelined):
    """Pipeline of `virtual` stages a rank, in turns.

    Args:
        virtual: Stages a rank holds.
    """

    name: ClassVar[str] = "interleaved"

    virtual: int = 2  # stages a rank

    def schedule(self, ranks: int) -> Schedule:
        return interleaved(ranks, self.microbatches, self.virtual)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"pp": 2}, {"microbatches": 2}),
            Case({"dp": 2, "pp": 2}, {"microbatches": 2}),
        )
