"""A pipeline in the order of a user's own text file: a line a rank, its actions in turn.

    # p = 2, m = 2
    0F0, 0F1, 0B0, 0B1        an action is a stage, one of F B I W, and a microbatch
    1F0, 1B0, 1F1, 1B1

A file is written for one number of ranks and of microbatches; what it cannot be is said before anything starts, line by line.
Its form is that of `program/schedules/text.py`, which also reads what torch writes for its own schedules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from partita.errors import Fault, Refused
from partita.program.schedules import Schedule, read, unfit
from partita.strategy import Case, Pipelined, TextFile

ONE_F_ONE_B = "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
SPLIT_VEE = "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1\n1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\n"


@dataclass(frozen=True)
class OwnSchedule(Pipelined):
    """Pipeline in the order that a text file says.

    Args:
        file: The schedule; in a plan file its path, from the folder of the plan file, or the text itself.
    """

    name: ClassVar[str] = "own_schedule"

    file: TextFile = field(kw_only=True)

    @property
    def fixed(self) -> tuple[str, ...]:
        return (self.axis,)

    def schedule(self, ranks: int) -> Schedule:
        return self._read

    def own_faults(self) -> Sequence[Fault]:
        if not isinstance(self.file, TextFile):
            cure = f"TextFile.read({self.file!r})"
            return [Fault("P102", f"file = {self.file!r} is no text file", "", "a schedule is a text", cure, "file")]
        try:
            _ = self._read
        except Refused as refused:
            return [_placed(f) for f in refused.faults]
        return []

    def laws(self, ranks: int) -> Sequence[Fault]:
        return [_placed(f, f"strategy.{self.name}.") for f in unfit(self._read, ranks=ranks)]

    @classmethod
    def parted(cls, microbatches: int) -> Sequence["OwnSchedule"]:
        return ()  # nobody but the user has a file

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"pp": 2}, {"file": TextFile(ONE_F_ONE_B), "microbatches": 4}),
            Case({"dp": 2, "pp": 2}, {"file": TextFile(SPLIT_VEE), "microbatches": 2}),
        )

    @cached_property
    def _read(self) -> Schedule:
        return read(self.file.text, self.file.name, microbatches=self.microbatches)


def _placed(fault: Fault, table: str = "") -> Fault:
    """At the field, with the line of the file."""
    return replace(fault, at=f"{table}file ({fault.at})")
