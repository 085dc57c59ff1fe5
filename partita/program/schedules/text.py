"""A schedule as a text file: a line a rank, its actions separated by commas.  What torch writes can be read.

    # p = 2, m = 2: anything behind a # is a remark
    0F0, 0F1, 0B0, 0B1
    1F0, 1B0, 1F1, 1B1

An action is a stage, a letter (F forward, B whole backward, I backward of the input, W backward of the weights) and a
microbatch, counted from 0. An empty place between commas means nothing. `(0F1;3B0)OVERLAP_F_B`, as torch writes it, is its
actions in turn. Sends, receives and what else torch adds to its lists (`1RECV_F0`, `0UNSHARD`) follow from the actions and
are read over.
"""

import re

from partita.errors import Fault, Refused, refuse
from partita.program.schedules.action import Action, Pass, Schedule, rows
from partita.program.schedules.checking import CODE, faults_of

ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
ADDED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
FORM = "an action is a stage, one of F B I W, and a microbatch"


def write(schedule: Schedule) -> str:
    """The schedule as text; `read` gives it back."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.order)


def read(text: str, name: str = "file", *, ranks: int | None = None, microbatches: int | None = None) -> Schedule:
    r"""The schedule of a user's file, checked.

    Args:
        text: Of the file.
        name: Its name, to say where something is wrong.
        ranks, microbatches: What the plan has, if there is one.

    Raises:
        Refused: With everything that is wrong.

    Example:
        >>> read("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n").placement
        (0, 1)
    """
    faults: list[Fault] = []
    order, lines = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if content:
            order.append(_row(content, f"{name}: line {number}", faults))
            lines.append(number)
    if not any(order) and not faults:
        cure = "a line a rank, e.g. 0F0,0B0"
        raise Refused(Fault("P110", f"{name!r} holds no action", f"{len(order)} lines", FORM, cure, name))
    refuse(faults)
    refuse(_gap_faults(order, name))
    schedule = Schedule(name, rows(order), _placement(order), 1 + max(a.microbatch for row in order for a in row))
    refuse([*unfit(schedule, ranks=ranks, microbatches=microbatches), *faults_of(schedule, at=name, lines=lines)])
    return schedule


def unfit(schedule: Schedule, *, ranks: int | None = None, microbatches: int | None = None) -> list[Fault]:
    """What of a plan the schedule of a file is not for; None is not asked about."""
    faults = []
    for noun, has, wants in (("ranks", schedule.ranks, ranks), ("microbatches", schedule.microbatches, microbatches)):
        if wants not in (None, has):
            what = f"the schedule of {schedule.name!r} is not for {wants} {noun}"
            law = "a schedule is written for one number of ranks (a line each) and of microbatches"
            cure = f"{noun} = {has} in the plan, or another file"
            faults.append(Fault(CODE, what, f"{has} in the file, {wants} in the plan", law, cure, schedule.name))
    return faults


def _row(line: str, at: str, faults: list[Fault]) -> list[Action]:
    row = []
    for place, cell in enumerate(line.split(","), start=1):
        together = TOGETHER.fullmatch(cell.strip())
        for word in together[1].split(";") if together else [cell]:
            word = word.strip().strip('"')
            if found := ACTION.fullmatch(word):
                row.append(Action(int(found[1]), Pass(found[2]), int(found[3])))
            elif word and not ADDED.fullmatch(word):
                what = f"{word[:40]!r} is not an action"
                faults.append(Fault(CODE, what, f"entry {place} of the line", FORM, "e.g. 2F0, 2B0, 2I0 or 2W0", at))
    return row


def _placement(order: list[list[Action]]) -> tuple[int, ...]:
    """Per stage, the first rank that runs it; a stage that none runs stands on rank 0 and is a fault."""
    holder: dict[int, int] = {}
    for rank, row in enumerate(order):
        for action in row:
            holder.setdefault(action.stage, rank)
    return tuple(holder.get(stage, 0) for stage in range(1 + max(holder)))


def _gap_faults(order: list[list[Action]], at: str) -> list[Fault]:
    """Numbers far beyond what so few actions can have: a slip of the pen, said before it is taken for a size."""
    actions = [a for row in order for a in row]
    faults = []
    for noun, highest in (("stage", max(a.stage for a in actions)), ("microbatch", max(a.microbatch for a in actions))):
        if highest >= len(actions):
            law = f"{noun} numbers start at 0 and leave none out, and each has a forward and a backward"
            cure = f"{noun} = {len(actions) // 2 - 1} or less" if len(actions) > 1 else f"{noun} = 0"
            faults.append(Fault(CODE, f"{noun} {highest} cannot be", f"{len(actions)} actions in all", law, cure, at))
    return faults
