"""What data parallelism over buckets of gradients shares: a strategy file says what each bucket becomes, and has it sent so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Program
from partita.program.buckets import LIMIT
from partita.program.data import batch_faults, bucket_faults, module_faults
from partita.strategy.contract import Promise
from partita.strategy.data_parallel import DataParallel


@dataclass(frozen=True)
class Bucketed(DataParallel):
    """Data parallelism that sums whole gradients.

    Args:
        axis: The mesh axis that carries the batch.
        bucket: Bytes at which a bucket of gradients is sent.
    """

    promise: ClassVar[Promise] = Promise.REORDERED

    bucket: int = LIMIT

    def __post_init__(self) -> None:
        refuse([*module_faults(self.name, self.modules), *bucket_faults(self.bucket)])

    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        return batch_faults(program, self.axis, mesh.size(self.axis), self.who)
