"""Recomputation as it is said: forward events said once more, just before the backward events that read what they make.

    kept          x | a b c d ...                    ... d' reads c | c' reads b | b' reads a | a' reads x
    recomputed    x | a b c d ...      a b c again   ... d' reads c | c' reads b | b' reads a | a' reads x

What a region made dies after the forward pass, for backward reads the fresh tensors. It is repeated up to the last op that
saves something for backward and no further: a product saves its inputs, so the last one of a block, and the sum over ranks
behind it, are not computed twice. Each call of a module is a region of its own.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from partita.program.blocks import inside, renumbered, touched
from partita.program.dims import Signature, identity
from partita.program.events import Collective, Compute, Event, Kind, Phase, Tensor
from partita.program.program import Program

DROP = "drop"  # says that a storage goes, and computes nothing


def blocks_of(program: Program) -> list[str]:
    """Paths of the repeated blocks: up to the first number in a path, and the numbers that follow it.

    ``blocks.3.mlp.up`` is of ``blocks.3``, ``layer1.0.conv1`` of ``layer1.0``, ``stages.1.2.norm`` of ``stages.1.2``.
    """
    return [block for block in dict.fromkeys(_block_of(e.module) for e in _forward(program)) if block]


def _block_of(path: str) -> str:
    parts = path.split(".")
    first = next((n for n, part in enumerate(parts) if part.isdigit()), len(parts))
    numbers = list(itertools.takewhile(str.isdigit, parts[first:]))
    return ".".join(parts[: first + len(numbers)]) if numbers else ""


def modules_of(program: Program, globs: Iterable[str]) -> list[str]:
    """Outermost paths of modules that compute in the forward pass and fit one of the globs."""
    globs = list(globs)
    parts = [path.split(".") for path in dict.fromkeys(e.module for e in _forward(program)) if path]
    paths = dict.fromkeys(".".join(p[:n]) for p in parts for n in range(1, len(p) + 1))
    found = [path for path in paths if any(fnmatchcase(path, glob) for glob in globs)]
    return [path for path in found if not any(inside(other, path) for other in found if other != path)]


def _forward(program: Program) -> Iterator[Event]:
    return (e for e in program.events() if e.phase == Phase.FORWARD)


def kept_by(event: Event, keep: Iterable[str]) -> bool:
    """Whether the results of an event are kept."""
    return isinstance(event, Compute) and not event.view and any(fnmatchcase(event.op, glob) for glob in keep)


def say_recompute(program: Program, paths: Iterable[str], keep: Sequence[str] = ()) -> Program:
    """The program that recomputes what some modules made.

    Args:
        program: Flat or folded, under any axes.
        paths: Of modules; "" is the whole model, its loss left out. None lies inside another.
        keep: Globs of the ops whose results are kept all the same.
    """
    return _Saying(program, keep).of(paths)


@dataclass
class _Saying:
    """What stands before and after each event, and which tensors it reads instead."""

    program: Program
    keep: Sequence[str]

    def of(self, paths: Iterable[str]) -> Program:
        self.events = list(self.program.events())
        self.tensors = list(self.program.tensors)
        self.before: dict[int, list[Event]] = {}
        self.after: dict[int, list[Event]] = {}
        self.names: dict[int, dict[int, int]] = {}
        for path in paths:
            back = [n for n, e in enumerate(self.events) if e.phase == Phase.BACKWARD and inside(path, e.module)]
            for run in _runs(self.events, path, self.program.calls.get(path, 1)):
                self._say(run, back)
        return replace(self.program, tensors=tuple(self.tensors), segments=self._segments())

    def _say(self, run: list[int], back: list[int]) -> None:
        """One call of a module: `run` are its forward events, `back` the backward events of the module."""
        events = self.events
        made = {i for n in run for i in _outs(events[n])}
        read = {i for n in back if not _drops(events[n]) for i in touched(events[n])}
        readers = [n for n in back if not made.isdisjoint(touched(events[n])) and not _drops(events[n])]
        if not readers:
            return
        made_last = max(k for k, n in enumerate(run) if not read.isdisjoint(_values(events[n])))
        saved_last = max((k for k, n in enumerate(run) if _saves(events[n])), default=0)
        stop = max(made_last + 1, saved_last)  # an op saves what it reads before it runs: it is not repeated for that
        repeated = [n for n in run[:stop] if not kept_by(events[n], self.keep)]
        fresh = self._fresh(i for n in repeated for i in _outs(events[n]))
        self.before.setdefault(readers[0], []).extend(self._again(repeated, fresh))
        saved = read | {self.tensors[i].root for i in read}  # what goes is named by the storage
        for n in back:
            if names := {i: fresh[i] for i in touched(events[n]) if i in fresh and i in saved}:
                self.names.setdefault(n, {}).update(names)
            for t in (self.tensors[i] for i in _outs(events[n])):  # views that backward makes of what was saved
                if t.root in fresh and t.root in saved:
                    self.tensors[t.id] = replace(t, root=fresh[t.root])
        vain = [i for n in run[stop:] if kept_by(events[n], self.keep) for i in _outs(events[n])]  # nothing reads them again
        held = tuple(dict.fromkeys([*self._inputs(repeated, made), *vain]))
        if held:  # they live as long as the region
            self.after.setdefault(readers[-1], []).append(_drop(held, events[readers[-1]].module))

    def _inputs(self, repeated: Sequence[int], made: set[int]) -> Iterator[int]:
        """Storages of what the region reads from outside and the forward pass has made."""
        for n in repeated:
            event = self.events[n]
            for i in event.ins if isinstance(event, Compute) else event.tensors:
                root = self.tensors[i].root
                if i not in made and root not in made and self.tensors[root].kind == Kind.ACTIVATION:
                    yield root

    def _again(self, repeated: Sequence[int], fresh: dict[int, int]) -> Iterator[Event]:
        """The second pass. What enters as a summand is kept as it is and summed into a copy: added to `fresh`."""
        for event in map(self.events.__getitem__, repeated):
            if isinstance(event, Collective) and event.keeps is None:
                for i in (i for i in event.tensors if i not in fresh):
                    t = self.tensors[i]
                    whole = {axis: layout for axis, layout in t.layouts.items() if axis != event.axis}
                    fresh[i] = len(self.tensors)
                    self.tensors.append(replace(t, id=fresh[i], root=fresh[i], kind=Kind.ACTIVATION, name="", layouts=whole))
                    yield Compute("clone", event.module, Phase.RECOMPUTE, (i,), (fresh[i],), 0, identity(t.dims))
            if again := _again(event, fresh):
                yield again

    def _fresh(self, ids: Iterable[int]) -> dict[int, int]:
        """Tensors like the given ones, with their views among themselves."""
        old = list(ids)
        fresh = {i: len(self.tensors) + n for n, i in enumerate(old)}
        self.tensors += [self._like(self.tensors[i], fresh) for i in old]
        return fresh

    def _like(self, t: Tensor, fresh: Mapping[int, int]) -> Tensor:
        return replace(t, id=fresh[t.id], root=fresh.get(t.root, t.root))

    def _segments(self) -> tuple:
        segments, at = [], 0
        for segment in self.program.segments:
            found: list[Event] = []
            for event in segment.events:
                found += self.before.get(at, ())
                found += [renumbered(event, names) if (names := self.names.get(at)) else event, *self.after.get(at, ())]
                at += 1
            segments.append(replace(segment, events=tuple(found)))
        return tuple(segments)


def unclear_calls(program: Program, paths: Iterable[str]) -> list[str]:
    """Modules that are called several times, and whose calls cannot be told apart."""
    events = list(program.events())
    return [p for p in paths if (n := program.calls.get(p, 1)) > 1 and len(_runs(events, p, n)) != n]


def _runs(events: Sequence[Event], path: str, calls: int = 1) -> list[list[int]]:
    """The forward events of each call of a module. Of the whole model: up to the last event inside a module of its own.

    Calls that follow each other without anything between are told apart where all of them are alike.
    """
    forward = [n for n, e in enumerate(events) if e.phase == Phase.FORWARD]
    if not path:
        last = max((n for n in forward if events[n].module), default=-1)
        return [[n for n in forward if n <= last]]
    groups = itertools.groupby(forward, key=lambda n: inside(path, events[n].module))
    found = [list(group) for within, group in groups if within]
    if len(found) != 1 or calls == 1:
        return found
    run = found[0]
    ops = [k for k, n in enumerate(run) if isinstance(events[n], Compute) and not _drops(events[n])]
    size = len(ops) // calls
    names = [(events[run[k]].op, events[run[k]].module) for k in ops]
    if size * calls != len(ops) or names != names[:size] * calls:
        return found
    ends = [ops[(n + 1) * size - 1] + 1 for n in range(calls - 1)] + [len(run)]  # what moves before an op is of its call
    return [run[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _outs(event: Event) -> tuple[int, ...]:
    return event.outs if isinstance(event, Compute) else ()


def _values(event: Event) -> tuple[int, ...]:
    """The tensors that have their value only after the event: what it makes, or makes whole."""
    if isinstance(event, Collective):
        return event.tensors if event.keeps is None else ()
    return event.outs


def _saves(event: Event) -> bool:
    return isinstance(event, Compute) and event.saves


def _drops(event: Event) -> bool:
    return isinstance(event, Compute) and event.op == DROP


def _again(event: Event, fresh: Mapping[int, int]) -> Event | None:
    if isinstance(event, Compute) and event.op == DROP:
        gone = tuple(fresh[i] for i in event.ins if i in fresh)
        return replace(event, ins=gone, phase=Phase.RECOMPUTE) if gone else None
    return replace(renumbered(event, fresh), phase=Phase.RECOMPUTE)


def _drop(tensors: tuple[int, ...], module: str) -> Compute:
    return Compute(DROP, module, Phase.BACKWARD, tensors, (), 0, Signature([], [], creates=True), view=True)
