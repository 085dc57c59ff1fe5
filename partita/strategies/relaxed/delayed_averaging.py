"""Workers train by themselves; the mean of older models arrives some steps later, and what was done meanwhile stays.

    step      ... t | t+1  t+2 ... t+d |             s = w after step t, taken before step t + 1
    average         └ all_reduce of s ─┘ w <- keep w + (1 - keep) (mean(s) + w - s)

Nothing waits while the average is on its way for `delay` steps. With keep 0 the mean of the workers moves exactly as if every
step had used the mean gradient. Exact for plain SGD with every = 1 and delay = 0.

Source: Zhou et al. 2020, "DaSGD: Squeezing SGD Parallelization Performance in Distributed Training Using Delayed Averaging",
arXiv:2006.00441; the merge is as derived, its weighting not confirmed.
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
class DelayedAveraging(Relaxed):
    """Averages that arrive late.

    Args:
        axis: The mesh axis that carries the batch.
        every: Steps from one average to the next.
        delay: Steps that are done while it is on its way, at most `every`; 0 waits for it.
        keep: Share of its own model that a worker keeps.

    Example:
        >>> DelayedAveraging(every=4, delay=2).axis
        'dp'
    """

    name: ClassVar[str] = "delayed_averaging"
    alone: ClassVar[bool] = True

    every: int = 1
    delay: int = 1
    keep: float = 0.0

    def setting_faults(self) -> Sequence[Fault]:
        one = "one average is on its way at a time"
        return [
            *range_fault("every", self.every, "averages are begun after whole steps", "every = 1", holds=self.every >= 1),
            *range_fault(
                "delay", self.delay, one, f"delay = 0 to {max(self.every, 1)}", holds=0 <= self.delay <= max(self.every, 1)
            ),
            *range_fault("keep", self.keep, "a worker keeps a share of its model", "keep = 0.0", holds=0 <= self.keep < 1),
        ]

    def exactly(self) -> "DelayedAveraging":
        return replace(self, every=1, delay=0, keep=0.0)

    def agrees(self, step: int) -> bool:
        return self.delay == 0 and self.keep == 0 and (step + 1) % self.every == 0

    def batches(self) -> int:
        return 1

    def say(self, program: Program, size: int) -> Program:
        phase = Phase.FORWARD if self.delay else Phase.OPTIMIZER
        late = bool(self.delay)
        calls = [call("all_reduce", self.axis, x.size, x.dtype, phase, "average", overlapped=late) for x in lanes_of(program)]
        when = () if self.every == 1 else (0,) if late else (self.every - 1,)
        said = say_relaxed(program, self.axis, size, self.name, [Said(tuple(calls), when, phase)], self.every)
        return beside(beside(said, "taken"), "total")

    def send(self, site: "Site") -> None:
        site.average_late(self.axis, every=self.every, delay=self.delay, keep=self.keep)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"dp": 4}, {"every": 3, "delay": 2}, workload="mlp"),
            Case({"dp": 2}, {"every": 2, "delay": 0}, workload="resnet"),
            Case({"dp": 2}, {"every": 2, "delay": 2, "keep": 0.25}, workload="llama"),
            Case({"dp": 2, "tp": 2}, {"every": 2, "delay": 1}),
            Case({"tp": 2, "dp": 2}, {}),
        )
