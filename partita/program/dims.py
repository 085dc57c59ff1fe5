"""Dims as ordered atoms in a union-find, and the einops-like signature of one op.

An *atom* is a sized class. A *dim* is an ordered tuple of atoms, outermost first; a dim of size 1 is the empty tuple, so
squeeze, unsqueeze, keepdim and broadcasting need no rule. Three operations: two dims become one (`unify`), an atom becomes
an ordered product (`refine`), and, at the end, cuts settle: a class cut into equal pieces becomes a product, one tiled by
unequal pieces a direct sum, anything else stays whole. Names never come from sizes, only from order.
"""

import collections
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Dim = tuple[int, ...]
Cell = tuple[str, ...]  # the labels one dim is made of, as einops writes "(h e)"


@dataclass
class Signature:
    """The einops pattern of one recorded op. A label that an output lacks was summed over.

    Args:
        ins, outs: Per tensor, per dim: the labels it is made of.
        whole: Labels that must not be split here.
        inner: label -> (n, k, whole after): may be split at n all_reduces of k statistics.
        linear: How partial sums travel through: pass | add | mul | first | last | no.
        dims: label -> the atoms it stands for.
        parts: summand label -> the label it is a slice of.
        summands: The dims a direct sum is made of.
        independent: (input, output) pairs without data flow.
        unread: Inputs used for their shape only.
        index: The one index a select or a slice takes.
        creates: Makes its outputs from nothing that is split.
    """

    ins: list[list[Cell]]
    outs: list[list[Cell]]
    whole: set[str] = field(default_factory=set)
    inner: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    linear: str = "no"
    dims: dict[str, Dim] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    summands: list[Dim] = field(default_factory=list)
    independent: set[tuple[int, int]] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)
    index: int = -1
    creates: bool = False


def identity(dims: Sequence[Dim]) -> Signature:
    """Of an op that copies one tensor of these dims."""
    cells: list[Cell] = [(f"d{n}",) for n in range(len(dims))]
    return Signature([cells], [list(cells)], linear="pass", dims={f"d{n}": dim for n, dim in enumerate(dims)})


class Atoms:
    """Sized atoms in a union-find; `parts` holds what an atom was refined into."""

    def __init__(self) -> None:
        self.size: list[int] = []
        self.up: list[int] = []
        self.parts: dict[int, Dim] = {}
        self.cuts: list[tuple[Signature, int, list[tuple[int, int]]]] = []

    def new(self, n: int) -> Dim:
        """A fresh dim of size n."""
        if n == 1:
            return ()
        self.size.append(n)
        self.up.append(len(self.up))
        return (len(self.up) - 1,)

    def find(self, a: int) -> int:
        while self.up[a] != a:
            self.up[a] = a = self.up[self.up[a]]
        return a

    def leaves(self, dim: Dim) -> Dim:
        """The dim in terms of atoms that are not refined further."""
        out: list[int] = []
        todo = list(reversed(dim))
        while todo:
            a = self.find(todo.pop())
            if a in self.parts:
                todo.extend(reversed(self.parts[a]))
            else:
                out.append(a)
        return tuple(out)

    def numel(self, dim: Dim) -> int:
        return math.prod(self.size[a] for a in dim)

    def refine(self, a: int, outer: int) -> Dim:
        """Atom a becomes the product of an outer atom of size `outer` and the rest."""
        self.parts[a] = self.new(outer) + self.new(self.size[a] // outer)
        return self.parts[a]

    def unify(self, x: Dim, y: Dim) -> bool:
        """Make two dims one; False (and nothing done) when they have no common refinement."""
        x, y = self.leaves(x), self.leaves(y)
        cuts = sorted({p for d in (x, y) for p in itertools.accumulate((self.size[a] for a in reversed(d)), int.__mul__)})
        if self.numel(x) != self.numel(y) or any(b % a for a, b in itertools.pairwise(cuts)):
            return False
        xs, ys = list(reversed(x)), list(reversed(y))
        while xs:
            a, b = self.find(xs.pop()), self.find(ys.pop())
            if a in self.parts or b in self.parts:
                xs.extend(reversed(self.leaves((a,))))
                ys.extend(reversed(self.leaves((b,))))
            elif self.size[a] == self.size[b]:
                self.up[b] = a
            else:
                big, small, stack = (a, b, xs) if self.size[a] > self.size[b] else (b, a, ys)
                outer, inner = self.refine(big, self.size[small])
                self.up[small] = outer
                stack.append(inner)
        return True

    def regroup(self, dims: list[Dim], shape: tuple[int, ...]) -> list[Dim] | None:
        """The dims of a view: the same atoms in the same order, grouped anew."""
        todo, out = list(reversed(self.leaves(sum(dims, ())))), []
        for n in shape:
            got: list[int] = []
            have = 1
            while have < n and todo:
                a, need = todo.pop(), n // have
                if self.size[a] > need and self.size[a] % need == 0:
                    a, rest = self.refine(a, need)
                    todo.append(rest)
                have *= self.size[a]
                got.append(a)
            if have != n:
                return None
            out.append(tuple(got))
        return out

    def settle(self) -> None:
        """One class of dims is cut one way: equal pieces make it a product, unequal ones a direct sum, else it stays whole."""
        groups: dict[Dim, list] = collections.defaultdict(list)
        for c in self.cuts:
            groups[self.leaves(c[0].dims["big"])].append(c)
        for big, group in sorted(groups.items(), key=lambda g: -g[1][0][1]):
            n, spans = group[0][1], sorted({p for _, _, pieces in group for p in pieces})
            size, ends = spans[0][1], [a + b for a, b in spans]
            if len(spans) > 1 and size > 1 and n % size == 0 and all(b == size and a % size == 0 for a, b in spans):
                self._product(big, n, size, group)
            elif [a for a, _ in spans] == [0, *ends[:-1]] and ends[-1] == n and len(big) == 1:
                self._direct_sum(group)

    def _product(self, big: Dim, n: int, size: int, group: list) -> None:
        inner, outer = group[0][0].dims["piece0"], self.new(n // size)
        tied = [self.unify(s.dims[f"piece{j}"], inner) for s, _, p in group for j in range(len(p))]
        if not (all(tied) and self.unify(big, outer + inner)):
            return

        def swap(cell: Cell) -> Cell:
            if cell == ("big",):
                return ("outer", "piece0")
            return ("piece0",) if cell[:1] and cell[0].startswith("piece") else cell

        for s, _, _ in group:
            s.whole, s.dims["outer"], s.dims["piece0"] = {"outer"}, outer, inner
            s.ins, s.outs = ([[swap(x) for x in cells] for cells in side] for side in (s.ins, s.outs))

    def _direct_sum(self, group: list) -> None:
        first: dict[tuple[int, int], Dim] = {}
        for s, _, pieces in group:
            s.whole = set()
            for j, span in enumerate(pieces):
                self.unify(first.setdefault(span, s.dims[f"piece{j}"]), s.dims[f"piece{j}"])
                s.parts[f"piece{j}"] = "big"
        group[0][0].summands = list(first.values())
