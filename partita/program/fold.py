"""Repeated layers stored once with a count, and back.

    flat     embed | 0 | 1 | 2 | 3 | 4 | head ... head | 4 | 3 | 2 | 1 | 0 | embed | optimizer: embed 0 1 2 3 4 head
    folded   embed   0 | 1 x 3 | 4   head ... head   4 | 1 x 3 | 0   embed | embed 0 | 1 x 3 | 4 head

Block 1 stands for all middle blocks. Its forward reads what block 0 made and its backward what the last block made; `carried`
says which of its own tensors the other copies read instead. Only isomorphic middle blocks fold: same ops, modules, shapes and
references, a block reading nothing but itself, its neighbours and what all share. Anything else stays flat.
"""

import collections
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from partita.program.blocks import TOGETHER, block_number, renumbered, touched
from partita.program.events import Compute, Event, Kind, Phase, Repeat
from partita.program.program import Program
from partita.program.unfold import unfold

__all__ = ["fold", "stretch", "unfold"]

Key = tuple  # of a tensor inside its block: ("made", phase, event, output) or ("named", kind, rest of its name, version)
Span = tuple[int, int]


def fold(program: Program) -> Program:
    """The program with its middle blocks stored once; itself when there is nothing to fold."""
    events = list(program.events())
    if any(s.count != 1 or s.block for s in program.segments):
        return program
    for prefix in _prefixes(events):
        blocks = _Blocks.of(program, events, prefix)
        if blocks and blocks.alike():
            return blocks.folded()
    return program


def _prefixes(events: Iterable[Event]) -> list[str]:
    """Paths that end before a number, with at least three numbers: most events first."""
    seen: dict[str, set[int]] = collections.defaultdict(set)
    count: collections.Counter[str] = collections.Counter()
    for e in events:
        if found := re.match(r"(.*?)(\d+)(?:\.|$)", e.module):
            seen[found[1]].add(int(found[2]))
            count[found[1]] += 1
    return [p for p, _ in count.most_common() if len(seen[p]) >= 3 and seen[p] == set(range(len(seen[p])))]


def _spans(prefix: str, events: list[Event], n: int) -> dict[Phase, dict[int, Span]] | None:
    """Per phase, where each block's events stand; None if the blocks do not follow each other once, up or down."""
    runs: dict[Phase, list[list[int]]] = collections.defaultdict(list)  # [block, first, last]
    for at, e in enumerate(events):
        block = block_number(prefix, e.module)
        if block is None:
            continue
        run = runs[TOGETHER.get(e.phase, e.phase)]
        if run and run[-1][0] == block:
            run[-1][2] = at
        else:
            run.append([block, at, at])
    found: dict[Phase, dict[int, Span]] = {}
    for phase, run in runs.items():
        order = [b for b, _, _ in run]
        if order not in (list(range(n)), list(reversed(range(n)))):
            return None
        ends = [first for _, first, _ in run[1:]] + [run[-1][2] + 1]
        found[phase] = {b: (first, end) for (b, first, _), end in zip(run, ends, strict=True)}
    return found


