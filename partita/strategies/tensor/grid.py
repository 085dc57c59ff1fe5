"""Cuts every matrix over two axes, and each activation over one of them: hidden over x, everything else over y.

    q, k, v, up       [heads or ffn over y, hidden over x]    y = x W^T is a sum over x; the gradient of x one over y
    projection, down  [hidden over x, heads or ffn over y]    the other way round: layers alternate, nothing moves between them
    table, head       [vocab over y, hidden over x]
    norms             statistics over x; cross-entropy: over y
    z and data        the batch, with parameters shared out: `fsdp` over z, replicated over data, around this

Source: Singh et al. 2024, "A 4D Hybrid Algorithm to Scale Parallel Training to Thousands of GPUs" (AxoNN), arXiv:2305.13525,
section 4.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Kind, Phase, Program, Split
from partita.program.data import module_faults
from partita.program.derivation import Derivation
from partita.program.split import rewrite
from partita.program.tensor import RECOMPUTED, cannot_split, derive_tensor, recomputed
from partita.program.whole import settled
from partita.strategy import Case, Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site

CLASSES = (("hidden",), ("heads", "kv", "ffn", "vocab"))  # over x, over y


@dataclass(frozen=True)
class Grid(Strategy):
    """The tensor part of a 4D grid. It is of the whole model: `modules` stays at all of them.

    Args:
        x: The mesh axis that carries hidden.
        y: The mesh axis that carries heads, ffn and vocab.

    Example:
        >>> Grid().axes
        ('tp_x', 'tp_y')
    """

    name: ClassVar[str] = "grid"
    place: ClassVar[Place] = Place.TENSOR
    promise: ClassVar[Promise] = Promise.REORDERED

    x: str = "tp_x"
    y: str = "tp_y"

    def __post_init__(self) -> None:
        refuse(module_faults(self.name, self.modules, "hidden is one dim of all modules: it is split in all or in none"))

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.x, self.y)

    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        if all(mesh.size(axis) == 1 for axis in self.axes):
            return []
        if faults := [*self._taken(program), *self._uneven(program, mesh)]:
            return faults
        if not any(e.phase == Phase.RECOMPUTE for e in program.events()):
            return []
        again = {m: d.axis for d, _ in self._derive(program, mesh) for m in recomputed(program, d)}
        return [cannot_split(module, RECOMPUTED, axis) for module, axis in again.items()]

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        refuse([*self._taken(program), *self._uneven(program, mesh)] if self._ranks(mesh) > 1 else [])
        for axis, atoms in zip(self.axes, self._atoms(program), strict=True):
            if mesh.size(axis) == 1:
                program = replace(program, axes={**program.axes, axis: 1})
                continue
            derivation, notes = self._along(program, axis, mesh.size(axis), atoms)
            program = rewrite(program, derivation).with_notes(*notes)
        return program

    def apply(self, site: "Site") -> None:
        if self._ranks(site.mesh) > 1:
            site.replay(*(derivation for derivation, _ in self._derive(site.program, site.mesh)))

    def suits(self, mesh: Mesh) -> bool:
        """No longer along x than along y: a block moves 12 (x - 1) + 4 (y - 1) parts of its activations."""
        return mesh.size(self.x) <= mesh.size(self.y)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"tp_x": 2, "tp_y": 2}, {}),
            Case({"tp_x": 2, "tp_y": 2}, {}, workload="llama"),
            Case({"tp_x": 2, "tp_y": 1}, {}),
            Case({"tp_x": 1, "tp_y": 2}, {}, workload="mlp"),
            Case({"dp": 2, "tp_x": 2, "tp_y": 2}, {}),
        )

    # ---- what is split
    def _ranks(self, mesh: Mesh) -> int:
        return mesh.size(self.x) * mesh.size(self.y)

    def _taken(self, program: Program) -> list[Fault]:
        """Parameters that another axis has cut already: the module's calls are replayed once."""
        others = {a for t in program.parameters() for a, layout in t.layouts.items() if isinstance(layout, Split)}
        return [
            Fault(
                "P116",
                f"Grid cannot split parameters that axis {axis!r} has split",
                f"{axis} = {program.axes[axis]}",
                "a module's calls are replayed on the shards of one strategy",
                f"grid without axis {axis!r}",
                f"mesh.{axis}",
            )
            for axis in sorted(a for a in others if program.axes[a] > 1)
        ]

    def _atoms(self, program: Program) -> tuple[set[int], set[int]]:
        """What is split over x and over y: atoms that the data does not have."""
        fed = {a for t in program.tensors if t.kind == Kind.INPUT for d in t.dims for a in d}
        wide, deep = ({a for n in names for a in program.classes.get(n, ())} - fed for names in CLASSES)
        return wide - deep, deep

    def _uneven(self, program: Program, mesh: Mesh) -> list[Fault]:
        """Every class that does not divide; an odd vocabulary stays whole."""
        found = []
        for axis, names, atoms in zip(self.axes, CLASSES, self._atoms(program), strict=True):
            for name in names:
                sizes = sorted({program.atoms[a] for a in atoms & program.classes.get(name, frozenset())})
                if name != "vocab" and any(n % mesh.size(axis) for n in sizes):
                    found.append(_does_not_divide(name, sizes, axis, mesh.size(axis)))
        return found

    def _derive(self, program: Program, mesh: Mesh) -> list[tuple[Derivation, list[str]]]:
        """Along each axis of several ranks: the derivation, and what stays whole and why."""
        along = [(axis, mesh.size(axis), atoms) for axis, atoms in zip(self.axes, self._atoms(program), strict=True)]
        return [self._along(program, axis, size, atoms) for axis, size, atoms in along if size > 1]

    def _along(self, program: Program, axis: str, size: int, atoms: Set[int]) -> tuple[Derivation, list[str]]:
        odd = {a for a in atoms if program.atoms[a] % size}  # of the vocabulary: others were refused
        numbers = sorted({program.atoms[a] for a in odd})[:1]
        notes = [f"{self.name}: the vocabulary stays whole: {n} classes do not divide over {axis} = {size}" for n in numbers]
        derivation, left, whole = settled(program, atoms - odd, lambda a: derive_tensor(program, axis, size, a), self.name)
        nothing = [] if left else [f"{self.name}: nothing is split over {axis} = {size}"]
        return derivation, [*notes, *whole, *nothing]


def _does_not_divide(name: str, sizes: Sequence[int], axis: str, ranks: int) -> Fault:
    common, numbers = math.gcd(*sizes), ", ".join(map(str, sizes))
    legal = " or ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    return Fault(
        "P104",
        f"Grid cannot split dim {name!r}",
        f"{name} = {numbers}, {axis} = {ranks}",
        f"each rank owns an equal part, so {axis} must divide {numbers}",
        f"{axis} = {legal}",
        f"mesh.{axis}",
    )
