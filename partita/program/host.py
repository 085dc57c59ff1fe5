"""The optimizer in host memory, as it is said.

    device    backward ... g, p ─▶ to_host                                to_device ─▶ p
    host                           g', p' ── exp_avg, exp_avg_sq ── p'

What the optimizer keeps and makes is marked as the host's; how long a copy takes, and whether host and device memory are two at
all, is the cluster's to say.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from partita.program.blocks import renumbered, touched
from partita.program.dims import identity
from partita.program.events import Compute, Event, Kind, Phase, Repeat, Tensor
from partita.program.program import Program

TO_HOST, TO_DEVICE = "to_host", "to_device"
COPIES = (TO_HOST, TO_DEVICE)


def say_offload(program: Program, parameters: Collection[int]) -> Program:
    """The program whose optimizer steps on some parameters in host memory.

    Args:
        program: Flat or folded, under any axes.
        parameters: Ids.
    """
    return _Saying(program, parameters).said()


@dataclass
class _Saying:
    program: Program
    parameters: Collection[int]

    def said(self) -> Program:
        self.tensors = list(self.program.tensors)
        self.moved = {*self.parameters, *(g for w, g in self.program.gradients.items() if w in self.parameters)}
        names = {self.tensors[w].name for w in self.parameters}
        self.kept = [t for t in self.tensors if t.kind == Kind.OPTIMIZER and t.name.rpartition(".")[0] in names]
        for t in self.kept:
            self.tensors[t.id] = replace(t, host=True)
        segments = tuple(map(self._segment, self.program.segments))
        return replace(self.program, tensors=tuple(self.tensors), segments=segments)

    def _segment(self, segment: Repeat) -> Repeat:
        steps = self._steps([e for e in segment.events if isinstance(e, Compute) and e.phase == Phase.OPTIMIZER])
        if not steps:
            return segment
        read = dict.fromkeys(i for e in steps for i in e.ins if i in self.moved)
        twins = {i: self._new(self.tensors[i], host=True) for i in read}
        there = [self._copy(TO_HOST, i, twins[i], _module(steps, i)) for i in read if _reads(steps, i)]
        self._mark(steps, {self.tensors[i].root: twin for i, twin in twins.items()})
        back = [self._back(steps, i, twins[i]) for i in read if i in self.parameters]
        ours = {id(e): renumbered(e, twins) for e in steps}
        events: list[Event] = []
        for e in segment.events:
            events += there if e is steps[0] else []
            events.append(ours.get(id(e), e))
            events += back if e is steps[-1] else []
        return replace(segment, events=tuple(events))

    def _steps(self, events: Sequence[Compute]) -> list[Compute]:
        """The events that work for the parameters: on them, their gradients, their state, or what such events made."""
        roots = {self.tensors[i].root for i in self.moved} | {t.root for t in self.kept}
        found = []
        for e in events:
            if any(self.tensors[i].root in roots for i in touched(e)):
                roots |= {self.tensors[i].root for i in e.outs}
                found.append(e)
        return found

    def _new(self, like: Tensor, *, host: bool, root: int = -1) -> int:
        number = len(self.tensors)
        own = {"kind": Kind.ACTIVATION, "name": "", "root": number if root < 0 else root, "host": host}
        self.tensors.append(replace(like, id=number, **own))
        return number

    def _mark(self, steps: Sequence[Compute], storages: dict[int, int]) -> None:
        """What the steps make is the host's."""
        for e in steps:
            for i in e.outs:
                t = self.tensors[i]
                self.tensors[i] = replace(t, host=True, root=storages.get(t.root, t.root))

    def _back(self, steps: Sequence[Compute], parameter: int, twin: int) -> Compute:
        newest = next((i for e in reversed(steps) for i in e.outs if self.tensors[i].root == twin), twin)
        out = self._new(self.tensors[parameter], host=False, root=self.tensors[parameter].root)
        return self._copy(TO_DEVICE, newest, out, _module(steps, parameter))

    def _copy(self, op: str, source: int, target: int, module: str) -> Compute:
        return Compute(op, module, Phase.OPTIMIZER, (source,), (target,), 0, identity(self.tensors[source].dims))


def _reads(steps: Sequence[Compute], tensor: int) -> bool:
    """Whether a value is looked at; a parameter that a master copy is written to is not."""
    return any(i == tensor and k not in (e.signature.unread if e.signature else ()) for e in steps for k, i in enumerate(e.ins))


def _module(steps: Sequence[Compute], tensor: int) -> str:
    return next(e.module for e in steps if tensor in e.ins)
