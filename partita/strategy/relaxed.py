"""What relaxed data parallelism shares: another algorithm than the sum of all gradients, and how it is proved nevertheless.

    exactly()     the same method in the setting in which it is exact: compared with one device
    agrees(step)  after which steps all ranks hold the same model: compared bit by bit
    learns        the least share of what its exact setting learns that it has learned after as many steps of the optimizer

A strategy file says what is exchanged (`say`) and has it exchanged so (`send`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Program
from partita.program.data import loose_norms, module_faults
from partita.program.relaxing import relaxed_faults
from partita.strategy.contract import Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class Relaxed(Strategy):
    """Data parallelism of the whole model that exchanges less, or later: `modules` stays at all of them.

    Args:
        axis: The mesh axis that carries the batch.
    """

    place: ClassVar[Place] = Place.DATA
    promise: ClassVar[Promise] = Promise.RELAXED
    alone: ClassVar[bool] = False  # even where it is exact each worker steps, and clips, by itself: exact for plain SGD only
    learns: ClassVar[float] = 0.5  # at least, of what its exact setting learns in the first steps on one batch

    axis: str = "dp"

    def __post_init__(self) -> None:
        refuse([*module_faults(self.name, self.modules), *self.setting_faults()])

    @abstractmethod
    def setting_faults(self) -> Sequence[Fault]:
        """What is wrong with its settings by themselves."""

    @abstractmethod
    def exactly(self) -> "Relaxed":
        """Itself in the setting in which it is exact."""

    @abstractmethod
    def agrees(self, step: int) -> bool:
        """Whether all ranks hold the same parameters after a step."""

    @abstractmethod
    def batches(self) -> int:
        """How many batches one step of the optimizer takes."""

    @abstractmethod
    def say(self, program: Program, size: int) -> Program:
        """The program of one of `size` ranks, above 1."""

    @abstractmethod
    def send(self, site: "Site") -> None:
        """Have this rank exchange as said."""

    # ---- the contract
    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        return relaxed_faults(program, self.axis, mesh.size(self.axis), self.who)

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
