"""What relaxed data parallelism shares: another algorithm than the sum of all gradients, and how it is proved nevertheless.

exactly()     the same method in the setting in which it is exact: compared with one device
agrees(step)  after which steps all ranks hold the same model: compared bit by bit
learns        the least share of what its exact setting learns that it has learned after as many steps of the optimizer
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Program
from partita.program.data import module_faults
from partita.program.relaxing import relaxed_faults
from partita.strategy.contract import Promise
from partita.strategy.data_parallel import DataParallel


@dataclass(frozen=True)
class Relaxed(DataParallel):
    """Data parallelism of the whole model that exchanges less, or later: `modules` stays at all of them.

    Args:
        axis: The mesh axis that carries the batch.
    """

    promise: ClassVar[Promise] = Promise.RELAXED
    alone: ClassVar[bool] = False  # even where it is exact each worker steps, and clips, by itself: exact for plain SGD only
    learns: ClassVar[float] = 0.5  # at least, of what its exact setting learns in the first steps on one batch

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

    # ---- the contract
    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        return relaxed_faults(program, self.axis, mesh.size(self.axis), self.who)
