"""The one rule: split dim d over axis a.  Pure: no torch, any mesh.

Events that carry d shrink; a contraction over d leaves `Partial`; the first event that needs the whole value gets the
collective that repairs it. Data parallelism is this rule on `batch`, tensor parallelism on `heads`, `ffn` and `vocab`.

For one op: inputs offer their splits; a Partial input offers every split dim it carries; a dim born here may be born split.
Taken is the offer with the least bytes to move (all_reduce 2, all_gather and reduce_scatter 1, all_to_all 1/p, slicing 0),
"all whole" last; parameters never move. Partial values travel only through linear ops that add no bytes.
A repair or gather is remembered, also for views of the same value; a second pass treats what was gathered anyway as free.
"""

import collections
import math
from collections.abc import Iterable

from partita.errors import Fault, Refused
from partita.program.derivation import Derivation, Label, Move, Taken
from partita.program.dims import Cell, Dim, Signature
from partita.program.events import WIDTH, Compute, Kind, Partial, Phase, Split, Tensor
from partita.program.program import Program
from partita.program.saying import payload, ranges, rewrite

__all__ = ["Derivation", "Label", "Move", "Rule", "Taken", "check_divides", "derive", "payload", "ranges", "rewrite"]

WHOLE, PARTIAL = "R", "P"
State = str | tuple[int, int]  # inside this file: WHOLE | PARTIAL | (dim, which atom of it)
# Ops whose result is the same value under other dims: a repair of one is a repair of all.
SAME = {
    "view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "permute", "transpose", "t", "detach", "alias",
    "lift_fresh",
}  # fmt: skip
HALF = ("float16", "bfloat16")
APART = {"unbind", "split", "split_with_sizes", "unsafe_split"}  # ops with a result for every index, or for every few


def derive(
    program: Program,
    axis: str,
    size: int,
    atoms: Iterable[int],
    *,
    held: bool = False,
    gradients: bool = True,
    scalars: bool = True,
) -> Derivation:
    """What splitting `atoms` over an axis of `size` ranks means for every event.

    Args:
        program: May already be rewritten for other axes; their layouts make payloads smaller.
        axis: Name of the new axis.
        size: Its ranks.
        atoms: The dim class, e.g. `program.classes["heads"]`.
        held: Parameters live split, are gathered where used, and gradients end scattered.
        gradients: False leaves Partial gradients Partial at the end.
        scalars: False leaves 0-dim Partial values unrepaired.

    Raises:
        Refused: P104, when a dim of the class does not divide.
    """
    rule = Rule(program, axis, size, frozenset(atoms), held=held, gradients=gradients, scalars=scalars)
    return rule.best()


