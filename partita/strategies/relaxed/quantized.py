"""Sends every element of the gradient in a few bits, rounded up or down by lot so that its mean stays what it is.

    to servers     bits n / 8 of levels, v a bucket of scales      every rank takes the mean of its shard
    back           n v; or, both ways, levels and scales again

Exact with bits = 32, which rounds nothing.

Source: Alistarh et al. 2017, "QSGD", arXiv:1610.02132, sections 3.1 and 4 (buckets), with the largest element as norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault
from partita.program import Program
from partita.program.compressing import WHOLE
from partita.program.compressing import Quantized as Codec
from partita.program.relaxing import Said, lanes_of, range_fault, say_relaxed
from partita.strategy import Case, Relaxed

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class Quantized(Relaxed):
    """Every element of every gradient in a few bits.

    Args:
        axis: The mesh axis that carries the batch and the shards.
        bits: 8, 4 or 2 of an element; 32 rounds nothing.
        bucket: Elements that share a scale.
        both: The means come back in as few bits.

    Example:
        >>> Quantized(bits=4, both=True).axis
        'dp'
    """

    name: ClassVar[str] = "quantized"
    learns: ClassVar[float] = 0.1  # what is left out or rounded off at first evens out over more steps than are looked at

    bits: int = 8
    bucket: int = 512
    both: bool = False

    def setting_faults(self) -> Sequence[Fault]:
        packs = "levels are packed into bytes"
        return [
            *range_fault("bits", self.bits, packs, "bits = 8, 4 or 2; 32 rounds nothing", holds=self.bits in (2, 4, 8, WHOLE)),
            *range_fault("bucket", self.bucket, "a bucket has elements", "bucket = 512", holds=self.bucket >= 1),
        ]

    def exactly(self) -> "Quantized":
        return replace(self, bits=WHOLE)

    def agrees(self, step: int) -> bool:
        return True

    def batches(self) -> int:
        return 1

    def say(self, program: Program, size: int) -> Program:
        calls = [c for lane in lanes_of(program) for c in self.codec.calls(lane, self.axis, size)]
        return say_relaxed(program, self.axis, size, self.name, [Said(tuple(calls))])

    def send(self, site: "Site") -> None:
        site.send_rounded(self.axis, self.codec)

    @property
    def codec(self) -> Codec:
        """How much goes."""
        return Codec(self.bits, self.bucket, self.both)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"dp": 4}, {"bits": 4, "both": True}, workload="mlp"),
            Case({"dp": 2}, {"bits": 2, "bucket": 16}, workload="resnet"),
            Case({"dp": 3}, {"bits": 4, "bucket": 100, "both": True}, workload="llama"),
            Case({"dp": 2, "tp": 2}, {"both": True}),
            Case({"tp": 2, "dp": 2}, {"bits": 4}),
        )