@dataclass
class _Blocks:
    """The blocks under one prefix.

    Args:
        owner: Tensor id -> (block, key); absent for what no block owns.
        lookup: (block, key) -> tensor id.
    """

    program: Program
    events: list[Event]
    prefix: str
    count: int
    spans: dict[Phase, dict[int, Span]]
    owner: dict[int, tuple[int, Key]]
    lookup: dict[tuple[int, Key], int]

    @staticmethod
    def of(program: Program, events: list[Event], prefix: str) -> "_Blocks | None":
        count = 1 + max(n for e in events if (n := block_number(prefix, e.module)) is not None)
        spans = _spans(prefix, events, count)
        if not spans or count < 3:
            return None
        owner: dict[int, tuple[int, Key]] = {}
        for phase, found in spans.items():
            for block, (first, end) in found.items():
                for at in range(first, end):
                    e = events[at]
                    for k, i in enumerate(e.outs if isinstance(e, Compute) else ()):
                        owner[i] = (block, ("made", phase, at - first, k))
        seen: collections.Counter[tuple] = collections.Counter()
        for t in program.tensors:
            block = block_number(prefix, t.name)
            if t.id not in owner and block is not None and t.kind != Kind.INPUT:
                rest = t.name[len(f"{prefix}{block}.") :]
                owner[t.id] = (block, ("named", t.kind, rest, seen[block, t.kind, rest]))
                seen[block, t.kind, rest] += 1
        return _Blocks(program, events, prefix, count, spans, owner, {o: i for i, o in owner.items()})

    # ---- is it the same block again?
    def alike(self) -> bool:
        """Are the middle blocks isomorphic, and can their neighbours stand for one another?"""
        described = [self._described(b) for b in range(1, self.count - 1)]
        return described[0] is not None and all(d == described[0] for d in described) and self._closed()

    def _described(self, block: int) -> list[tuple] | None:
        found: list[tuple] = []
        for phase in self.spans:
            for e in self._run(phase, block):
                if not isinstance(e, Compute):
                    return None
                ins = [self._seen(block, i) for i in e.ins]
                if None in ins:
                    return None
                shapes = [
                    (t.shape, t.dtype, t.kind, self._seen(block, t.root)) for t in map(self.program.tensors.__getitem__, e.outs)
                ]
                inside = block_number(self.prefix, e.module) is not None
                rest = e.module[len(f"{self.prefix}{block}") :] if inside else "/" + e.module
                found.append((e.op, rest, e.phase, e.flop, e.view, e.saves, _cells(e), ins, shapes))
        return found

    def _run(self, phase: Phase, block: int) -> list[Event]:
        first, end = self.spans[phase][block]
        return self.events[first:end]

    def _seen(self, block: int, tensor: int) -> tuple | None:
        """A tensor as a block sees it: its own, its neighbour's, or everyone's."""
        other, key = self.owner.get(tensor, (None, tensor))
        if other is None:
            return "shared", key
        return (other - block, key) if abs(other - block) <= 1 else None

    def _closed(self) -> bool:
        """Does nothing that stays refer to a block that goes, except through a neighbour that stays?"""
        kept = self._kept()
        named = {w for w in self.program.gradients if self.owner.get(w, (0, None))[0] in self._gone()}
        outside = [i for at in kept for i in touched(self.events[at]) if i not in named]
        return all(self._stands_for(i) is not None for i in outside) and self._carried() is not None

    def _gone(self) -> range:
        return range(2, self.count - 1)

    def _kept(self) -> list[int]:
        gone = {at for found in self.spans.values() for b in self._gone() for at in range(*found[b])}
        return [at for at in range(len(self.events)) if at not in gone]

    def _stands_for(self, tensor: int) -> int | None:
        """What a tensor of a block that goes is replaced by: block 2 by the last block, block n - 2 by block 1."""
        if tensor not in self.owner or self.owner[tensor][0] not in self._gone():
            return tensor
        block, key = self.owner[tensor]
        if key[0] == "made" and key[1] == Phase.FORWARD:  # read by the last block
            return self.lookup.get((1, key)) if block == self.count - 2 else None
        return self.lookup.get((self.count - 1, key)) if block == 2 else self.lookup.get((1, key))

    def _carried(self) -> list[tuple[int, int]] | None:
        """(outside, inside) for every tensor block 1 reads from a neighbour."""
        pairs: dict[int, int] = {}
        for phase in self.spans:
            for e in self._run(phase, 1):
                for i in touched(e):
                    block, key = self.owner.get(i, (1, ()))
                    if block == 1:
                        continue
                    inside = self.lookup.get((1, key))
                    if inside is None:
                        return None
                    outside = self._stands_for(i)
                    assert outside is not None, "checked by _closed"
                    pairs[outside] = inside
        return list(pairs.items())

    # ---- folding
    def folded(self) -> Program:
        kept = self._kept()
        carried = tuple(self._carried() or ())
        names = {i: self._stands_for(i) for at in kept for i in touched(self.events[at])}
        edges = sorted({at for found in self.spans.values() for at in found[1]} | {0})
        step = next((at for at, e in enumerate(self.events) if e.phase == Phase.OPTIMIZER), None)
        edges = sorted({*edges, *(() if step is None else (step,))})
        bodies = {found[1][0] for found in self.spans.values()}
        segments: list[Repeat] = []
        for at, group in itertools.groupby(kept, key=lambda at: max(e for e in edges if e <= at)):
            run = tuple(renumbered(self.events[i], names) for i in group)
            body = at in bodies
            segments.append(
                Repeat(self.count - 2 if body else 1, run, f"{self.prefix}1" if body else "", carried if body else ())
            )
        tensors = tuple(
            replace(t, root=self._stands_for(t.root)) if t.root in self.owner and self._stands_for(t.root) is not None else t
            for t in self.program.tensors
        )
        return _pruned(replace(self.program, tensors=tensors, segments=tuple(segments)), self.prefix, set(self._gone()))


