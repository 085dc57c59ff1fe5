"""The same program with another size of a dim class, e.g. another batch: captured small, said large."""

from dataclasses import replace

from partita.program.dims import Dim
from partita.program.events import Compute, Event, Tensor
from partita.program.program import Program


def resized(program: Program, name: str, size: int) -> Program:
    """The program with `size` in place of the size of a dim class.

    Only for a class every op is linear in, as `batch` is: shapes and flop scale, nothing else changes.

    Raises:
        ValueError: If there is no such class, or an op without a rule, whose outputs could not be scaled.
    """
    atoms = program.classes.get(name, frozenset())
    sizes = {program.atoms[a] for a in atoms}
    if len(sizes) != 1 or any(isinstance(e, Compute) and e.signature is None for e in program.events()):
        raise ValueError(f"the size of {name!r} cannot be changed")
    old = sizes.pop()

    def carries(t: Tensor) -> bool:
        return any(a in atoms for d in t.dims for a in d)

    def count(dim: Dim, n: int) -> int:
        for a in dim:
            n = n * size // old if a in atoms else n
        return n

    def tensor(t: Tensor) -> Tensor:
        return replace(t, shape=tuple(map(count, t.dims, t.shape))) if carries(t) else t

    def event(e: Event) -> Event:
        scaled = isinstance(e, Compute) and e.flop and any(carries(program.tensors[i]) for i in (*e.ins, *e.outs))
        return replace(e, flop=e.flop * size // old) if scaled and isinstance(e, Compute) else e

    return replace(
        program,
        atoms={a: size if a in atoms else n for a, n in program.atoms.items()},
        tensors=tuple(map(tensor, program.tensors)),
        segments=tuple(replace(s, events=tuple(map(event, s.events))) for s in program.segments),
    )
