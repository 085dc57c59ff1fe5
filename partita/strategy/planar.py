"""What tensor parallelism in blocks over two axes shares: batch over the rows, features over the columns, matrices over both.

A strategy file says over which further axes copies of the plane share out the batch (`depths`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Kind, Phase, Program, Split
from partita.program.data import batch_faults, loose_norms, module_faults, rewrite_batch, say_loss
from partita.program.derivation import Derivation
from partita.program.events import Compute
from partita.program.grid import PRODUCTS, Plane, derive_grid, uneven
from partita.program.reduction import sum_late
from partita.program.split import rewrite
from partita.program.tensor import RECOMPUTED, cannot_split, recomputed
from partita.program.whole import settled
from partita.strategy.contract import Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site

CLASSES = ("hidden", "heads", "kv", "ffn")  # each must divide; an odd vocabulary stays whole
SHOWN = {"kv": "kv_heads"}  # class -> its name in a message


@dataclass(frozen=True)
class Planar(Strategy):
    """Tensor parallelism on a plane of ranks. It is of the whole model: `modules` stays at all of them.

    Args:
        row: The mesh axis along which the row of a rank varies: batch, and the contracted dim of matrices.
        column: The mesh axis along which its column varies: all features.
    """

    place: ClassVar[Place] = Place.TENSOR
    promise: ClassVar[Promise] = Promise.REORDERED

    row: str = "tp_row"
    column: str = "tp_col"

    def __post_init__(self) -> None:
        refuse(
            module_faults(self.name, self.modules, "batch and hidden are dims of all modules: they are split in all or in none")
        )

    @property
    def depths(self) -> tuple[str, ...]:
        """Axes of copies of the plane, each with a part of the batch."""
        return ()

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.depths, self.row, self.column)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return (self.row, *self.depths)

    # ---- the contract
    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        plane = self._plane(mesh)
        if all(mesh.size(axis) == 1 for axis in self.axes):
            return []
        if faults := [*self._shape_faults(mesh), *self._taken(program), *self._uneven(program, plane)]:
            return faults
        for axis in self.batch_axes:
            if faults := batch_faults(program, axis, mesh.size(axis), self._who):
                return faults
            program = self._shared(program, axis, mesh.size(axis))
        again = any(e.phase == Phase.RECOMPUTE for e in program.events())
        modules = recomputed(program, self._derive(program, plane)[0]) if again else []
        return [cannot_split(module, RECOMPUTED, self.column) for module in modules]

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        plane = self._plane(mesh)
        if all(mesh.size(axis) == 1 for axis in self.axes):
            return replace(program, axes={**program.axes, **dict.fromkeys(self.axes, 1)})
        refuse([*self._shape_faults(mesh), *self._taken(program), *self._uneven(program, plane)])
        for axis in self.batch_axes:
            program = self._shared(program, axis, mesh.size(axis))
        derivation, notes = self._derive(program, plane)
        said = rewrite(program, derivation).with_notes(*notes)
        shared = [axis for axis in self.batch_axes if mesh.size(axis) > 1]
        for axis in shared:
            said = sum_late(said, axis)
        for axis in shared:
            said = say_loss(said, axis)
        return said

    def apply(self, site: "Site") -> None:
        if all(site.mesh.size(axis) == 1 for axis in self.axes):
            return
        for axis in self.batch_axes:
            site.share_batch(axis)
            if site.mesh.size(axis) > 1:
                refuse(loose_norms(site.program, site.batch_norms(), axis, self._who))
                site.synchronise_batch_norm(axis)
        site.replay(self._derive(site.program, self._plane(site.mesh))[0])
        for axis in self.batch_axes:
            site.sum_gradients(axis)

    # ---- its parts
    @property
    def _who(self) -> str:
        return type(self).__name__

    def _plane(self, mesh: Mesh) -> Plane:
        return Plane(self.row, mesh.size(self.row), self.column, mesh.size(self.column))

    def _shared(self, program: Program, axis: str, size: int) -> Program:
        if size == 1:
            return replace(program, axes={**program.axes, axis: 1})
        return rewrite_batch(program, axis, size, self.name)

    def _shape_faults(self, mesh: Mesh) -> list[Fault]:
        """What is wrong with the sizes of its axes."""
        return []

    def _taken(self, program: Program) -> list[Fault]:
        """Parameters that another axis has cut already: calls are replayed on one plane."""
        others = {a for t in program.parameters() for a, layout in t.layouts.items() if isinstance(layout, Split)}
        law = "a module's calls are replayed on the blocks of one plane"
        return [
            Fault(
                "P116",
                f"{self._who} cannot split parameters that axis {axis!r} has split",
                f"{axis} = {program.axes[axis]}",
                law,
                f"{self.name} without axis {axis!r}",
                f"mesh.{axis}",
            )
            for axis in sorted(a for a in others if program.axes[a] > 1)
        ]

    def _atoms(self, program: Program, names: Sequence[str]) -> set[int]:
        """Atoms of these classes that the data does not have."""
        atoms = {a for name in names for a in program.classes.get(name, ())}
        return atoms - {a for t in program.tensors if t.kind == Kind.INPUT for d in t.dims for a in d}

    def _uneven(self, program: Program, plane: Plane) -> list[Fault]:
        """Every class that does not divide into panels."""
        return [f for name in CLASSES if (f := self._divides(program, plane, name)) is not None]

    def _divides(self, program: Program, plane: Plane, name: str) -> Fault | None:
        atoms, keys = self._atoms(program, (name,)), self._atoms(program, ("kv",))
        if name in ("heads", "kv"):  # heads of keys go by a name of their own where each serves a group of queries
            grouped = bool(program.classes.get("group"))
            atoms = atoms - keys if (name == "heads") == grouped else atoms
        if not uneven(program, plane, atoms):
            return None
        sizes = sorted({program.atoms[a] for a in atoms}, reverse=True)
        common = math.gcd(*sizes)
        legal = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        shown, numbers = SHOWN.get(name, name), ", ".join(map(str, sizes))
        return Fault(
            "P104",
            f"{self._who} cannot split dim {name!r}",
            f"{shown} = {numbers}, {plane.row} = {plane.rows}, {plane.column} = {plane.columns}",
            f"each panel of it lies in one row and one column, so lcm({plane.rows}, {plane.columns}) = {plane.panels} "
            f"must divide {numbers}",
            f"{plane.row} and {plane.column} each one of {legal}",
            f"mesh.{plane.column}",
        )

    def _derive(self, program: Program, plane: Plane) -> tuple[Derivation, list[str]]:
        """The derivation over all dims that can be split, and what stays whole and why."""
        atoms, vocabulary, notes = self._atoms(program, CLASSES), self._atoms(program, ("vocab",)), []
        if odd := uneven(program, plane, vocabulary):
            number = max(program.atoms[a] for a in odd)
            sizes = f"{plane.row} = {plane.rows} and {plane.column} = {plane.columns}"
            notes.append(f"{self.name}: the vocabulary stays whole: {number} classes do not divide over {sizes}")
        atoms |= set() if odd else vocabulary
        derivation, left, whole = settled(program, atoms, lambda a: derive_grid(program, plane, a), self.name)
        notes += whole
        if not left:
            notes.append(f"{self.name}: nothing is split over {plane.column} = {plane.columns}")
        return derivation, list(dict.fromkeys([*notes, *self._whole(program, derivation)]))

    def _whole(self, program: Program, derivation: Derivation) -> list[str]:
        """Matrices that are multiplied and yet not in blocks."""
        turned = {e.outs[0]: e.ins[0] for e in program.events() if isinstance(e, Compute) and e.op == "t" and e.ins}
        products = [e for e in program.events() if isinstance(e, Compute) and e.op in PRODUCTS]
        read = {turned.get(v, v) for e in products for v in (e.ins[i] for i in PRODUCTS[e.op])}
        names = [t.name for t in program.parameters() if t.id in read and t.id not in derivation.blocks]
        return [f"{self.name}: {name!r} is not cut over {derivation.across} = {derivation.ranks}" for name in names]
