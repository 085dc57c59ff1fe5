"""Sends the gradient of a matrix as the product of two thin ones, found by one step of power iteration.

    P = mean(M Q), orthogonal     Q = mean(M^T P)     M ~ P Q^T     what was missed is added to the next gradient
    all_reduce of all P and of everything that is no large matrix, all_reduce of all Q

Exact for a rank at which no matrix would get smaller: all then go as they are. Torch has this as a hook of its own data
parallelism, which sends by itself; it is done here through the one door to the network.

Source: Vogels et al. 2019, "PowerSGD", arXiv:1905.13727, algorithms 1 and 2 (with warm start).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault
from partita.program import Program
from partita.program.compressing import LowRank, shapes_of
from partita.program.relaxing import Said, beside, lanes_of, range_fault, say_relaxed
from partita.strategy import Case, Relaxed

if TYPE_CHECKING:
    from partita.runtime.site import Site

EVERYTHING = 1 << 40  # a rank at which nothing gets smaller


@dataclass(frozen=True)
class PowerSGD(Relaxed):
    """Gradients of low rank.

    Args:
        axis: The mesh axis that carries the batch.
        rank: Columns of the thin matrices.

    Example:
        >>> PowerSGD(rank=2).axis
        'dp'
    """

    name: ClassVar[str] = "power_sgd"
    learns: ClassVar[float] = 0.1  # what is left out or rounded off at first evens out over more steps than are looked at

    rank: int = 4

    def setting_faults(self) -> Sequence[Fault]:
        return range_fault("rank", self.rank, "a thin matrix has columns", "rank = 1 or more", holds=self.rank >= 1)

    def exactly(self) -> "PowerSGD":
        return replace(self, rank=EVERYTHING)

    def agrees(self, step: int) -> bool:
        return True

    def batches(self) -> int:
        return 1

    def say(self, program: Program, size: int) -> Program:
        lanes = zip(lanes_of(program), shapes_of(program), strict=True)
        calls = [c for lane, shapes in lanes for c in LowRank(self.rank).calls(shapes, lane.dtype, self.axis)]
        return beside(say_relaxed(program, self.axis, size, self.name, [Said(tuple(calls))]), "rest")

    def send(self, site: "Site") -> None:
        site.send_thin(self.axis, LowRank(self.rank))

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {"rank": 2}),
            Case({"dp": 4}, {"rank": 1}, workload="mlp"),
            Case({"dp": 2}, {"rank": 2}, workload="resnet"),
            Case({"dp": 2, "tp": 2}, {"rank": 2}),
            Case({"tp": 2, "dp": 2}, {"rank": 1}),
        )
