"""Shares out the optimizer: every rank keeps whole parameters and gradients, and steps on its own rows of them.

    with the last microbatch    one reduce_scatter a bucket, while backward still runs: a rank gets the sum of its rows
    optimizer                   on those rows; its state exists once in all ranks together
    after it                    one all_gather a bucket fills in the rows of the others

Together they send what the all_reduce of `ddp` sends.

Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 5.1 (optimizer state partitioning).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault
from partita.mesh import Mesh
from partita.program import Program
from partita.program.sharding import say_zero, sharding_faults
from partita.strategy import Bucketed, Case

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class Zero1(Bucketed):
    """Data parallelism with the optimizer's state shared out by rows. It is of the whole model.

    Args:
        axis: The mesh axis that carries the batch and shares out the rows.
        bucket: Bytes at which a bucket of gradients is sent.

    Example:
        >>> Zero1(bucket=1 << 20).axis
        'dp'
    """

    name: ClassVar[str] = "zero1"

    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        return sharding_faults(program, self.axis, mesh.size(self.axis), self.who)

    def say(self, program: Program, size: int) -> Program:
        return say_zero(program, self.axis, size, name=self.name, limit=self.bucket, every=False)

    def send(self, site: "Site") -> None:
        site.scatter_gradients(self.axis, site.buckets(self.bucket), site.program.reduce_dtype, every=False)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"dp": 4}, {"bucket": 1 << 12}),
            Case({"dp": 4}, {}, workload="llama"),
            Case({"dp": 2}, {}, workload="resnet"),
            Case({"dp": 4}, {"bucket": 1}, workload="mlp"),
            Case({"dp": 2, "tp": 2}, {}),
            Case({"tp": 2, "dp": 2}, {}),
            Case({"dp": 2, "pp": 2}, {}),
        )
