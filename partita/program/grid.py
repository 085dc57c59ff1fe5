"""Blocks over two axes: the split rule along the columns of a mesh, and products in blocks where a weight is cut along both.

                      rows of the mesh      columns of the mesh
    activations       batch                 hidden, heads, ffn, vocab: whatever their last dim is
    matrices          the contracted dim    the other one             (a table that is looked up: rows of it, hidden)
    vectors           whole                 as the activations they meet; gradients are summed over the rows once a step

Along the columns this is the rule of `split.py` with every class split at once. By that rule a product of an activation and a
matrix would gather one of them; here it is one of the three products in blocks, whose calls `panels.py` lists:

    y = x W^T    A B, the contracted dim cut over the rows (over the columns, with a tied table: A B^T)
    dx, dW       the other two

Source: Xu et al. 2021, arXiv:2104.05343, sections 3.1 and 3.2.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from partita.program import panels
from partita.program.derivation import Derivation, Label, Move
from partita.program.dims import Signature
from partita.program.events import Compute, Kind, Phase, Split, Tensor
from partita.program.panels import Moved
from partita.program.program import Program
from partita.program.split import SAME, Rule
from partita.program.tensor import anchored

PRODUCTS = {"mm": (0, 1), "addmm": (1, 2)}  # op -> positions of its factors
TURNS = ("t", "transpose", "permute")
ADDED = ("add", "add_", "clone", "alias", "_to_copy")  # what stands between a gradient and the product that makes it
KEPT = (*TURNS, "detach", "alias")  # views of a matrix that leave its blocks what they are
MATRIX = 2
Spot = tuple[int, int]


@dataclass(frozen=True)
class Plane:
    """Two axes of a mesh: `rows` ranks along axis `row`, `columns` along axis `column`."""

    row: str
    rows: int
    column: str
    columns: int

    @property
    def panels(self) -> int:
        """What a dim that is cut in panels must divide by."""
        return math.lcm(self.rows, self.columns)


def derive_grid(program: Program, plane: Plane, atoms: Iterable[int]) -> Derivation:
    """What splitting `atoms` over the columns, and matrices over rows too, means for every event.

    Args:
        program: Its batch may already be split over the rows; payloads are then as small as that makes them.
        plane: The two axes.
        atoms: Of all classes of features.

    Raises:
        Refused: P104, when a dim does not divide.
    """
    program, atoms = anchored(program), frozenset(atoms)
    matrices = _matrices(program, atoms)
    while True:
        rule = _Grid(program, plane, atoms, matrices)
        found = rule.best()
        if not rule.spoiled:
            return found
        matrices = {w: row for w, row in matrices.items() if w not in rule.spoiled}


def uneven(program: Program, plane: Plane, atoms: Iterable[int]) -> set[int]:
    """Atoms that do not divide into the panels of a plane."""
    return {a for a in atoms if program.atoms[a] % plane.panels}


def _matrices(program: Program, atoms: frozenset[int]) -> dict[int, int]:
    """Parameter -> its dim that is cut over the rows, of every matrix that a product or a table of rows may read in blocks."""
    events = [e for e in program.events() if isinstance(e, Compute) and e.phase == Phase.FORWARD and e.ins]
    tables = {e.ins[0] for e in events if e.op == "embedding"}
    found: dict[int, int] = {}
    for t in program.parameters():
        if len(t.shape) == MATRIX and all(any(a in atoms for a in d) for d in t.dims):
            found[t.id] = 0 if t.id in tables else 1
    turned = {e.ins[0] for e in events if e.op in TURNS and e.ins[0] in found}
    read = {v for e in events if e.op in PRODUCTS for v in e.ins}
    for w in found.keys() & read - turned - tables:  # stored (in, out): read as it is
        found[w] = 0
    return found


class _Grid(Rule):
    """The rule along the columns. `crossed` is where each tensor is split along the rows, beside the batch."""

    def __init__(self, program: Program, plane: Plane, atoms: frozenset[int], matrices: Mapping[int, int]) -> None:
        how = {"held": False, "gradients": True, "scalars": True}
        super().__init__(program, plane.column, plane.columns, atoms, **how)
        self.plane, self.matrices = plane, matrices
        self.spoiled: set[int] = set()
        self.toward = self._toward()
        self.like = self._like()

    def _toward(self) -> dict[int, tuple[int, bool]]:
        """Value of the backward pass -> the matrix whose gradient it becomes, and whether the other way round."""
        found = {g: (w, False) for w, g in self.program.gradients.items() if w in self.matrices}
        for event in reversed(self.events):
            if not isinstance(event, Compute) or event.phase != Phase.BACKWARD or not event.outs or event.outs[0] not in found:
                continue
            w, turned = found[event.outs[0]]
            if event.op in SAME or event.op in ADDED:
                found.update(dict.fromkeys(event.ins, (w, turned ^ (event.op in TURNS))))
        return found

    def _like(self) -> dict[int, int]:
        """State of the optimizer -> the matrix it is of: what is stepped together, and has its shape."""
        owner = {**{g: w for w, g in self.program.gradients.items() if w in self.matrices}, **{w: w for w in self.matrices}}
        steps = [e for e in self.events if isinstance(e, Compute) and e.phase == Phase.OPTIMIZER]
        for event in (*steps, *reversed(steps)):  # a state may be changed once before it meets the gradient
            values = (*event.ins, *event.outs)
            whose = next((owner[v] for v in values if v in owner), None)
            if whose is not None:
                owner.update({v: whose for v in values if self.tensors[v].shape == self.tensors[whose].shape})
        return {v: w for v, w in owner.items() if self.tensors[v].kind == Kind.OPTIMIZER}

    def _at(self, t: Tensor, dim: int) -> Spot:
        return next((d, k) for d, k in self.spots[t.id] if d == dim)

    # ---- the derivation
    def best(self) -> Derivation:
        found = super().best()
        blocks = {v: Split(*at) for v, at in self.crossed.items()}
        return replace(found, across=self.plane.row, ranks=self.plane.rows, blocks=blocks)

    def derive(self) -> int:
        whose = {**{w: w for w in self.matrices}, **self.like}
        self.crossed: dict[int, Spot] = {v: self._at(self.tensors[v], self.matrices[w]) for v, w in whose.items()}
        return super().derive()

    def start(self, t: Tensor) -> Spot:
        w = self.like.get(t.id, t.id)
        return self._at(t, 1 - self.matrices[w]) if w in self.matrices else super().start(t)

    def _block(self, v: int) -> int:
        """Bytes of this rank's part of a value."""
        parts = self.ranks if isinstance(self.states[v], tuple) else 1
        return self.nbytes(v) // parts // (self.plane.rows if v in self.crossed else 1)

    def _calls(self, event: Compute, moved: Iterable[Moved], of: Mapping[str, int]) -> None:
        """The calls of a product. of: what goes over the axis of the rows, and of the columns."""
        axes = {"row": self.plane.row, "col": self.plane.column}
        for m in moved:
            dtype = self.tensors[of[m.over]].dtype
            self.moves.append(Move(self.at, m.op, of[m.over], m.nbytes, dtype, event.phase, event.module, axis=axes[m.over]))

    # ---- one op
    def step(self, event: Compute) -> None:
        sig = event.signature
        if sig is None or sig.creates:
            self._spoil(event)
            super().step(event)
        elif event.op in PRODUCTS and event.outs[0] in self.toward:
            self._gradient(event, sig)
        elif event.op in PRODUCTS and any(v in self.crossed for v in event.ins):
            self._product(event, sig)
        elif event.op == "embedding" and event.ins[0] in self.crossed:
            super().step(event)
            self._looked_up(event, sig, self.crossed[event.ins[0]])
        elif event.op == "embedding_dense_backward" and event.outs[0] in self.toward:
            super().step(event)
            self._scattered(event, sig)
        else:
            super().step(event)
            self._follow(event, sig)

    def _follow(self, event: Compute, sig: Signature) -> None:
        """What becomes of a block in an op that is no product: views and the optimizer keep it one."""
        crossed = [i for i, v in enumerate(event.ins) if v in self.crossed]
        if not crossed:
            return
        if event.op not in KEPT and event.phase in (Phase.FORWARD, Phase.RECOMPUTE):
            self._spoil(event)
            return
        label = self.find(sig, sig.ins[crossed[0]], self.crossed[event.ins[crossed[0]]])
        for o, cells in zip(event.outs, sig.outs, strict=True):
            if (at := self.place(sig, cells, label)) is not None:
                self.crossed[o] = at

    def _spoil(self, event: Compute) -> None:
        """A matrix that this event reads cannot be in blocks."""
        self.spoiled |= {self.same[v] for v in event.ins if self.same[v] in self.matrices}
        self.spoiled |= {self.toward[v][0] for v in (*event.ins, *event.outs) if v in self.toward}

    def _product(self, event: Compute, sig: Signature) -> None:
        """A product with a matrix as its right factor."""
        x, w = (event.ins[i] for i in PRODUCTS[event.op])
        at, side = self.crossed.get(w), self.states[w]
        if at is None or not isinstance(side, tuple):
            self._spoil(event)
            return super().step(event)
        first, second = PRODUCTS[event.op]
        cut, free = self.find(sig, sig.ins[second], at), self.find(sig, sig.ins[second], side)
        form = "ab" if at[0] == 0 else "abt"
        inner, outer = (cut, free) if form == "ab" else (free, cut)
        if self.place(sig, sig.ins[first], inner) not in self.have(x) or not self._plain(sig, cut):
            self._spoil(event)
            return super().step(event)
        self.taken.label, self.taken.product = outer, form
        for i in set(range(len(event.ins))) - {first, second}:
            self.convert(event.ins[i], self.place(sig, sig.ins[i], outer) or "R", event.phase, event.module)
        (out,) = event.outs
        self.states[out] = self.place(sig, sig.outs[0], outer) or "R"
        sizes = self.plane.rows, self.plane.columns
        if form == "ab":
            self._calls(event, panels.ab(*sizes, self._block(x), self._block(w)), {"col": x, "row": w})
        else:
            self._calls(event, panels.abt(*sizes, self._block(w), self._block(out)), {"col": out, "row": w})
        return None

    def _plain(self, sig: Signature, label: Label | None) -> bool:
        """Whether the dim that is cut in panels is contiguous in every rank's part."""
        return label is not None and label[1] == 0 and label[0] not in sig.parts

    def _gradient(self, event: Compute, sig: Signature) -> None:
        """The gradient of a matrix: the one factor travels in panels of the dim along the rows, sums go to their rows."""
        (out,), (w, turned) = event.outs, self.toward[event.outs[0]]
        dim = self.matrices[w] ^ turned
        at = {d: next(((d, k) for e, k in self.spots[out] if e == d), None) for d in (0, 1)}
        cut, free = at[dim], at[1 - dim]
        sides = [PRODUCTS[event.op][d] for d in (dim, 1 - dim)]
        if cut is None or free is None:
            self._spoil(event)
            return super().step(event)
        labels = [self.find(sig, sig.outs[0], spot) for spot in (cut, free)]
        if any(self.place(sig, sig.ins[i], t) not in self.have(event.ins[i]) for i, t in zip(sides, labels, strict=True)):
            self._spoil(event)
            return super().step(event)
        self.taken.label, self.taken.product = labels[1], "atb"
        self.states[out], self.crossed[out] = free, cut
        given = event.ins[sides[0]]
        moved = panels.atb(self.plane.rows, self.plane.columns, self._block(given), self._block(out))
        self._calls(event, moved, {"col": given, "row": out})
        return None

    def _looked_up(self, event: Compute, sig: Signature, at: Spot) -> None:
        if at[0] != 0 or self.taken.label is None or self.states[event.outs[0]] == "R":
            self._spoil(event)
            return
        self.taken.product = "lookup"
        table = event.ins[0]
        self._calls(event, panels.lookup(self.plane.rows, self._block(table)), {"row": table})

    def _scattered(self, event: Compute, sig: Signature) -> None:
        out = event.outs[0]
        w, _ = self.toward[out]
        self.crossed[out] = self._at(self.tensors[w], self.matrices[w])
        self._calls(event, panels.lookup(self.plane.rows, self._block(out)), {"row": out})
