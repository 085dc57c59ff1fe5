"""Keeps what the optimizer keeps in host memory, and steps there: gradients go to the host, parameters come back.

    Adam, float32, w bytes of parameters on a rank        device memory - 2 w
    time, host link of B bytes a second, host memory of M    2 w / B there, w / B back, 20 w / M for torch's Adam, op by op

With master copies of half-precision parameters, they live on the host too, and only gradients go there. Where device and host
memory are one (CPU), nothing is moved and nothing is saved.

Source: Ren et al. 2021, "ZeRO-Offload", arXiv:2101.06840, section 4 (optimizer state and step on the host).
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault
from partita.mesh import Mesh
from partita.program import Program
from partita.program.host import say_offload
from partita.strategy import Case, Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site


@dataclass(frozen=True)
class Offload(Strategy):
    """Optimizer state in host memory. It uses no axis of the mesh; `modules` chooses whose parameters.

    On CPU the step is bitwise what it is without it; a GPU's step rounds some products otherwise than the host's, hence the
    promise.

    Example:
        >>> Offload().axes
        ()
    """

    name: ClassVar[str] = "offload"
    place: ClassVar[Place] = Place.MEMORY
    promise: ClassVar[Promise] = Promise.REORDERED

    @property
    def axes(self) -> tuple[str, ...]:
        return ()

    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        if self._parameters(program):
            return []
        return [
            Fault(
                "P116",
                "Offload() finds no parameter whose optimizer state could leave the device",
                f"modules = {list(self.modules)!r}; parameters: {len(program.parameters())}",
                "an optimizer keeps state beside the parameters of the modules that `modules` names",
                "modules = ['*'], or paths of the model",
                "modules",
            )
        ]

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        said = say_offload(program, {t.id for t in program.parameters() if self._chosen(t.name)})
        return said.with_notes(f"{self.name}: on CPU, host and device memory are one: nothing is moved, nothing saved")

    def apply(self, site: "Site") -> None:
        site.offload([t.name for t in site.program.parameters() if self._chosen(t.name)])

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"dp": 2}, {}),
            Case({"tp": 2}, {}),
            Case({"dp": 2}, {}, workload="resnet"),
            Case({"dp": 2}, {"modules": ("layers.1",)}, workload="mlp"),
            Case({"dp": 2, "tp": 2}, {}),
            Case({"tp": 2, "dp": 2}, {}),
        )

    # ---- whose state
    def _parameters(self, program: Program) -> list[str]:
        """Parameters that learn, of the chosen modules."""
        return [t.name for t in program.parameters() if t.id in program.gradients and self._chosen(t.name)]

    def _chosen(self, parameter: str) -> bool:
        parts = parameter.split(".")[:-1]
        paths = [".".join(parts[:n]) for n in range(len(parts) + 1)]
        return any(fnmatch.fnmatchcase(path, glob) for path in paths for glob in self.modules)
