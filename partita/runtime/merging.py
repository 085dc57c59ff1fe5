"""Scripts along several axes made one: each call changed along all of them at once.

    axis x   sum x, then F.linear          edges one after another, values made whole first
    axis y   enter, then F.linear          sizes divided along both
    x and y  sum x, enter y, then F.linear

What is another call along one axis (a kernel), or draws, must be as it is along the others.
"""

from collections.abc import Sequence
from typing import Any

from partita.errors import Refused
from partita.program import Program
from partita.runtime.calls import Call, Heard
from partita.runtime.literals import Run
from partita.runtime.steps import Edge, Script, Step, let_go, not_splittable


def merged(scripts: Sequence[Script], heard: Heard, program: Program) -> Script:
    """One script of a rank's calls from its scripts along each axis.

    Raises:
        Refused: P116, with every module whose calls cannot be changed along several axes at once.
    """
    merging = _Merging(program)
    steps = [merging.step(some, call) for call, *some in zip(heard.calls, *(s.steps for s in scripts), strict=True)]
    if merging.bad:
        raise Refused(*(not_splittable(module, [why], axis) for module, (why, axis) in merging.bad.items()))
    late: dict[str, tuple[str, ...]] = {}
    for script in scripts:
        late |= script.late
    return Script(let_go(steps), late)


class _Merging:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.bad: dict[str, tuple[str, str]] = {}  # module -> why, and along which axis
        self.before: dict[tuple[str, int], frozenset[tuple[str, int]]] = {}  # change kept -> changes of other axes before it

    def step(self, some: Sequence[Step], call: Call) -> Step:
        """One call, changed along every axis."""
        first = some[0]
        edges = sorted((edge for step in some for edge in step.edges), key=lambda e: e.kind != "sum")
        self._check_kept(edges, call)
        runs = [step for step in some if step.run is not None]
        if len(runs) > 1 and any(step.alone for step in runs):
            axes = " and ".join(sorted({e.axis for step in runs for e in step.edges}) or ["several axes"])
            self.bad.setdefault(call.module, (f"{call.name} is another call along {axes}", edges[0].axis if edges else ""))
        run = None
        for step in runs:
            run = step.run if run is None else _around(step.run, run)
        shapes = tuple(self._shape(v, parts) for v, *parts in zip(call.outs, *(step.shapes for step in some), strict=True))
        summed = tuple(axis for step in some for axis in step.summed)
        return first._replace(edges=tuple(edges), run=run, summed=summed, alone=any(s.alone for s in runs), shapes=shapes)

    def _shape(self, v: int, parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of this rank's part, from the shapes along each axis."""
        if v < 0:
            return ()
        shape = list(self.program.tensors[v].shape)
        for part in parts:
            shape = [n * p // w if w else 0 for n, p, w in zip(shape, part, self.program.tensors[v].shape, strict=True)]
        return tuple(shape)

    def _check_kept(self, edges: Sequence[Edge], call: Call) -> None:
        """A change that is kept for later calls must later meet the value changed as it was along the other axes."""
        for edge in edges:
            mine = [e for e in edges if e.path == edge.path]
            before = frozenset(e.key for e in mine[: mine.index(edge)])
            if self.before.setdefault(edge.key, before) != before:
                self.bad.setdefault(call.module, (f"{call.name} reads one value changed in two ways", edge.axis))


def _around(outer: Run | None, inner: Run | None) -> Run:
    """One form around another."""
    assert outer is not None
    assert inner is not None

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        return outer(lambda *a, **k: inner(func, a, k), args, kwargs)

    return run
