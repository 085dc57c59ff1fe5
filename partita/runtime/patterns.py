"""What the op-rule table is written in: values being named, calls, and einops-like patterns."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from partita.program.dims import Atoms, Cell, Dim, Signature
from partita.program.events import Kind


@dataclass(eq=False, slots=True)
class Value:
    """A tensor while it is being named.

    Args:
        iota: It is arange(n), perhaps reshaped: indexing by it keeps the dim's name.
        origin: Name of the op that made it.
        piece: (dim, number): made from one index of that dim alone, as in a loop over samples.
        tainted: Its numbers depend on the inputs' or parameters' numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: list[Dim]
    kind: Kind = Kind.ACTIVATION
    name: str = ""
    root: int = -1
    iota: bool = False
    origin: str = ""
    piece: tuple[Dim, int] | None = None
    tainted: bool = False


@dataclass(slots=True)
class Call:
    """One op about to be named: `ins` are its tensor arguments in order, `shapes` those of its results."""

    atoms: Atoms
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ins: list[Value]
    shapes: list[tuple[int, ...]]

    def arg(self, i: int, name: str, default: Any = None) -> Any:
        """Argument number i, or by name."""
        return self.args[i] if len(self.args) > i else self.kwargs.get(name, default)


Rule = Callable[[Call], Signature | None]


def labels(n: int, start: int = 0) -> list[Cell]:
    return [(f"d{i}",) for i in range(start, start + n)]


def _cells(text: str) -> list[list[Cell]]:
    """The cells of "b (h e), k", one list per operand."""
    found = (re.findall(r"\(([^)]*)\)|(\S+)", part) for part in text.replace("!", "").split(","))
    return [[tuple(group.split()) if group else (word,) for group, word in part] for part in found]


def pattern(text: str, **settings: Any) -> Callable[[Call], Signature]:
    """A rule from "m k, k n -> m n"; "..." is any leading dims of an operand, "k!" must stay whole."""
    (ins, outs), whole = map(_cells, text.split("->")), set(re.findall(r"(\w+)!", text))

    def rule(c: Call) -> Signature:
        wide = max((len(v.shape) - len(p) + 1 for v, p in zip(c.ins, ins, strict=False) if ("...",) in p), default=0)

        def fill(p: list[Cell], rank: int) -> list[Cell]:
            if ("...",) not in p:
                return list(p)
            at, n = p.index(("...",)), rank - len(p) + 1
            return p[:at] + labels(n, wide - n) + p[at + 1 :]

        return Signature(
            [fill(p, len(v.shape)) for v, p in zip(c.ins, ins, strict=False)],
            [fill(p, len(s)) for s, p in zip(c.shapes, outs, strict=False)],
            set(whole),
            **settings,
        )

    return rule


def pointwise(c: Call, linear: str = "no", unread: tuple[int, ...] = ()) -> Signature:
    """Dims are aligned from the right, as broadcasting does."""
    rank = max(map(len, c.shapes), default=0)
    ins = [labels(len(v.shape), rank - len(v.shape)) for v in c.ins]
    return Signature(ins, [labels(len(s), rank - len(s)) for s in c.shapes], linear=linear, unread=set(unread))


def linear(how: str, unread: tuple[int, ...] = ()) -> Callable[[Call], Signature]:
    return lambda c: pointwise(c, how, unread)


def added(c: Call) -> Signature:
    """Adding a *number* is not linear."""
    return pointwise(c, "add" if len(c.ins) == 2 else "no")


def created(c: Call) -> Signature:
    """Makes something new; inputs lend their shape at most."""
    ins = [[(f"i{j}.{i}",) for i in range(len(v.shape))] for j, v in enumerate(c.ins)]
    return Signature(ins, [[(f"o{j}.{i}",) for i in range(len(s))] for j, s in enumerate(c.shapes)], creates=True)
