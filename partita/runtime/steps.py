"""What each captured call becomes on one rank of a split.

One invariant stands in for the whole backward pass: whole and Partial values have whole gradients, split values split ones. So
four changes of an argument are enough:

    sum      a Partial value is made whole: all_reduce in the forward pass, once per value
    enter    a whole value goes into a split region: its gradients are summed, all_reduce in the backward pass, once per value
    one      what is whole is added to a summand by one rank: zero on the others, the gradient untouched
    slice    a constant is cut to this rank's part

A whole *parameter* read in split regions is not entered: its gradient stays a summand and is summed once a step.
What cannot be run so is refused by module, and the moves of the steps must be those of the derivation.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from partita.errors import Fault, Refused
from partita.program import Compute, Kind, Partial, Phase, Program, Signature, Split
from partita.program.split import Derivation, Label, Taken
from partita.program.tensor import BLOCKWISE, RECOMPUTED, cannot_split, recomputed
from partita.runtime.calls import SIZES, Call, Heard, Path, writes
from partita.runtime.forms import Forms, Reduce
from partita.runtime.grid import Plane
from partita.runtime.layouts import ALIKE, ONE, Born, Layouts, made, spot, word
from partita.runtime.literals import NoRule, Run
from partita.runtime.random import Part, Stream

# Contractions whose local value is a summand of the whole one.
SUMMED = {"mean", "mm", "addmm", "bmm", "baddbmm", "mv", "dot", "sum", "convolution"}
ADDED = {"addmm": 0, "baddbmm": 0, "convolution": 2}  # op -> the input that is added to its product
SHOWN = 4  # reasons per module in a message


class Edge(NamedTuple):
    """A change of the argument at `path`: a new one, or (`again`) the one already made for this value.

    `last`: no later call reads it, so nothing keeps it. `axis`: along which.
    """

    path: Path
    kind: str
    value: int
    again: bool
    part: Part | None = None
    layout: Split | None = None
    last: bool = False
    axis: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """What it is known by while calls run."""
        return f"{self.kind} {self.axis}", self.value


class Step(NamedTuple):
    """A call on this rank.

    `summed`: along these axes its result is a Partial value, to be made whole at once. `alone`: its `run` is another call than
    `func`, or draws. `shapes`: of its results, local, as captured. `graded`: gradients were enabled in capture; where they were
    not, a value may be made whole that is read again where they are. `reads`: where its parameters stand among the arguments,
    and their names.
    """

    func: Callable[..., Any]
    module: str
    edges: tuple[Edge, ...] = ()
    run: Run | None = None
    summed: tuple[str, ...] = ()
    alone: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()
    graded: bool = True
    reads: tuple[tuple[Path, str], ...] = ()


@dataclass(frozen=True)
class Script:
    """All steps of a forward pass and loss, and per axis the parameters whose gradients are summed once a step, in order.

    `calls`: what they were captured from, one each.
    """

    steps: tuple[Step, ...]
    late: Mapping[str, tuple[str, ...]]
    calls: tuple[Call, ...] = ()


def write(
    program: Program,
    heard: Heard,
    derivation: Derivation,
    coordinate: int,
    reduce: Reduce,
    stream: Stream | None = None,
    plane: Plane | None = None,
) -> Script:
    """The script of one rank.

    Args:
        program: Flat, as captured with the calls, before it is rewritten for this axis.
        heard: The calls.
        derivation: Of `program` along the axis.
        coordinate: Of this rank on the axis.
        reduce: The axis's all_reduce.
        stream: Serves dropout; None if there is none.
        plane: Of products in blocks; None if there is none.

    Raises:
        Refused: P116, with every module that cannot run on shards.
    """
    layouts = Layouts(program, derivation, coordinate)
    return _Scribe(layouts, heard, Forms(layouts, reduce, stream, plane)).script()


@dataclass
class _Scribe:
    layouts: Layouts
    heard: Heard
    forms: Forms
    bad: list[tuple[str, str]] = field(default_factory=list)  # (module, why)
    summed: set[int] = field(default_factory=set)  # values made whole
    stored: set[tuple[str, int]] = field(default_factory=set)  # changes made so far
    reads: dict[int, set[str]] = field(default_factory=dict)  # whole parameter -> how it is read
    forward: list[tuple[int, str]] = field(default_factory=list)  # what the steps move, in order: (bytes, dtype)
    within: list[tuple[int, str]] = field(default_factory=list)  # what kernels move backward that capture saw taken apart

    def script(self) -> Script:
        self.tensors, self.born, self.same = self.layouts.program.tensors, self.layouts.born, self.layouts.same
        self.early = self._early()
        steps = let_go([self._step(call) for call in self.heard.calls])
        self._check_outside()
        self._check_recomputed()
        late = self._check_said()
        if self.bad:
            raise Refused(*_faults(self.bad, self.layouts.derivation.axis))
        return Script(steps, {self.axis: late} if late else {})

    @property
    def axis(self) -> str:
        return self.layouts.derivation.axis

    def _refuse(self, module: str, why: str) -> None:
        self.bad.append((module, why))

    def _early(self) -> set[int]:
        """Partial values read as whole through several views: they are summed where they are made.

        Otherwise a value is summed where it is first read as whole, as the rule says.
        """
        found: dict[int, list[set[int] | None]] = {}
        for call in self.heard.calls:
            for n in call.events:
                event, taken = self.layouts.compute(n), self.layouts.taken(n)
                for j, v in enumerate(event.ins if event and event.op not in ALIKE else ()):
                    if isinstance(self.born.get(v), Partial):
                        args = {u for u in call.ins if u >= 0 and self.same[u] == self.same[v]}
                        found.setdefault(self.same[v], []).append(None if j in taken.partial or not args else args)
        early = set()
        for root, reads in found.items():
            whole = [args for args in reads if args is not None]
            if len(whole) == len(reads) and len(set().union(*whole)) > 1:
                early.add(root)
        for v in [v for v in self.born if self.same[v] in early]:
            del self.born[v]
        return early

    # ---- one call
    def _step(self, call: Call) -> Step:
        self.call = call
        self.made = {o: e for n in call.events if (e := self.layouts.compute(n)) for o in e.outs}
        self.edges = [
            Edge(path, "sum", v, again=True, axis=self.axis)
            for path, v in zip(call.paths, call.ins, strict=True)
            if v in self.summed
        ]
        self.after = self._made_early()
        covered = self.forms.covers(call)
        for n in () if covered else call.events:
            if event := self.layouts.compute(n):
                self._event(event, self.layouts.taken(n))
        self._check_writes()
        if not covered:
            self._verify()
        if not self.layouts.coordinate:
            self.edges = [e for e in self.edges if e.kind != ONE]
        run = None
        try:
            run = self.forms.form(call)
            self.forward += self.forms.moved
            self.within += self.forms.moved if covered else []  # and as much again backward
        except NoRule as error:
            self._refuse(call.module, str(error))
        if self.after:
            self.forward.append(self.layouts.payload(call.outs[0]))
        shapes = tuple(self.layouts.local(v) for v in call.outs)
        parameters = [(p, self.tensors[v]) for p, v in zip(call.paths, call.ins, strict=True) if v >= 0]
        reads = tuple((p, t.name) for p, t in parameters if t.kind == Kind.PARAMETER)
        summed, alone = (self.axis,) if self.after else (), run is not None and self.forms.alone
        return Step(call.func, call.module, tuple(self.edges), run, summed, alone, shapes, call.graded, reads)

    def _made_early(self) -> bool:
        views = {self.same[v] for v in self.call.ins if v >= 0}
        found = any(self.same[v] in self.early - views for v in self.call.outs if v >= 0)
        if found and len(self.call.outs) > 1:
            self._refuse(self.call.module, f"{self.call.name} has several results, one of them a summand")
        return found

    def _check_writes(self) -> None:
        call = self.call
        touched = call.hidden and call.func not in SIZES and any(map(self.layouts.touched, call.events))
        if touched and (self.edges or not self._pointwise(call.module)):
            self._refuse(call.module, f"{call.name} runs on split values inside a custom autograd function")
        if self.edges and writes(call.func) and any(e.path[:2] == (0, 0) for e in self.edges):
            self._refuse(call.module, f"{call.name} writes in place to a value that must move first")

    def _pointwise(self, module: str) -> bool:
        """Whether all a module does, backward too, is the same on a part: then nobody need see what a custom function does."""
        inside = [e for _, e in self.layouts.events if isinstance(e, Compute) and e.module == module]
        return all(e.op == "detach" or (not e.view and e.signature is not None and _aligned(e.signature)) for e in inside)

    def _event(self, event: Compute, taken: Taken) -> None:
        sig = event.signature
        for v, have, need in taken.moved:
            if self.same[v] not in self.early:
                self._move(event, v, have, need)
        if sig is None or sig.creates:
            return
        if taken.product:
            return  # its factors are blocks, and it moves what it needs of them itself
        if taken.partial:
            self._travelled(event, sig, taken)
        elif taken.label is not None:
            self._split(event, sig, taken.label)
        else:
            for v in event.ins:
                self._read(v, "whole")

    def _move(self, event: Compute, v: int, have: Iterable[Born], need: Born) -> None:
        tensor = self.tensors[v]
        if v in event.outs:
            self.after = self.call.outs == (v,) and need is None
            if not self.after:
                self._refuse(event.module, f"{event.op} makes a loss inside {self.call.name}")
        elif need is None and any(isinstance(x, Partial) for x in have):
            self._put("sum", v, event)
        elif isinstance(need, Split) and None in have and tensor.kind != Kind.PARAMETER and "batch_norm" not in event.op:
            self._put("slice", v, event, need)
        else:
            names = " or ".join(sorted({word(x) for x in have}))
            self._refuse(event.module, f"{event.op} would move a {names} value of shape {tensor.shape} to be {word(need)}")

    def _travelled(self, event: Compute, sig: Signature, taken: Taken) -> None:
        """Partial values went through unrepaired."""
        for j, v in enumerate(event.ins):
            if j not in taken.partial and j not in sig.unread:
                self._put(ONE if sig.linear == "add" else "enter", v, event)

    def _split(self, event: Compute, sig: Signature, label: Label) -> None:
        """The op runs on a part of a label."""
        carried = any(spot(sig, cells, label) for cells in sig.outs)
        for j, v in enumerate(event.ins):
            if j in sig.unread or spot(sig, sig.ins[j], label):
                continue
            if carried:
                self._put("enter", v, event)
            elif ADDED.get(event.op) == j:
                self._put(ONE, v, event)
            elif any(self.call.needs[a] for a in self._sources(v)):
                self._refuse(event.module, f"{event.op} contracts a split dim with something whole")
        along = label[0] in sig.inner or not (carried or event.op in SUMMED)
        grouped = event.op == "convolution" and label[0] == "g"
        if grouped or (along and not self.forms.has_kernel(self.call, event.op)):
            self._refuse(event.module, f"{event.op} runs along a split dim")

    # ---- edges
    def _sources(self, v: int) -> list[int]:
        """Which arguments of the call a value inside it comes from."""
        ins = self.call.ins
        if v in ins:
            return [j for j, u in enumerate(ins) if u == v]
        if views := [j for j, u in enumerate(ins) if u >= 0 and self.same[u] == self.same[v]]:
            return views
        event = self.made.get(v)
        return sorted({j for u in event.ins for j in self._sources(u)}) if event else []

    def _put(self, kind: str, v: int, event: Compute, need: Split | None = None) -> None:
        if 0 in self.tensors[v].shape:
            return
        args = self._sources(v)
        same = all(self.same[self.call.ins[a]] == self.same[v] for a in args)
        copied = kind == "sum" and len(args) == 1 and self.layouts.payload(self.call.ins[args[0]]) == self.layouts.payload(v)
        if kind != "enter" and (not args or not (same or copied)):
            self._refuse(event.module, f"{event.op} needs {kind!r} inside {self.call.name}")
            return
        for a in args:
            self._edge(kind, a, event, need, same=same)

    def _edge(self, kind: str, arg: int, event: Compute, need: Split | None, *, same: bool) -> None:
        v, path = self.call.ins[arg], self.call.paths[arg]
        self._read(v, "split" if kind == "enter" else "whole")
        if v < 0 or any(e.path == path and e.kind == kind for e in self.edges):
            return
        graded = self.call.needs[arg] and self.call.graded
        if kind == "enter" and (not graded or self.tensors[v].kind == Kind.PARAMETER):
            return
        if kind == "slice" and graded:
            self._refuse(event.module, f"{event.op} needs a part of a whole value that has a gradient")
        again = v in self.summed if kind == "sum" else (kind, v) in self.stored
        if kind == "sum" and not again:
            self.summed |= {v} if same else set()  # a copy made inside the call was summed: the value itself stays as it is
            self.forward.append(self.layouts.payload(v))
        self.stored.add((kind, v))
        part = self.layouts.part(v, need) if need is not None else None
        self.edges.append(Edge(path, kind, v, again, part, need, axis=self.axis))

    def _read(self, v: int, how: str) -> None:
        root = self.same[v] if v >= 0 else -1
        if root >= 0 and self.tensors[root].kind == Kind.PARAMETER and root not in self.layouts.derivation.layouts:
            self.reads.setdefault(root, set()).add(how)

    # ---- is every event given what it needs?
    def _verify(self) -> None:
        """Follow the layouts through the events of the call, from its changed arguments to its results."""
        call = self.call
        state: dict[int, Born | str] = {}
        for path, v in zip(call.paths, call.ins, strict=True):
            now: Born | str = self.born.get(v)
            for edge in (e for e in self.edges if e.path == path):
                now = {"sum": None, "enter": None, ONE: ONE, "slice": edge.layout}[edge.kind]
            if state.setdefault(v, now) != now:
                self._refuse(call.module, f"{call.name} reads one value in two ways")
        for n in call.events:
            event = self.layouts.compute(n)
            if event and event.signature is not None and not event.signature.creates:
                self._follow(event, event.signature, self.layouts.taken(n), state)
        for o in call.outs:
            same = o in call.ins and o in self.summed  # the call gave back its argument, which is whole by now
            if o in state and not self.after and not same and state[o] != self.born.get(o):
                self._refuse(call.module, f"the result of {call.name} is {word(state[o])}, not {word(self.born.get(o))}")

    def _follow(self, event: Compute, sig: Signature, taken: Taken, state: dict[int, Born | str]) -> None:
        carried = any(spot(sig, cells, taken.label) for cells in sig.outs)
        before = bool(taken.partial) and all(state.get(event.ins[j]) is None for j in taken.partial)  # summed on the way in
        for j, v in enumerate(event.ins):
            if j in sig.unread or 0 in self.tensors[v].shape:
                continue
            now = state.get(v)
            if taken.product:
                fits = now == self.born.get(v)
            elif taken.partial and not before:
                fits = isinstance(now, Partial) if j in taken.partial else now == (ONE if sig.linear == "add" else None)
            elif taken.partial:
                fits = now is None
            else:
                added = taken.label is not None and not carried and ADDED.get(event.op) == j
                fits = now == (ONE if added else spot(sig, sig.ins[j], taken.label))
            if not fits:
                self._refuse(event.module, f"{event.op} would read a value that is {word(now)}")
        for j, o in enumerate(event.outs):
            state[o] = None if before else made(event, taken, j)

    # ---- is it all there, and is it what was said?
    def _check_outside(self) -> None:
        """Ops outside the calls that count must be whole."""
        listed = set(self.heard.free).union(*(call.events for call in self.heard.calls))
        for n in range(max(listed, default=-1) + 1):
            event = self.layouts.compute(n)
            if event and n in self.heard.free:
                split = any(self.born.get(v) is not None for v in (*event.ins, *event.outs))
                if split or self.layouts.touched(n):
                    self._refuse(event.module, f"{event.op} is split but reads nothing that descends from a parameter")
            elif event and n not in listed:
                self._refuse(event.module, f"{event.op} runs outside every torch function")
        if self.layouts.derivation.layouts.get(self.layouts.program.loss) is not None:
            self._refuse("", "the loss is not whole")

    def _check_recomputed(self) -> None:
        """Recomputation runs outside the mode: no call that is changed may be among what is computed again."""
        for module in recomputed(self.layouts.program, self.layouts.derivation):
            self._refuse(module, RECOMPUTED)

    def _check_said(self) -> tuple[str, ...]:
        """The moves of the steps must be those of the derivation; returns the parameters summed late."""
        said: dict[Phase, list[tuple[int, str]]] = {p: [] for p in Phase}
        late = []
        for m in self.layouts.derivation.moves:
            if m.axis or m.op in BLOCKWISE or (m.inner and m.phase == Phase.BACKWARD):
                continue  # what kernels send by themselves; gradients that another axis sums
            said[m.phase].append((m.nbytes, m.dtype))
            late += [m.module] if m.phase == Phase.SYNC else []
            if m.op != "all_reduce":
                self._refuse(m.module, f"{m.op} of {m.nbytes} bytes of shape {self.tensors[m.tensor].shape}")
        for w, how in self.reads.items():
            name = self.tensors[w].name
            if w in self.layouts.program.gradients and (("split" in how) != (name in late) or len(how) > 1):
                self._refuse(name, "this parameter is read both by split and by whole calls")
        back = sorted([*(self.layouts.payload(v) for kind, v in self.stored if kind == "enter"), *self.within])
        for phase, moved, expected in (
            ("forward", self.forward, said[Phase.FORWARD]),
            ("backward", back, sorted(said[Phase.BACKWARD])),
        ):
            if not self.bad and moved != expected:
                self._refuse("", f"its {phase} calls would move {moved}, said is {expected}")
        return tuple(late)


def let_go(steps: Iterable[Step]) -> tuple[Step, ...]:
    """The steps with the last use of every change marked: what is kept for longer than that would live to the loss."""
    found, later = [], set()
    for step in reversed(list(steps)):
        edges = []
        for edge in reversed(step.edges):
            edges.append(edge._replace(last=edge.key not in later))
            later.add(edge.key)
        found.append(step._replace(edges=tuple(reversed(edges))))
    return tuple(reversed(found))


def _aligned(sig: Signature) -> bool:
    """Nothing is contracted and nothing made: every label of an input is one of every output."""
    ins, outs = (
        [{k for cell in cells for k in cell} for cells in sig.ins],
        [{k for cell in cells for k in cell} for cells in sig.outs],
    )
    return not sig.inner and not sig.whole and not sig.parts and all(i <= o for i in ins for o in outs)


def _faults(bad: list[tuple[str, str]], axis: str) -> list[Fault]:
    found: dict[str, list[str]] = {}
    for module, why in dict.fromkeys(bad):
        found.setdefault(module, []).append(why)
    return [not_splittable(module, reasons, axis) for module, reasons in found.items()]


def not_splittable(module: str, reasons: list[str], axis: str) -> Fault:
    """P116 for one module."""
    more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return cannot_split(module, "; ".join(reasons[:SHOWN]) + more, axis)
