"""What data parallelism over buckets of gradients shares: the batch is cut, batch norm sees all of it, buckets are sent.

A strategy file says what each bucket becomes (`say`) and has its gradients sent so (`send`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Program
from partita.program.buckets import LIMIT
from partita.program.data import batch_faults, bucket_faults, loose_norms, module_faults
from partita.strategy.contract import Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class Bucketed(Strategy):
    """Data parallelism of the whole model: `modules` stays at all of them.

    Args:
        axis: The mesh axis that carries the batch.
        bucket: Bytes at which a bucket of gradients is sent.
    """

    place: ClassVar[Place] = Place.DATA
    promise: ClassVar[Promise] = Promise.REORDERED

    axis: str = "dp"
    bucket: int = LIMIT

    def __post_init__(self) -> None:
        refuse([*module_faults(self.name, self.modules), *bucket_faults(self.bucket)])

    @abstractmethod
    def say(self, program: Program, size: int) -> Program:
        """The program of one of `size` ranks, above 1."""

    @abstractmethod
    def send(self, site: "Site") -> None:
        """Have this rank's buckets sent."""

    # ---- the contract
    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        return batch_faults(program, self.axis, mesh.size(self.axis), self.who)

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        size = mesh.size(self.axis)
        if size == 1:
            return replace(program, axes={**program.axes, self.axis: 1})
        return self.say(program, size)

    def apply(self, site: "Site") -> None:
        site.share_batch(self.axis)
        if site.mesh.size(self.axis) == 1:
            return
        refuse(loose_norms(site.program, site.batch_norms(), self.axis, self.who))
        site.synchronise_batch_norm(self.axis)
        self.send(site)

    @property
    def who(self) -> str:
        """Its name in a message."""
        return f"{type(self).__name__}(axis={self.axis!r})"
