"""What a proof came to: everything that held, and the name of whatever did not."""

from dataclasses import dataclass, field
from typing import Any

from partita.proof.figures import Memory, Wire
from partita.proof.numerics import Numerics
from partita.proof.square import Difference
from partita.strategy import Promise


@dataclass(frozen=True)
class Proof:
    """What a proof found; `proved` only if everything held.

    Args:
        promise: Of the plan: the weakest of its strategies.
        numerics: The split run against the whole one.
        said, heard: Events in the said list and in the first rank's.
        difference: The first place where a rank did not do what was said.
        ledger_equal: Whether every rank's ledger and recorder agree.
        wire: Counted bytes against the backend's model.
        memory: Predicted against measured peak.
        notes: What the Program says of itself.
        shrunk: What the copy has less of than the plan.
        invariants: Of RELAXED strategies.
        failure: Why the ranks did not come to an end; then nothing was compared.
    """

    promise: Promise
    numerics: Numerics
    said: int
    heard: int
    difference: Difference | None = None
    ledger_equal: bool = True
    wire: Wire = field(default_factory=Wire)
    memory: Memory = field(default_factory=Memory)
    notes: tuple[str, ...] = ()
    shrunk: tuple[str, ...] = ()
    invariants: tuple[dict[str, Any], ...] = field(default=())
    failure: str = ""

    @property
    def proved(self) -> bool:
        return not self.differs

    @property
    def differs(self) -> tuple[str, ...]:
        """Names of what did not hold: fields of a call (call, op, axis, nbytes, dtype), numerics, ledger, wire, memory, run."""
        if self.failure:
            return ("run",)
        held = {
            "numerics": self.numerics.held,
            "ledger": self.ledger_equal,
            "wire": self.wire.held,
            "memory": self.memory.held,
            **{f"invariant {i['name']}": bool(i["held"]) for i in self.invariants},
        }
        square = self.difference.fields if self.difference else ()
        return (*square, *(name for name, good in held.items() if not good))

    @property
    def reasons(self) -> list[str]:
        """Everything that did not hold, in words."""
        if self.failure:
            return [f"run: {self.failure}"]
        found = []
        if self.difference is not None:
            found.append(f"square: {self.difference}")
        if not self.numerics.held:
            found.append(f"numerics: {self.numerics}")
        if not self.ledger_equal:
            found.append("traffic: a rank's ledger and its recorder disagree")
        if not self.wire.held:
            found.append(f"traffic: {self.wire}")
        if not self.memory.held:
            found.append(f"memory: {self.memory}")
        return [*found, *(f"invariant: {i['name']} does not hold" for i in self.invariants if not i["held"])]

    def _said_of_numbers(self) -> list[str]:
        """What is equal, though no number."""
        names = self.numerics.unnumbered
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return [f"{names[0]}{more}: no number, in the same places as on one device"] if names else []

    def json(self) -> dict[str, Any]:
        """The keys of the contract."""
        equal = self.difference is None and not self.failure
        square = {"equal": equal, "said": self.said, "heard": self.heard}
        return {
            "proved": self.proved,
            "promise": str(self.promise),
            "square": {**square, "first_difference": self.difference.json() if self.difference else None},
            "numerics": self.numerics.json(),
            "traffic": {"algorithmic_equal": equal and self.ledger_equal, "wire_error": self.wire.error},
            "memory": {"error": self.memory.error},
            "invariants": list(self.invariants),
            "differs": list(self.differs),
            "reasons": self.reasons,
            "shrunk": list(self.shrunk),
            "notes": [*self.notes, *self._said_of_numbers()],
        }
