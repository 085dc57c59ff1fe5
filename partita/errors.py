"""What goes wrong, said in five slots: what, have, law, try, at.

    PartitaError
    ├── Refused       the user's input was refused before anything started (exit 2); carries every fault found
    └── RunFailed     the ground gave way during a run (exit 1); names the cause and a way on
        └── RankLost  a rank died, stopped or hung

A `Fault` is data. Rooms below the door collect faults and raise one `Refused` with all of them.
"""

from dataclasses import dataclass, replace

# code -> the fact it states.  Each has a page docs/errors/CODE.md.
CODES = {
    "P101": "UnknownKey",
    "P102": "WrongType",
    "P103": "MeshMismatch",
    "P104": "DoesNotDivide",
    "P105": "AxisUse",
    "P106": "WrongOrder",
    "P107": "UnknownName",
    "P108": "NotFound",
    "P109": "Unreadable",
    "P110": "Empty",
    "P111": "DoesNotFit",
    "P112": "BadValue",
    "P113": "FolderInUse",
    "P114": "NoLossRule",
    "P115": "NotSupported",
    "P116": "NotSplittable",
    "P117": "BadCheckpoint",
    "P118": "WrongRanks",
    "P119": "MissingKey",
    "P120": "BadSchedule",
    "P121": "BadStages",
}


@dataclass(frozen=True)
class Fault:
    """One thing wrong with the user's input.

    Args:
        code: A key of `CODES`.
        what: A sentence with the culprit's repr.
        have: The numbers involved.
        law: Why it cannot be.
        cure: The valid choices, computed (slot "try").
        at: Path into the user's file or call, e.g. ``plan.toml: mesh.tp``.
    """

    code: str
    what: str
    have: str = ""
    law: str = ""
    cure: str = ""
    at: str = ""

    @property
    def name(self) -> str:
        return CODES[self.code]

    def __str__(self) -> str:
        lines = [f"{self.name} [{self.code}] {self.what}"]
        for slot, text in (("have", self.have), ("law", self.law), ("try", self.cure)):
            if text:
                lines.append(f"  {slot:<6} " + text.replace("\n", "\n" + " " * 9))
        lines.append(f"  {'at':<6} {self.at or '(call)'}".ljust(52) + f" docs: errors/{self.code}")
        return "\n".join(lines)

    def located(self, prefix: str) -> "Fault":
        """The same fault with its place prefixed, e.g. by the name of the file."""
        return replace(self, at=f"{prefix}: {self.at}" if self.at else prefix)


class PartitaError(Exception):
    """Root of everything partita raises on purpose."""


class Refused(PartitaError):
    """The input was refused; `faults` holds every reason at once."""

    def __init__(self, *faults: Fault) -> None:
        assert faults, "a refusal has at least one fault"
        self.faults = faults
        super().__init__("\n\n".join(map(str, faults)))


class RunFailed(PartitaError):
    """A run ended early; the message names the cause and a way on."""


class RankLost(RunFailed):
    """A rank died, stopped or hung; `rank` is the guilty one."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def refuse(faults: list[Fault]) -> None:
    """Raise one `Refused` with all of `faults`, if there are any."""
    if faults:
        raise Refused(*faults)
