"""Splits heads, feed-forward widths and the vocabulary of any module over one axis.

    y = W2 f(W1 x)      W1 by rows, W2 by columns  ->  each rank a summand of y: one all_reduce forward, one backward
    attention           the same with whole heads: rows of q, k, v (fused or not), columns of the output projection
    vocabulary          rows of the embedding and of the head; cross-entropy exchanges two statistics per target

The module is not changed: the calls it makes on one device are captured, and each rank makes them on its part.
What has no such dim, or mixes it with others, stays whole, and a note says so.

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3.
"""

import fnmatch
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from partita.errors import Fault, refuse
from partita.mesh import Mesh
from partita.program import Kind, Phase, Program, Split
from partita.program.split import Derivation, rewrite
from partita.program.tensor import RECOMPUTED, cannot_split, derive_tensor, recomputed, single_heads
from partita.program.whole import settled
from partita.strategy import Case, Place, Promise, Strategy

if TYPE_CHECKING:
    from partita.runtime.site import Site

CLASSES = ("heads", "kv", "ffn")


@dataclass(frozen=True)
class TensorParallel(Strategy):
    """Tensor parallelism by named dims.

    Args:
        axis: The mesh axis that carries heads, ffn and vocab.
    """

    name: ClassVar[str] = "tensor_parallel"
    place: ClassVar[Place] = Place.TENSOR
    promise: ClassVar[Promise] = Promise.REORDERED

    axis: str = "tp"

    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        size = mesh.size(self.axis)
        if size == 1:
            return []
        if taken := self._taken(program):
            return taken
        if faults := self._odd(program, size):
            return faults
        repeated = any(e.phase == Phase.RECOMPUTE for e in program.events())
        again = recomputed(program, self._derive(program, size)[0]) if repeated else []
        return [cannot_split(module, RECOMPUTED, self.axis) for module in again]

    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        size = mesh.size(self.axis)
        if size == 1:
            return replace(program, axes={**program.axes, self.axis: 1})
        refuse(self._taken(program))
        derivation, notes = self._derive(program, size)
        return rewrite(program, derivation).with_notes(*notes)

    def apply(self, site: "Site") -> None:
        size = site.mesh.size(self.axis)
        if size > 1:
            refuse(self._taken(site.program))
            site.replay(self._derive(site.program, size)[0])

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"tp": 2}, {}),
            Case({"tp": 4}, {}),
            Case({"tp": 2}, {}, workload="llama"),
            Case({"tp": 2}, {}, workload="resnet"),
            Case({"dp": 2, "tp": 2}, {}),
            Case({"tp": 2, "dp": 2}, {}),
        )

    # ---- what is split
    def _taken(self, program: Program) -> list[Fault]:
        """Parameters that another axis has cut already: calls are replayed on one axis."""
        others = {a for t in program.parameters() for a, layout in t.layouts.items() if isinstance(layout, Split)}
        axes = sorted(a for a in others if program.axes[a] > 1 and a != self.axis)
        return [
            Fault(
                "P116",
                f"TensorParallel(axis={self.axis!r}) cannot split parameters that axis {axis!r} has split",
                f"{axis} = {program.axes[axis]}",
                "a module's calls are replayed on the shards of one axis",
                f"one axis for tensor_parallel: {self.axis} = {program.axes[axis]} x its size, without {axis}",
                f"mesh.{self.axis}",
            )
            for axis in axes
        ]

    def _derive(self, program: Program, size: int) -> tuple[Derivation, list[str]]:
        """The derivation over all dims that can be split, and what stays whole and why."""
        refuse(self._odd(program, size))
        atoms = self._wanted(program, CLASSES)
        vocabulary, notes = self._wanted(program, ("vocab",)), []
        odd = sorted({program.atoms[a] for a in vocabulary if program.atoms[a] % size})
        if odd:
            notes.append(f"{self.name}: the vocabulary stays whole: {odd[0]} classes do not divide over {self.axis} = {size}")
        atoms |= set() if odd else vocabulary
        derivation, atoms, whole = settled(program, atoms, lambda a: derive_tensor(program, self.axis, size, a), self.name)
        notes += whole
        if atoms and single_heads(program):
            notes.append(f"{self.name}: attention with one head stays whole")
        if not atoms:
            notes.append(f"{self.name}: nothing is split over {self.axis} = {size}: no dim heads, ffn or vocab can be")
        return derivation, list(dict.fromkeys(notes))

    def _wanted(self, program: Program, names: Iterable[str]) -> set[int]:
        """Atoms of these classes that only parameters of the chosen modules carry."""
        atoms = {a for name in names for a in program.classes.get(name, ())}
        if "heads" in names and not program.classes.get("heads"):  # one key head: its group of query heads is split
            atoms |= program.classes.get("group", frozenset())
        for t in program.tensors:
            if t.kind == Kind.INPUT or (t.kind == Kind.PARAMETER and not self._chosen(t.name)):
                atoms -= {a for d in t.dims for a in d}
        return atoms

    def _chosen(self, parameter: str) -> bool:
        parts = parameter.split(".")[:-1]
        paths = [".".join(parts[:n]) for n in range(len(parts) + 1)]
        return any(fnmatch.fnmatchcase(path, glob) for path in paths for glob in self.modules)

    def _odd(self, program: Program, size: int) -> list[Fault]:
        """Every dim that does not divide."""
        return [f for names in (("heads", "kv"), ("ffn",)) if (f := self._divides(program, names, size))]

    def _divides(self, program: Program, names: Sequence[str], size: int) -> Fault | None:
        atoms = self._wanted(program, names)
        if all(program.atoms[a] % size == 0 for a in atoms):
            return None
        counts = {names[0]: {program.atoms[a] for a in atoms}}
        if "kv" in names and (groups := self._groups(program, atoms)):
            counts = {"heads": groups, "kv_heads": counts["heads"]}
        numbers = sorted({n for found in counts.values() for n in found}, reverse=True)
        legal = [n for n in range(1, min(numbers) + 1) if all(m % n == 0 for m in numbers)]
        have = ", ".join(f"{name} = {n}" for name, found in counts.items() for n in sorted(found, reverse=True))
        what = "whole heads of both kinds" if len(counts) > 1 else "whole heads" if names[0] == "heads" else "an equal part"
        return Fault(
            "P104",
            f"TensorParallel(axis={self.axis!r}) cannot split dim {names[0]!r}",
            f"{have}, {self.axis} = {size}",
            f"each rank owns {what}, so {self.axis} must divide {_list(numbers, 'and')}",
            f"{self.axis} = {_list(legal, 'or')}",
            f"mesh.{self.axis}",
        )

    def _groups(self, program: Program, atoms: set[int]) -> set[int]:
        """Query heads where each key head serves a group of them."""
        found = set()
        for t in program.parameters():
            for dim in t.dims:
                for head, group in itertools.pairwise(dim):
                    if head in atoms and group in program.classes.get("group", ()):
                        found.add(program.atoms[head] * program.atoms[group])
        return found


def _list(numbers: Sequence[int], word: str) -> str:
    shown = [str(n) for n in numbers]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {word} {shown[-1]}"
