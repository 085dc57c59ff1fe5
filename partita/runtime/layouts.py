"""Which layout each captured tensor has on an axis when it is made; repairs come later, where the rule puts them."""

import math
from dataclasses import dataclass, field, replace

from partita.program import Compute, Event, Kind, Partial, Program, Signature, Split
from partita.program.split import SAME, Derivation, Label, Taken, ranges
from partita.runtime.random import Part

ALIKE = SAME | {"clone"}  # ops whose result is the same value
ONE = "one"  # whole, and added by one rank
Born = Split | Partial | None


@dataclass
class Layouts:
    """The tensors of a flat program along the axis of a derivation.

    Args:
        program: As captured, before it is rewritten for the axis.
        derivation: Of it.
        coordinate: Of this rank on the axis.

    Attributes:
        events: (index in the program, event), numbered as on the tape: without the drops put in later.
        born: Tensor id -> layout when made; absent means whole.
        same: Tensor id -> the first tensor that is the same value.
    """

    program: Program
    derivation: Derivation
    coordinate: int
    events: list[tuple[int, Event]] = field(init=False)
    born: dict[int, Split | Partial] = field(init=False)
    same: list[int] = field(init=False)

    def __post_init__(self) -> None:
        events = enumerate(self.program.events())
        self.events = [(n, e) for n, e in events if not (isinstance(e, Compute) and e.op == "drop")]
        self.same = list(range(len(self.program.tensors)))
        held = self.derivation.layouts
        self.born = {
            t.id: held[t.id] for t in self.program.tensors if t.kind in (Kind.PARAMETER, Kind.INPUT) and t.id in held
        }  # fmt: skip
        for n, e in self.events:
            if isinstance(e, Compute) and e.signature is not None:
                if e.op in ALIKE and e.ins and e.outs:
                    self.same[e.outs[0]] = self.same[e.ins[0]]
                for j, o in enumerate(e.outs):
                    if (layout := made(e, self.derivation.labels[n], j)) is not None:
                        self.born[o] = layout

    @property
    def ranks(self) -> int:
        return self.derivation.size

    def taken(self, number: int) -> Taken:
        """What was decided at event `number` of the tape."""
        return self.derivation.labels[self.events[number][0]]

    def compute(self, number: int) -> Compute | None:
        """Event `number` of the tape, if it computes."""
        event = self.events[number][1]
        return event if isinstance(event, Compute) else None

    def touched(self, number: int) -> bool:
        """Whether anything at an event is not as on one device."""
        taken = self.taken(number)
        return bool(taken.label or taken.partial or taken.moved)

    def dim(self, v: int) -> int | None:
        """The split dim of a tensor, if it has one."""
        layout = self.born.get(v)
        return layout.dim if isinstance(layout, Split) else None

    def local(self, v: int) -> tuple[int, ...]:
        """Shape of this rank's part."""
        if v < 0:
            return ()
        shape = list(self.program.tensors[v].shape)
        if (dim := self.dim(v)) is not None:
            shape[dim] //= self.ranks
        if (block := self.derivation.blocks.get(v)) is not None:
            shape[block.dim] //= self.derivation.ranks
        return tuple(shape)

    def payload(self, v: int) -> tuple[int, str]:
        """Bytes and dtype of a collective that moves a tensor."""
        return self.program.local_bytes(v), self.program.tensors[v].dtype

    def part(self, v: int, layout: Split) -> Part:
        """This rank's part of a tensor that is cut so."""
        return self._part(self.program.tensors[v].shape[layout.dim], self.program.tensors[v].dims, layout)

    def part_of_sample(self, v: int, layout: Split, batch: frozenset[int]) -> Part | None:
        """The part within one sample, where the samples are the outer atoms of the split dim; None if they are not."""
        dim = self.program.tensors[v].dims[layout.dim]
        at = next(k for k, a in enumerate(dim) if a in batch) + 1
        if at > layout.atom:
            return None
        inner = dim[at:]
        size = math.prod(self.program.atoms[a] for a in inner)
        return replace(self._part(size, (inner,), Split(0, layout.atom - at)), dim=layout.dim)

    def _part(self, size: int, dims: tuple[tuple[int, ...], ...], layout: Split) -> Part:
        axis = self.derivation.axis
        some = replace(self.program.tensors[0], id=0, dims=dims, layouts={axis: layout})
        alone = replace(self.program, tensors=(some,), axes={axis: self.ranks})
        dim, spans = ranges(alone, 0, axis, self.coordinate)
        return Part(dim, size, spans)


def spot(sig: Signature, cells: list[tuple[str, ...]], label: Label | None) -> Split | None:
    """Where a label stands among the cells of a tensor."""
    if label is None:
        return None
    for d, cell in enumerate(cells):
        k = label[1]
        for name in cell:
            if label[0] in (name, sig.parts.get(name)):
                return Split(d, k)
            k += len(sig.dims[name])
    return None


def made(event: Compute, taken: Taken, out: int) -> Born:
    """The layout of result number `out` of an event."""
    sig = event.signature
    if sig is None or sig.creates:
        return None
    if taken.partial:
        return Partial()
    if taken.label is None:
        return None
    if found := spot(sig, sig.outs[out], taken.label):
        return found
    read = [i for i in range(len(event.ins)) if i not in sig.unread and (i, out) not in sig.independent]
    fed = any(spot(sig, sig.ins[i], taken.label) for i in read)
    done = taken.label[0] in sig.inner and sig.inner[taken.label[0]][2]
    return Partial() if fed and not done else None


def word(layout: "Born | str") -> str:
    """A layout in a message."""
    if layout == ONE:
        return "added by one rank"
    if isinstance(layout, Split):
        return f"split (dim {layout.dim})"
    return "whole" if layout is None else "Partial"
