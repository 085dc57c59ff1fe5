"""Figures: time, memory and traffic of one optimizer step, predicted or measured: one type, so that proving is subtraction."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PARTS = ("parameters", "gradients", "optimizer", "activations", "other")


@dataclass(frozen=True)
class Traffic:
    """What a rank of the busiest role sends in one optimizer step by one op on one axis.

    Args:
        axis, op: Where and how.
        count: Calls (a mean where a period is longer than a step).
        bytes: Algorithmic bytes of all calls together: the large side of each.
        backend_bytes: What this backend sends for them.
    """

    axis: str
    op: str
    count: float
    bytes: float
    backend_bytes: float

    def json(self) -> dict[str, Any]:
        return {"axis": self.axis, "op": self.op, "count": self.count, "bytes": self.bytes, "backend_bytes": self.backend_bytes}


def total(rows: Sequence[tuple[Traffic, int]], steps: int) -> tuple[Traffic, ...]:
    """Traffic of the mean step, by axis and op, from rows and in how many of the `steps` each happens: divided once."""
    sums: dict[tuple[str, str], list[float]] = {}
    for row, times in rows:
        one = sums.setdefault((row.axis, row.op), [0, 0, 0.0])
        for at, amount in enumerate((row.count, row.bytes, row.backend_bytes)):
            one[at] += times * amount
    return tuple(Traffic(*key, *(amount / steps for amount in one)) for key, one in sorted(sums.items()))


@dataclass(frozen=True)
class Why:
    """One term of a figure: `share` of it comes from `formula` applied to `amount`, with a constant and its source."""

    term: str
    formula: str
    amount: str
    constant: str
    source: str
    seconds: float


@dataclass(frozen=True)
class Figures:
    """One step of one plan, predicted or measured. SI units; memory of the fullest role.

    Args:
        step_seconds: Time of one optimizer step.
        step_seconds_band: (low, high) around it.
        memory: Bytes at the peak by part: the keys of `PARTS`; their sum is the peak. Measured figures may hold only "peak".
        peak: Bytes at the peak.
        peak_at: The op at the peak.
        traffic: By axis and op, sorted.
        flop: Of one rank in one step.
        compute_seconds, exposed_communication_seconds: How the step divides (predicted only).
        samples, tokens: Per step, globally; tokens is None for models without them.
        why: Terms of the time, largest first.
        notes: What a reader should know.
    """

    step_seconds: float
    peak: float
    traffic: tuple[Traffic, ...]
    step_seconds_band: tuple[float, float] | None = None
    memory: dict[str, float] = field(default_factory=dict)
    peak_at: str = ""
    flop: float = 0.0
    compute_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    bubble_fraction: float = 0.0
    device_flop_per_second: float = 0.0
    samples: int = 0
    tokens: int | None = None
    fits: bool = True
    energy_joules: float | None = None
    opaque_share: float = 0.0
    why: tuple[Why, ...] = ()
    notes: tuple[str, ...] = ()

    def error(self, measured: "Figures") -> dict[str, float]:
        """Relative error of this prediction: predicted / measured - 1; traffic is 0 exactly when the two lists are equal."""
        mine = {(t.axis, t.op): (t.count, t.bytes) for t in self.traffic}
        theirs = {(t.axis, t.op): (t.count, t.bytes) for t in measured.traffic}
        sent, heard = sum(t.bytes for t in self.traffic), sum(t.bytes for t in measured.traffic)
        unequal = (sent / heard - 1 if heard else float("inf")) or float("nan")
        return {
            "time": self.step_seconds / measured.step_seconds - 1,
            "memory": self.peak / measured.peak - 1 if measured.peak else float("nan"),
            "traffic": 0.0 if mine == theirs else unequal,
        }
