"""The Program: what one rank does in a period, as pure data."""

from partita.program.dims import Dim, Signature
from partita.program.events import Collective, Compute, Event, Kind, Layout, Partial, Phase, Repeat, Rows, Split, Tensor
from partita.program.program import Program

__all__ = [
    "Collective",
    "Compute",
    "Dim",
    "Event",
    "Kind",
    "Layout",
    "Partial",
    "Phase",
    "Program",
    "Repeat",
    "Rows",
    "Signature",
    "Split",
    "Tensor",
]
