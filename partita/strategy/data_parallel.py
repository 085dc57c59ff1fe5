"""What data parallelism of the whole model shares: the batch is cut, batch norm sees all of it, and something is exchanged.

A strategy file says what is exchanged (`say`) and has it exchanged so (`send`).
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import refuse
from partita.mesh import Mesh
from partita.program import Program
from partita.program.data import loose_norms
from partita.strategy.contract import Place, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class DataParallel(Strategy):
    """Data parallelism of the whole model: `modules` stays at all of them.

    Args:
        axis: The mesh axis that carries the batch.
    """

    place: ClassVar[Place] = Place.DATA

    axis: str = "dp"

    @abstractmethod
    def say(self, program: Program, size: int) -> Program:
        """The program of one of `size` ranks, above 1."""

    @abstractmethod
    def send(self, site: "Site") -> None:
        """Have this rank exchange as said."""

    # ---- the contract
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
