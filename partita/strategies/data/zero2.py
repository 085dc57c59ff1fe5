"""Shares out gradients and the optimizer: a rank keeps whole parameters, and of the rest its own rows.

    with every microbatch    one reduce_scatter a bucket, while backward still runs; a rank adds the sum to its own rows
                             and forgets the whole gradients, so that never more than a bucket or two of them exist
    optimizer                on those rows; its state exists once in all ranks together
    after it                 one all_gather a bucket fills in the rows of the others

With one microbatch it sends what `zero1` sends; with m of them, m times as many gradients.

Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 5.2 (gradient partitioning).
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
class Zero2(Bucketed):
    """Data parallelism with gradients and the optimizer's state shared out by rows. It is of the whole model.

    Args:
        axis: The mesh axis that carries the batch and shares out the rows.
        bucket: Bytes at which a bucket of gradients is sent.

    Example:
        >>> Zero2(bucket=1 << 20).axis
        'dp'
    """

    name: ClassVar[str] = "zero2"

    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        return sharding_faults(program, self.axis, mesh.size(self.axis), self.who)

    def say(self, program: Program, size: int) -> Program:
        return say_zero(program, self.axis, size, name=self.name, limit=self.bucket, every=True)

    def send(self, site: "Site") -> None:
        site.scatter_gradients(self.axis, site.buckets(self.bucket, apart=True), site.program.reduce_dtype, every=True)

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
