"""Predicted against measured: bytes on the wire, and peak memory.

wire      the ranks' own sockets against the backend's model, where a payload is large enough to tell: within 1 %
memory    the fold's peak against the honest one, where the peak is large enough to tell: within 5 % + 2 MiB
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.cluster import named
from partita.cost.memory import occupancy
from partita.cost.stages import role_occupancy
from partita.program import Collective, Program
from partita.runtime.outcome import Outcome

MEGABYTE = 10**6  # bytes of the largest payload from which on the wire is judged
WIRE_BOUND = 0.01
JUDGED = 100 << 20  # bytes of the peak from which on memory is judged
MEMORY_BOUND, MEMORY_SLACK = 0.05, 2 << 20


@dataclass(frozen=True)
class Wire:
    """Bytes a rank sent a step: counted by its sockets / modelled for the backend - 1; None where that says nothing."""

    error: float | None = None

    @property
    def held(self) -> bool:
        return self.error is None or abs(self.error) <= WIRE_BOUND

    def __str__(self) -> str:
        return f"the wire carried {self.error or 0.0:+.2%} against the backend's model, more than {WIRE_BOUND:.0%}"


@dataclass(frozen=True)
class Memory:
    """Peak memory of the fullest rank: predicted and measured, in bytes; None where it is too small to judge."""

    predicted: float | None = None
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted / self.measured - 1

    @property
    def held(self) -> bool:
        if self.predicted is None or self.measured is None:
            return True
        return abs(self.predicted - self.measured) <= MEMORY_BOUND * self.measured + MEMORY_SLACK

    def __str__(self) -> str:
        return f"predicted {self.error or 0.0:+.1%} against measured, more than {MEMORY_BOUND:.0%} and 2 MiB"


def wire_of(calls: Sequence[Collective], real: Outcome) -> Wire:
    """Judge the wire of a run whose said calls these are."""
    counted = real.wire_bytes_per_rank
    if counted is None or max((c.nbytes for c in calls), default=0) < MEGABYTE:
        return Wire()
    return Wire(counted / sum(t.backend_bytes for t in real.traffic(all_steps=True)) - 1)


def memory_of(roles: Sequence[Program], real: Outcome) -> Memory:
    """Judge the peak of a run of these roles."""
    measured = real.peak
    if not measured >= JUDGED:  # NaN where it cannot be measured
        return Memory()
    folds = (occupancy if role.pipeline is None else role_occupancy for role in roles)
    kernel = named("cpu").kernel
    return Memory(max(fold(role, "gloo", kernel).peak for fold, role in zip(folds, roles, strict=True)), measured)
