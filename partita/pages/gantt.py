"""A pipeline schedule drawn in a terminal: a row a rank, time to the right, a cell an action with its microbatch.

Plain text tells a cell by what fills it, `0>` forward, `0<` backward, `0-` backward of the input, `0=` of the weights, and a
cell of one column by its sign: a digit, a letter (a is 0), `=`. A rank that waits shows dots. With colours, those tell.
"""

import statistics
from collections.abc import Sequence

from partita.program.schedules import Action, Pass, Schedule, Timetable
from partita.units import format_time

FILL = {Pass.FORWARD: ">", Pass.BACKWARD: "<", Pass.INPUT: "-", Pass.WEIGHT: "="}
PAINT = {Pass.FORWARD: 44, Pass.BACKWARD: 42, Pass.INPUT: 46, Pass.WEIGHT: 43}  # ANSI background: blue, green, cyan, yellow
NAMES = {Pass.FORWARD: "forward", Pass.BACKWARD: "backward", Pass.INPUT: "backward of input", Pass.WEIGHT: "of weights"}
WIDEST = 6  # columns of the shortest cell, however wide the terminal

Column = tuple[Action | None, int, str]  # what runs (None: it waits), its ANSI background, the sign drawn


def gantt(schedule: Schedule, timeline: Timetable, width: int = 80, *, colour: bool = False) -> str:
    """The schedule by the clock, a row a rank with the share of time it waits.

    Args:
        schedule: What runs.
        timeline: When, as `play` says or as measured.
        width: Columns of the terminal; a step that is longer is cut, and the last line says where.
        colour: Paint cells (ANSI); else plain text.
    """
    labels = [f"rank {rank}" for rank in range(schedule.ranks)]
    left = max(map(len, labels))
    columns = max(1, width - left - 2 - len(" 100 %"))
    scale = _scale(timeline, columns)
    lines = []
    for rank, label in enumerate(labels):
        row = _columns(schedule, timeline, rank, scale, colour=colour)[:columns]
        drawn = _painted(row) if colour else "".join(sign for _, _, sign in row)
        share = f"{100 * timeline.bubbles[rank]:.0f} %"
        lines.append(_cut(f"{label.rjust(left)}  ", width) + drawn + share.rjust(6) if columns > 1 else label[:width])
    return "\n".join([*lines, *_summary(schedule, timeline, columns / scale, width, colour=colour)])


def _scale(timeline: Timetable, columns: int) -> float:
    """Columns a second: the whole step if every cell then has a column, else a column for the shortest cell."""
    lengths = [
        e - s for ends, starts in zip(timeline.ends, timeline.starts, strict=True) for e, s in zip(ends, starts, strict=True)
    ]
    lengths = [length for length in lengths if length > 0]
    if not lengths:
        return 1.0
    shortest = max(min(lengths), statistics.median(lengths) / 4)  # a few tiny ones may vanish
    for cell in range(WIDEST, 0, -1):
        if timeline.makespan / shortest * cell <= columns + 1e-6:
            return cell / shortest
    return 1 / shortest


def _columns(schedule: Schedule, timeline: Timetable, rank: int, scale: float, *, colour: bool) -> list[Column]:
    """What a rank's row shows, column by column."""
    turn = {stage: at for at, stage in enumerate(schedule.held[rank])}
    waits: list[Column] = [(None, 0, " " if colour else ".")]
    row: list[Column] = []
    for action, start, end in zip(schedule.order[rank], timeline.starts[rank], timeline.ends[rank], strict=True):
        row += waits * (round(start * scale) - len(row))
        paint = PAINT[action.kind] + 60 * (turn[action.stage] % 2)  # every other stage of the rank is brighter
        row += [(action, paint, sign) for sign in _signs(action, round(end * scale) - len(row), colour=colour)]
    return row + waits * (round(timeline.makespan * scale) - len(row))


def _signs(action: Action, columns: int, *, colour: bool) -> str:
    """A cell of so many columns."""
    if columns <= 0:
        return ""
    if columns > 1:
        return str(action.microbatch)[1 - columns :].ljust(columns, " " if colour else FILL[action.kind])
    digit = action.microbatch % 10
    if colour or action.kind is Pass.FORWARD:
        return str(digit)
    return "=" if action.kind is Pass.WEIGHT else "abcdefghij"[digit]


def _painted(row: Sequence[Column]) -> str:
    drawn, before = "", None
    for action, paint, sign in row:
        if action is not before:
            drawn += f"\x1b[30;{paint}m" if action else "\x1b[0m"
        drawn, before = drawn + sign, action
    return drawn + "\x1b[0m"


def _summary(schedule: Schedule, timeline: Timetable, seconds: float, width: int, *, colour: bool) -> list[str]:
    kinds = [kind for kind in Pass if any(a.kind is kind for row in schedule.order for a in row)]
    if colour:
        legend = "  ".join(f"\x1b[30;{PAINT[kind]}m 0 \x1b[0m {NAMES[kind]}" for kind in kinds)
        legend = legend if sum(len(NAMES[kind]) + 6 for kind in kinds) <= width else ""
    else:
        legend = _cut("  ".join(f"0{FILL[kind]} {NAMES[kind]}" for kind in kinds), width)
    facts = f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches"
    facts += f", {format_time(timeline.makespan)}, bubble {100 * timeline.bubble:.1f} %"
    lines = [_cut(facts, width), legend]
    if seconds < timeline.makespan * (1 - 1e-9):
        lines.append(_cut(f"shown: the first {format_time(seconds)}", width))
    return [line for line in lines if line]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"