def _cells(e: Compute) -> object:
    s = e.signature
    if s is None:
        return None
    sizes = sorted((k, len(d)) for k, d in s.dims.items())
    return s.ins, s.outs, sorted(s.whole), sorted(s.inner.items()), s.linear, sizes, s.creates


def _pruned(program: Program, prefix: str, gone: set[int]) -> Program:
    """Without the tensors and atoms nothing refers to any more."""
    used = {i for e in program.events() for i in touched(e)}
    used |= {
        i
        for i, t in enumerate(program.tensors)
        if t.name and block_number(prefix, t.name) not in gone and t.kind != Kind.GRADIENT
    }
    used |= {
        i for pair in program.gradients.items() for i in pair if block_number(prefix, program.tensors[pair[0]].name) not in gone
    }
    used |= {program.tensors[i].root for i in used} | ({program.loss} if program.loss >= 0 else set())
    names = {old: new for new, old in enumerate(sorted(used))}
    tensors = tuple(replace(program.tensors[old], id=new, root=names[program.tensors[old].root]) for old, new in names.items())
    segments = tuple(
        replace(
            s,
            events=tuple(renumbered(e, names) for e in s.events),
            carried=tuple((names[a], names[b]) for a, b in s.carried if a in names and b in names),
        )
        for s in program.segments
    )
    atoms = {a for t in tensors for d in t.dims for a in d}
    atoms |= {
        a
        for s in segments
        for e in s.events
        if isinstance(e, Compute) and e.signature
        for d in e.signature.dims.values()
        for a in d
    }
    sums = {a: parts for a, parts in program.sums.items() if a in atoms}
    atoms |= {a for parts in sums.values() for d in parts for a in d}
    return replace(
        program,
        atoms={a: n for a, n in program.atoms.items() if a in atoms},
        tensors=tensors,
        segments=segments,
        gradients={names[w]: names[g] for w, g in program.gradients.items() if w in names and g in names},
        classes={name: found & atoms for name, found in program.classes.items() if found & atoms},
        sums=sums,
        loss=names.get(program.loss, -1),
        runs=tuple(path for path in program.runs if block_number(prefix, path) not in gone),
    )


# ---- another number of blocks
def stretch(program: Program, count: int) -> Program:
    """A folded program with `count` blocks in all (at least 3)."""
    bodies = [s for s in program.segments if s.block]
    if not bodies:
        raise ValueError("the program is not folded")
    if count < 3:
        raise ValueError(f"{count} blocks: a fold has a first, a middle and a last one")
    prefix = bodies[0].block[:-1]
    old, new = bodies[0].count + 1, count - 1

    def renamed(name: str) -> str:
        return f"{prefix}{new}{name[len(f'{prefix}{old}') :]}" if block_number(prefix, name) == old else name

    segments = tuple(
        replace(
            s, count=count - 2 if s.block else s.count, events=tuple(replace(e, module=renamed(e.module)) for e in s.events)
        )
        for s in program.segments
    )
    tensors = tuple(replace(t, name=renamed(t.name)) if t.name else t for t in program.tensors)
    return replace(program, segments=segments, tensors=tensors, runs=tuple(map(renamed, program.runs)))
