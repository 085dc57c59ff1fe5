"""Workers train by themselves and meet every so many steps: they go on from the mean, or from an outer step towards it.

    step     1   2   3  ...  H        no gradient leaves a worker
                             └ all_reduce of what each has changed since the last meeting: n v

    outer step     u = mean(w_k - base)     v = momentum v + u     base += rate (u + momentum v)     w_k = base

Rate 1 without momentum is averaging; with Nesterov momentum and an inner AdamW it is DiLoCo. Exact for plain SGD, meeting after
every step: the mean of steps is the step of the mean.

Source: Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767; Douillard et al. 2023, "DiLoCo",
arXiv:2311.08105 (outer Nesterov momentum).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault
from partita.program import Phase, Program
from partita.program.relaxing import Said, beside, call, lanes_of, range_fault, say_relaxed
from partita.strategy import Case, Relaxed

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class LocalSGD(Relaxed):
    """Local steps of any optimizer, and an outer step when workers meet.

    Args:
        axis: The mesh axis that carries the batch.
        period: Steps from one meeting to the next.
        outer_rate: Of the outer step.
        outer_momentum: Of it.
        nesterov: The outer momentum looks ahead.

    Example:
        >>> LocalSGD(period=500, outer_rate=0.7, outer_momentum=0.9).axis
        'dp'
    """

    name: ClassVar[str] = "local_sgd"
    alone: ClassVar[bool] = True

    period: int = 8
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = True

    def setting_faults(self) -> Sequence[Fault]:
        rate, momentum = self.outer_rate, self.outer_momentum
        return [
            *range_fault("period", self.period, "workers meet after whole steps", "period = 1", holds=self.period >= 1),
            *range_fault("outer_rate", rate, "a step goes forward", "outer_rate = 1.0", holds=rate > 0),
            *range_fault("outer_momentum", momentum, "momentum fades", "outer_momentum = 0.9", holds=0 <= momentum < 1),
        ]

    def exactly(self) -> "LocalSGD":
        return replace(self, period=1, outer_rate=1.0, outer_momentum=0.0)

    def agrees(self, step: int) -> bool:
        return (step + 1) % self.period == 0

    def batches(self) -> int:
        return 1

    def say(self, program: Program, size: int) -> Program:
        calls = [call("all_reduce", self.axis, x.size, x.dtype, Phase.OPTIMIZER, "average") for x in lanes_of(program)]
        when = (self.period - 1,) if self.period > 1 else ()
        said = say_relaxed(program, self.axis, size, self.name, [Said(tuple(calls), when, Phase.OPTIMIZER)], self.period)
        said = beside(said, "base")
        return beside(said, "velocity") if self.outer_momentum else said

    def send(self, site: "Site") -> None:
        site.meet(self.axis, period=self.period, rate=self.outer_rate, momentum=self.outer_momentum, nesterov=self.nesterov)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"dp": 4}, {"period": 3, "outer_rate": 0.7, "outer_momentum": 0.9}, workload="mlp"),
            Case({"dp": 2}, {"period": 1}, workload="resnet"),
            Case({"dp": 3}, {"period": 2, "outer_momentum": 0.5, "nesterov": False}, workload="llama"),
            Case({"dp": 2, "tp": 2}, {"period": 2}),
            Case({"tp": 2, "dp": 2}, {"period": 2, "outer_momentum": 0.9}),
        )
