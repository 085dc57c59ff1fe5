"""What rewrites share: which block a path belongs to, and events on other tensors."""

from collections.abc import Mapping
from dataclasses import replace

from partita.program.events import Compute, Event, Phase

# The phases that stand together: everything between the loss and the optimizer runs from the last block to the first.
TOGETHER = {Phase.RECOMPUTE: Phase.BACKWARD, Phase.SYNC: Phase.BACKWARD}


def block_number(prefix: str, path: str) -> int | None:
    """Which block a module path or a tensor name belongs to."""
    if not path.startswith(prefix):
        return None
    digits = path[len(prefix) :].partition(".")[0]
    return int(digits) if digits.isdigit() else None


def inside(module: str, path: str) -> bool:
    """Whether a path is a module's own or leads into it; everything is inside the whole model, ""."""
    return not module or path == module or path.startswith(module + ".")


def touched(e: Event) -> tuple[int, ...]:
    return (*e.ins, *e.outs) if isinstance(e, Compute) else e.tensors


def renumbered(e: Event, names: Mapping[int, int | None]) -> Event:
    """The event on other tensors."""

    def new(ids: tuple[int, ...]) -> tuple[int, ...]:
        found = tuple(names.get(i, i) for i in ids)
        assert None not in found, "checked by _closed"
        return found  # pyright: ignore[reportReturnType]

    if isinstance(e, Compute):
        ins, outs = new(e.ins), new(e.outs)
        return e if ins == e.ins and outs == e.outs else replace(e, ins=ins, outs=outs)
    tensors = new(e.tensors)
    return e if tensors == e.tensors else replace(e, tensors=tensors)
