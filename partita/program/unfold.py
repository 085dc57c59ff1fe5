"""Writes a folded program out again: every copy of the repeated block with tensors of its own."""

import itertools
from dataclasses import replace

from partita.program.blocks import TOGETHER, renumbered, touched
from partita.program.events import Collective, Compute, Event, Phase, Repeat, Tensor
from partita.program.program import Program


def unfold(program: Program) -> Program:
    """The flat program: every copy written out, with tensors of its own."""
    bodies = [s for s in program.segments if s.block]
    if not bodies:
        return program
    return _Unfolding(program, bodies).flat()


class _Unfolding:
    """Copy k of the body is block 1 + k; copy 0 keeps the tensors of the body."""

    def __init__(self, program: Program, bodies: list[Repeat]) -> None:
        self.program, self.block, self.count = program, bodies[0].block, bodies[0].count
        self.prefix = self.block[:-1]
        self.made: dict[int, Phase] = {}  # tensor of the body -> the phase that makes it
        for s in bodies:
            for e in s.events:
                if isinstance(e, Compute):
                    self.made.update(dict.fromkeys(e.outs, TOGETHER.get(e.phase, e.phase)))
        self.named = {t.id for t in program.tensors if t.name.startswith(self.block + ".") and t.id not in self.made}
        self.carried = {a: b for s in bodies for a, b in s.carried}
        own = sorted((*self.made, *self.named))
        total = len(program.tensors)
        self.copy = [{i: i for i in own}]
        self.copy += [{i: total + (k - 1) * len(own) + n for n, i in enumerate(own)} for k in range(1, self.count)]
        self.tensors: list[Tensor] = list(program.tensors)
        for k in range(1, self.count):
            self.tensors += [self._copied(program.tensors[i], k) for i in own]
        self.ends = {i: i if phase == Phase.BACKWARD else self.copy[-1][i] for i, phase in self.made.items()}
        # copy 0 of the body's backward reads the copy before it, not the last block
        self.tensors = [replace(t, root=self._root(t)) if t.id in self.copy[0] else t for t in self.tensors]

    def _copied(self, t: Tensor, k: int) -> Tensor:
        root = self.copy[k].get(t.root, self._neighbour(t.root, k))
        return replace(t, id=self.copy[k][t.id], name=self._renamed(t.name, k), root=root)

    def _root(self, t: Tensor) -> int:
        return t.root if t.root in self.copy[0] else self._neighbour(t.root, 0)

    def _renamed(self, name: str, k: int) -> str:
        return (
            f"{self.prefix}{1 + k}{name[len(self.block) :]}"
            if name == self.block or name.startswith(self.block + ".")
            else name
        )

    def _neighbour(self, tensor: int, k: int) -> int:
        """What copy k reads where the body reads a tensor from outside."""
        inside = self.carried.get(tensor)
        if inside is None:
            return tensor
        backward = self.made.get(inside) == Phase.BACKWARD
        other = k + 1 if backward else k - 1  # backward runs from the last copy to the first
        if not 0 <= other < self.count:
            return tensor
        return self.copy[other][inside]

    def _of_copy(self, e: Event, k: int) -> Event:
        names = {i: self.copy[k].get(i, self._neighbour(i, k)) for i in touched(e)}
        return replace(renumbered(e, names), module=self._renamed(e.module, k))

    def flat(self) -> Program:
        segments: list[Repeat] = []
        for s in self.program.segments:
            if not s.block:
                segments.append(replace(s, events=tuple(renumbered(e, self._outside(e)) for e in s.events)))
                continue
            backward = any(e.phase in (Phase.BACKWARD, Phase.RECOMPUTE) for e in s.events)
            order = range(self.count - 1, -1, -1) if backward else range(self.count)
            segments.append(Repeat(1, tuple(self._of_copy(e, k) for k in order for e in s.events)))
        gradients = {
            (w if k is None else self.copy[k][w]): (g if k is None else self.copy[k][g])
            for w, g in self.program.gradients.items()
            for k in (range(self.count) if w in self.copy[0] else (None,))
        }
        names = self._outside(None)
        tensors = tuple(
            replace(t, root=names.get(t.root, t.root)) if t.id < len(self.program.tensors) and t.id not in self.copy[0] else t
            for t in self.tensors
        )
        flat = replace(self.program, tensors=tensors, segments=_joined(segments), gradients=gradients, runs=self._runs())
        return self._ordered(flat)

    def _runs(self) -> tuple[str, ...]:
        found: list[str] = []
        for own, group in itertools.groupby(self.program.runs, key=lambda p: p == self.block or p.startswith(self.block + ".")):
            paths = list(group)
            found += [self._renamed(p, k) for k in range(self.count) for p in paths] if own else paths
        return tuple(found)

    def _ordered(self, program: Program) -> Program:
        """Tensors numbered as if captured flat: the copies of a run of the body's tensors follow each other."""
        order: list[int] = []
        for own, group in itertools.groupby(range(len(self.program.tensors)), key=self.copy[0].__contains__):
            run = list(group)
            order += [copy[i] for copy in self.copy for i in run] if own else run
        names = {old: new for new, old in enumerate(order)}
        tensors = tuple(
            replace(program.tensors[old], id=new, root=names[program.tensors[old].root]) for old, new in names.items()
        )
        gradients = sorted((names[w], names[g]) for w, g in program.gradients.items())
        segments = tuple(replace(s, events=tuple(renumbered(e, names) for e in s.events)) for s in program.segments)
        return replace(program, tensors=tensors, segments=segments, gradients=dict(gradients), loss=names.get(program.loss, -1))

    def _outside(self, event: Event | None) -> dict[int, int]:
        """What events outside read where they read the body: the last copy's, in backward the first's (it runs last).

        A gather in backward is asked for by the block above, the last one, and so is of the last copy's parameters.
        """
        if isinstance(event, Collective) and event.op == "all_gather" and event.phase == Phase.BACKWARD:
            return self.copy[-1]
        return self.ends


def _joined(segments: list[Repeat]) -> tuple[Repeat, ...]:
    """Neighbouring flat segments as one; apart: the optimizer, what some steps only have, what waits for all before it."""
    events = [(e, (s.when, all(e.phase == Phase.SYNC for e in s.events))) for s in segments for e in s.events]
    step = [(e, kind) for e, kind in events if e.phase != Phase.OPTIMIZER]
    last = [(e, kind) for e, kind in events if e.phase == Phase.OPTIMIZER]
    runs = ((kind, tuple(e for e, _ in run)) for part in (step, last) for kind, run in itertools.groupby(part, lambda x: x[1]))
    return tuple(Repeat(1, run, when=when) for (when, _), run in runs)
