"""Sends the largest elements of the gradient, and adds what was left to the next one.

    rest = rest + gradient     the k largest of rest go, with their keys, and leave it     all_gather K k v, all_gather K k 4

With momentum each rank keeps a velocity of its own before it chooses, which loses what goes (momentum correction and masking);
the optimizer then has none. Exact with ratio 1.

Source: Aji & Heafield 2017, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021 (the rest is kept);
Lin et al. 2018, "Deep Gradient Compression", arXiv:1712.01887, section 3 (momentum).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault
from partita.program import Program
from partita.program.compressing import TopK as Codec
from partita.program.relaxing import Said, beside, lanes_of, range_fault, say_relaxed
from partita.strategy import Case, Relaxed

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class TopK(Relaxed):
    """The largest elements of every gradient.

    Args:
        axis: The mesh axis that carries the batch.
        ratio: Share of the elements that go.
        momentum: Of each rank, in place of the optimizer's.

    Example:
        >>> TopK(ratio=0.001).axis
        'dp'
    """

    name: ClassVar[str] = "top_k"
    learns: ClassVar[float] = 0.1  # what is left out or rounded off at first evens out over more steps than are looked at

    ratio: float = 0.01
    momentum: float = 0.0

    def setting_faults(self) -> Sequence[Fault]:
        ratio, momentum = self.ratio, self.momentum
        return [
            *range_fault("ratio", ratio, "a share of the elements goes", "ratio = 0.01", holds=0 < ratio <= 1),
            *range_fault("momentum", momentum, "momentum fades", "momentum = 0.9", holds=0 <= momentum < 1),
        ]

    def exactly(self) -> "TopK":
        return replace(self, ratio=1.0, momentum=0.0)

    def agrees(self, step: int) -> bool:
        return True

    def batches(self) -> int:
        return 1

    def say(self, program: Program, size: int) -> Program:
        calls = [c for lane in lanes_of(program) for c in self.codec.calls(lane, self.axis, size)]
        said = beside(say_relaxed(program, self.axis, size, self.name, [Said(tuple(calls))]), "rest")
        return beside(said, "velocity") if self.momentum else said

    def send(self, site: "Site") -> None:
        site.send_largest(self.axis, self.codec)

    @property
    def codec(self) -> Codec:
        """How much goes."""
        return Codec(self.ratio, self.momentum)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {"ratio": 0.1}),
            Case({"dp": 4}, {"ratio": 0.25, "momentum": 0.5}, workload="mlp"),
            Case({"dp": 2}, {"ratio": 0.5}, workload="resnet"),
            Case({"dp": 2, "tp": 2}, {"ratio": 0.25}),
            Case({"tp": 2, "dp": 2}, {"ratio": 0.25, "momentum": 0.5}),
        )
