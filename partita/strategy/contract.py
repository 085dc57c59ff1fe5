"""The contract of a strategy: it *says* what a period does once applied (`rewrite`), and *does* it (`apply`).

        nn.Module ───── capture ─────▶ Program
             │                            │
           apply  (does)               rewrite (says)
             ▼                            ▼
        nn.Module′ ──── record ─────▶ Program′        same collectives, axis, bytes, dtype, order per stream

A strategy is a frozen dataclass in one file. It imports no torch: what it does, it does through the `Site` it is given.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from partita.errors import Fault
from partita.mesh import Mesh
from partita.program import Program
from partita.strategy.textfile import TextFile

if TYPE_CHECKING:
    from partita.runtime.site import Site


class Promise(StrEnum):
    """What a user may expect against one device; the proof picks its test by it."""

    EXACT = "EXACT"  # bitwise
    REORDERED = "REORDERED"  # equal up to the order of float sums: fp64, error <= 1e-10
    RELAXED = "RELAXED"  # another algorithm: degenerate setting exact, invariants held, loss inside a band


class Place(IntEnum):
    """Where a strategy stands in a plan, innermost first."""

    TENSOR = 0
    SEQUENCE = 1
    MEMORY = 2
    DATA = 3
    PIPELINE = 4


@dataclass(frozen=True)
class Case:
    """A small setting the conformance kit tries: mesh sizes (outermost first) and fields of the strategy."""

    mesh: Mapping[str, int]
    settings: Mapping[str, Any]
    workload: str = "gpt"


@dataclass(frozen=True)
class Strategy(ABC):
    """One method of parallel training. Its settings are its fields, the same names in TOML and on the command line."""

    name: ClassVar[str]
    place: ClassVar[Place]
    promise: ClassVar[Promise]

    modules: tuple[str, ...] = field(default=("*",), kw_only=True)  # globs of the module paths it applies to

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes it uses; its own field `axis` unless it says otherwise."""
        return (getattr(self, "axis"),)  # noqa: B009

    @property
    def fixed(self) -> tuple[str, ...]:
        """Those of its axes that it runs on at one size alone; none unless it says otherwise."""
        return ()

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those of its axes over which the batch is cut, in the order it is cut."""
        return self.axes if self.place == Place.DATA else ()

    @property
    def switch(self) -> tuple[str, str] | None:
        """The axis it reduces over through a switch, and the data plane it asks for; None unless it says otherwise."""
        return None

    def settings(self) -> dict[str, Any]:
        """Its fields as plain data, as a plan file writes them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value.lines if isinstance(value, TextFile) else value for name, value in values.items()}

    @abstractmethod
    def check(self, program: Program, mesh: Mesh) -> Sequence[Fault]:
        """Every reason why it cannot split this program on this mesh; empty if it can.

        Faults speak of dims, sizes and modules; the door adds the place in the user's file.
        """

    @abstractmethod
    def rewrite(self, program: Program, mesh: Mesh) -> Program:
        """Say what one period of one rank does once the strategy is applied. Pure: no torch, any mesh size."""

    @abstractmethod
    def apply(self, site: "Site") -> None:
        """Do it, to the real module of this rank (`site.module`), through the verbs of `site`."""

    @classmethod
    def offers(cls) -> "Sequence[Strategy]":
        """Settings a search tries where there is a choice; its defaults unless it says otherwise."""
        return (cls(),)

    def suits(self, mesh: Mesh) -> bool:
        """Whether a search should look at it on these axes; any mesh unless it says otherwise."""
        return True

    @classmethod
    @abstractmethod
    def cases(cls) -> Sequence[Case]:
        """Settings the conformance kit tries; at least one on two axes."""