def check_divides(program: Program, axis: str, size: int, atoms: Iterable[int]) -> list[Fault]:
    """P104 for every dim of the class that `size` does not divide, under the axes already rewritten."""
    names = {a: name for name, found in program.classes.items() for a in found}
    used = _used(program)
    left = {a: program.atoms[a] // used.get(a, 1) for a in atoms if a in program.atoms}
    bad = sorted({(names.get(a, "?"), n) for a, n in left.items() if n % size})
    if not bad:
        return []
    common = math.gcd(*left.values())
    have = ", ".join(f"{name} = {n}" for name, n in sorted({(names.get(a, "?"), n) for a, n in left.items()}))
    legal = [str(n) for n in range(1, common + 1) if common % n == 0]
    what = f"axis {axis!r} cannot split dim {' and '.join(sorted({repr(name) for name, _ in bad}))}"
    law = f"each rank owns whole blocks, so {axis} must divide {' and '.join(sorted({str(n) for n in left.values()}, key=int))}"
    return [Fault("P104", what, f"{have}, {axis} = {size}", law, f"{axis} = {_choice(legal)}", f"mesh.{axis}")]


def _choice(words: list[str]) -> str:
    shown = words if len(words) <= 8 else [*words[:7], words[-1]]
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def _used(program: Program) -> dict[int, int]:
    """Atom -> ranks it is already divided over."""
    found: dict[int, set[str]] = collections.defaultdict(set)
    for t in program.tensors:
        for axis, layout in t.layouts.items():
            if isinstance(layout, Split):
                found[t.dims[layout.dim][layout.atom]].add(axis)
    return {a: math.prod(program.axes[x] for x in axes) for a, axes in found.items()}


class Rule:
    """The rule at work on one program. `states` is what each tensor is along the axis, by id."""

    def __init__(self, program: Program, axis: str, size: int, atoms: frozenset[int], **how: bool) -> None:
        if faults := check_divides(program, axis, size, atoms):
            raise Refused(*faults)
        self.program, self.axis, self.ranks, self.how = program, axis, size, how
        self.atoms = atoms | {a for a, parts in program.sums.items() if parts and all(d and d[0] in atoms for d in parts)}
        self.events = list(program.events())
        self.tensors = program.tensors
        self.spots = [self._spots(t) for t in self.tensors]
        self.same = self._same()
        self.fed = {a for t in self.tensors if t.kind == Kind.INPUT for d in t.dims for a in d}  # atoms of the data
        self.parameters = {t.id for t in self.tensors if t.kind == Kind.PARAMETER}
        self.held = self.parameters if how["held"] else set()
        self.end = next((n for n, e in enumerate(self.events) if e.phase == Phase.OPTIMIZER), len(self.events))
        self.anyway: set[int] = set()
        self.sizes: dict[int, int] = {}

    def _spots(self, t: Tensor) -> tuple[tuple[int, int], ...]:
        return tuple((i, k) for i, d in enumerate(t.dims) for k, a in enumerate(d) if a in self.atoms)

    def _same(self) -> list[int]:
        """Per tensor: the first tensor that is the same value."""
        same = list(range(len(self.tensors)))
        for e in self.events:
            if isinstance(e, Compute) and e.op in SAME and e.ins and e.outs and e.signature is not None:
                same[e.outs[0]] = same[e.ins[0]]
        return same

    # ---- two looks
    def best(self) -> Derivation:
        cost = self.derive()
        best = cost, self.moves, self.states, self.labels
        while best[0]:  # look again: what some op gathers anyway is free for an earlier one
            self.anyway = {self.same[m.tensor] for m in best[1] if m.op == "all_gather"}
            cost = self.derive() if self.anyway else best[0]
            if cost >= best[0]:
                break
            best = cost, self.moves, self.states, self.labels
        _, moves, states, labels = best
        layouts = {i: _layout(s) for i, s in enumerate(states) if s != WHOLE}
        final = {i: x for i, x in layouts.items() if x is not None}
        return Derivation(self.axis, self.ranks, self.atoms, final, tuple(moves), tuple(labels))

    def derive(self) -> int:
        self.whole: set[tuple[int, str]] = set()  # gathered or reduced once: whole for every view of the same value
        self.extra: dict[int, set[State]] = collections.defaultdict(set)
        self.moves: list[Move] = []
        self.labels = [Taken() for _ in self.events]
        self.states: list[State] = [WHOLE] * len(self.tensors)
        self.owner: dict[int, tuple[Dim, int] | None] = {}  # a value made from one index of a split dim alone
        self.at, self.taken = 0, Taken()
        for t in self.tensors:
            if t.kind in (Kind.PARAMETER, Kind.INPUT, Kind.OPTIMIZER) and t.id not in self.held and self.spots[t.id]:
                self.states[t.id] = self.start(t)
        left: dict[int, State] = {}
        for n, event in enumerate(self.events):
            self.at, self.taken = n, self.labels[n]
            if n == self.end:
                left = self.finish()
            if isinstance(event, Compute):
                self.step(event)
                if self.program.loss in event.outs:
                    self.settle_loss(event)
        if self.end == len(self.events):
            self.at, self.taken = self.end, Taken()
            left = self.finish()
        for i, state in left.items():
            self.states[i] = state
        return sum(m.nbytes * (1 + (m.op == "all_reduce")) for m in self.moves)

    def start(self, t: Tensor) -> tuple[int, int]:
        """Where a tensor that is there from the start is split."""
        return self.spots[t.id][0]

    def settle_loss(self, event: Compute) -> None:
        """The scalar loss ends whole."""
        self.at += 1
        self.convert(self.program.loss, WHOLE, event.phase, event.module)

    def finish(self) -> dict[int, State]:
        """Bring each gradient to its parameter's layout; returns what stays as it is, whatever the optimizer is told."""
        left: dict[int, State] = {}
        for w, g in self.program.gradients.items():
            name = self.tensors[w].name
            if self.how["gradients"] and w in self.held and self.states[g] == PARTIAL:
                self.emit("reduce_scatter", g, Phase.SYNC, name)
            elif self.how["gradients"] and w not in self.held:
                self.convert(g, self.states[w], Phase.SYNC, name)
            elif self.states[g] == PARTIAL:
                left[g], self.states[g] = PARTIAL, self.states[w]
        return left

    # ---- moving
    def nbytes(self, v: int) -> int:
        if v not in self.sizes:
            self.sizes[v] = self.program.local_bytes(v)
        return self.sizes[v]

    def emit(self, op: str, v: int, phase: Phase, module: str, nbytes: int | None = None) -> None:
        size = self.nbytes(v) if nbytes is None else nbytes
        self.moves.append(Move(self.at, op, v, size, self.tensors[v].dtype, phase, module))

    def have(self, v: int) -> set[State]:
        whole = (self.same[v], "") in self.whole
        if whole and self.states[v] == PARTIAL:
            self.states[v] = WHOLE
        return {self.states[v], *self.extra.get(v, ()), *((WHOLE,) if whole else ())}

    def cost(self, v: int, need: State) -> float:
        have = self.have(v)
        if need in have or WHOLE in have or (need == WHOLE and PARTIAL not in have and self.same[v] in self.anyway):
            return 0
        if self.same[v] in self.parameters:
            return math.inf  # parameters stay where they are: activations move
        if PARTIAL in have:
            return self.nbytes(v) * (2 if need == WHOLE else 1)
        return self.nbytes(v) * (1 if need == WHOLE else 1 / self.ranks)

    def convert(self, v: int, need: State, phase: Phase, module: str) -> None:
        have = self.have(v)
        if need in have:
            return
        self.taken.moved.append((v, frozenset(map(_layout, have)), _layout(need)))
        if WHOLE in have:
            return
        if PARTIAL in have and not self.how["scalars"] and not self.tensors[v].shape:
            self.taken.moved.pop()
            return
        if PARTIAL in have:
            op = "all_reduce" if need == WHOLE else "reduce_scatter"
        else:
            op = "all_gather" if need == WHOLE else "all_to_all"
        self.emit(op, v, phase, module, self.nbytes(v) // self.ranks if op == "all_to_all" else None)
        if need == WHOLE:
            self.whole.add((self.same[v], ""))
        if PARTIAL in have:
            self.states[v] = need
        else:
            self.extra[v].add(need)

    def gather_held(self, event: Compute) -> None:
        for v in event.ins:
            key = (self.same[v], str(event.phase))
            if key[0] in self.held and key not in self.whole:
                self.whole.add(key)
                self.emit("all_gather", key[0], event.phase, event.module)

    # ---- one op
    def step(self, event: Compute) -> None:
        sig, where = event.signature, (event.phase, event.module)
        if self.held and event.phase != Phase.OPTIMIZER:
            self.gather_held(event)
        if sig is None or sig.creates:
            for v in event.ins if sig is None else ():
                self.convert(v, WHOLE, *where)
            return
        read = [i for i in range(len(event.ins)) if i not in sig.unread]
        partial = [i for i in read if self.have(event.ins[i]) == {PARTIAL}]
        if partial and self.alone(event, sig, read, partial):
            return
        if partial and self.travels(event, sig, read, partial):
            self.taken.partial = tuple(partial)
            owners = {self.owner.get(event.ins[i]) for i in partial}
            for o in event.outs:
                self.states[o], self.owner[o] = PARTIAL, owners.copy().pop() if len(owners) == 1 else None
            return
        label = self.taken.label = self.choose(event, sig, read, partial)
        for i in read:
            self.convert(event.ins[i], self.place(sig, sig.ins[i], label) or WHOLE, *where)
        self.moves += self.inner(event, sig, label)
        self.make(event, sig, label, read)

    def make(self, event: Compute, sig: Signature, label: Label | None, read: list[int]) -> None:
        """The states of the results of an op that runs under a label."""
        done = label is not None and label[0] in sig.inner and sig.inner[label[0]][2]
        for j, (o, cells) in enumerate(zip(event.outs, sig.outs, strict=True)):
            fed = label is not None and any(self.place(sig, sig.ins[i], label) for i in read if (i, j) not in sig.independent)
            self.states[o] = self.place(sig, cells, label) or (PARTIAL if fed and not done else WHOLE)
            number = j if event.op in APART else sig.index
            if number >= 0 and label is not None and self.states[o] == PARTIAL:
                self.owner[o] = (sig.dims[label[0]], number)

    def alone(self, event: Compute, sig: Signature, read: list[int], partial: list[int]) -> bool:
        """In a loop over samples each value lives on one rank alone: it passes any op, and a join of all is split again.

        Only where gradients stay Partial: a rank of a data axis loops over its own samples.
        """
        owners = [self.owner.get(event.ins[i]) for i in partial]
        if self.how["gradients"] or None in owners or not all(WHOLE in self.have(event.ins[i]) for i in set(read) - {*partial}):
            return False
        joined = [t for t in self.born(sig) if t]
        if len(set(owners)) == 1 and not joined:
            self.taken.partial = tuple(partial)
            for o in event.outs:
                self.states[o], self.owner[o] = PARTIAL, owners[0]
        elif joined and len(set(owners)) == len(partial) == len(read):
            self.taken.label = joined[0]
            for o, cells in zip(event.outs, sig.outs, strict=True):
                self.states[o] = self.place(sig, cells, joined[0]) or WHOLE
        else:
            return False
        return True

    def choose(self, event: Compute, sig: Signature, read: list[int], partial: list[int]) -> Label | None:
        offers: list[Label | None] = []
        for i in read or sorted(sig.unread):
            at = self.states[event.ins[i]]
            spots = self.spots[event.ins[i]] if i in partial else [at] if isinstance(at, tuple) else []
            offers += [self.find(sig, sig.ins[i], x) for x in spots]
        if not any(offers):
            offers = self.born(sig)
        legal = [t for t in dict.fromkeys(offers) if t and t[0] not in sig.whole]
        if not legal:
            return None

        def price(t: Label | None) -> float:
            moved = sum(self.cost(event.ins[i], self.place(sig, sig.ins[i], t) or WHOLE) for i in read)
            return moved + 2 * sum(m.nbytes for m in self.inner(event, sig, t))

        return min([*legal, None], key=price)

    def born(self, sig: Signature) -> list[Label | None]:
        """Labels of the outputs only: a dim born here may be born split."""
        if not any(a in self.atoms for d in sig.dims.values() for a in d):
            return []
        carried = {k for cells in sig.ins for c in cells for k in c}
        fresh = [k for cells in sig.outs for c in cells for k in c if k not in carried and k not in sig.parts]
        return [(k, i) for k in fresh for i, a in enumerate(sig.dims[k]) if a in self.atoms]

    def find(self, sig: Signature, cells: list[Cell], at: tuple[int, int]) -> Label | None:
        """The label, and which of its atoms, that a split position is; a summand stands for the whole sum at its first atom."""
        k = at[1]
        for label in cells[at[0]]:
            if k < len(sig.dims[label]):
                if label not in sig.parts:
                    return label, k
                return (sig.parts[label], 0) if k == 0 and sig.dims["big"][0] in self.atoms else None
            k -= len(sig.dims[label])
        return None

    def place(self, sig: Signature, cells: list[Cell], t: Label | None) -> tuple[int, int] | None:
        """Where a label stands among the cells of a tensor."""
        if t is None:
            return None
        for d, cell in enumerate(cells):
            k = t[1]
            for label in cell:
                if t[0] == label or (sig.parts.get(label) == t[0] and sig.dims[label]):  # a summand of size 1 has no part
                    return d, k
                k += len(sig.dims[label])
        return None

    def travels(self, event: Compute, sig: Signature, read: list[int], partial: list[int]) -> bool:
        """May partial sums pass unrepaired? Only where no bytes are added and one rank can add what is whole."""
        if sig.linear == "no" or event.op in ("expand", "repeat"):
            return False
        if sig.linear == "pass":
            return True
        rest = [i for i in read if i not in partial]
        if not all(WHOLE in self.have(event.ins[i]) for i in rest):
            return False
        shape = [self.tensors[v].shape for v in event.ins]
        if sig.linear == "mul":
            scaled = len(partial) == 1 and (event.op[:3] == "mul" or partial == [0])
            return scaled and (all(math.prod(shape[i]) == 1 for i in rest) or self.of_parameters(event, partial[0]))
        return {
            "first": partial == [0],
            "last": partial == read[-1:],
            "add": all(shape[i] == self.tensors[event.outs[0]].shape for i in partial),
        }[sig.linear]

    def of_parameters(self, event: Compute, at: int) -> bool:
        """Is a Partial factor the size of a parameter, and gradients stay Partial? Then it is summed with the gradient."""
        if self.how["gradients"]:
            return False
        t = self.tensors[event.ins[at]]
        return t.shape == self.tensors[event.outs[0]].shape and not any(self.fed & set(d) for d in t.dims)

    def inner(self, event: Compute, sig: Signature, t: Label | None) -> list[Move]:
        """The exchanges of an op that runs along a split dim."""
        if t is None or t[0] not in sig.inner:
            return []
        times, values, _ = sig.inner[t[0]]
        carried = [i for i, c in enumerate(sig.ins) if self.place(sig, c, t)]
        i = max(carried, key=lambda i: self.nbytes(event.ins[i]))
        v, gone = event.ins[i], set(sig.inner)
        keeps = tuple(d for d, cell in enumerate(sig.ins[i]) if not gone & set(cell))
        dtype = "float32" if self.tensors[v].dtype in HALF else self.tensors[v].dtype
        local = self.program.local_shape(v)
        size = values * math.prod(local[d] for d in keeps) * WIDTH[dtype]
        move = Move(self.at, "all_reduce", v, size, dtype, event.phase, event.module, True, keeps, values)  # noqa: FBT003
        return [move] * times


def _layout(state: State) -> Split | Partial | None:
    if isinstance(state, tuple):
        return Split(*state)
    return Partial() if state == PARTIAL else None
