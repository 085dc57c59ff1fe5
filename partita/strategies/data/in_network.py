"""Like ddp, but gradients are added up in the network: a switch sums packets of whole numbers, and each link carries them once.

    batch over dp  ->  every gradient is Partial over dp  ->  after backward, one sum through the switch a bucket
                       in block floating point: 256 values share an exponent, which the ranks agree on first

|sum - true sum| <= N/2 2^(e - b) for N ranks, a block below 2^e and b = 30 - log2 N rounded up; of float64, with a second word,
N/2 2^(e - 2b). Whole numbers add up to the same whatever the order, so all ranks, and all runs, get the same bits.

Sources: Huang et al. 2023, P4SGD, arXiv:2305.05885 (slots, bits, acknowledgement); Sapio et al. 2021, SwitchML, NSDI (pool of
slots, block floating point).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from partita.program import Collective, Phase, Program
from partita.program.data import rewrite_batch, say_loss
from partita.program.reduction import bucketed, gradients_by_name, late
from partita.strategy import Bucketed, Case

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class InNetwork(Bucketed):
    """Data parallelism whose gradients are summed in the network. It is of the whole model: `modules` stays at all of them.

    Args:
        axis: The mesh axis that carries the batch.
        bucket: Bytes at which a bucket of gradients is closed.
        reduce: What adds up: "udp", a switch behind a socket; "xdp", one in the kernel of a testbed, where that can be had;
            "gloo", the same whole numbers through gloo's all-reduce.

    Example:
        >>> InNetwork().reduce
        'udp'
    """

    name: ClassVar[str] = "in_network"

    reduce: Literal["udp", "xdp", "gloo"] = "udp"

    @property
    def switch(self) -> tuple[str, str] | None:
        return None if self.reduce == "gloo" else (self.axis, self.reduce)

    def say(self, program: Program, size: int) -> Program:
        said = rewrite_batch(program, self.axis, size, self.name)
        found = bucketed(said, self.bucket, flat=True)
        gradient = gradients_by_name(found.program)

        def call(names: Sequence[str]) -> Collective:
            return Collective(
                self.op, self.axis, tuple(gradient[n] for n in names), sum(found.sizes[n] for n in names),
                found.dtypes[names[0]], Phase.SYNC, names[-1], once=True,
            )  # fmt: skip

        return say_loss(late(found, call), self.axis)

    def send(self, site: "Site") -> None:
        site.average_gradients(self.axis, site.buckets(self.bucket), site.program.reduce_dtype, through=self.op)

    @property
    def op(self) -> str:
        """The collective of a bucket."""
        return "block_reduce" if self.reduce == "gloo" else "switch_reduce"

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {"bucket": 1 << 12, "reduce": "gloo"}),
            Case({"dp": 2, "tp": 2}, {"reduce": "xdp"}),
        )
