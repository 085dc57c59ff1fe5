"""A pipeline schedule played by the clock, as spans: the form in which a measured run can stand beside it."""

from partita.program.schedules import Pass, Schedule, Timetable
from partita.simulate.clock import Span

PHASES = {Pass.FORWARD: "forward", Pass.INPUT: "backward", Pass.WEIGHT: "backward", Pass.BACKWARD: "backward"}


def spans_of(schedule: Schedule, timeline: Timetable) -> dict[int, list[Span]]:
    """Rank -> its actions in order, e.g. the span "2F0" on the compute stream of the rank that holds stage 2."""
    spans = {}
    for rank, row in enumerate(schedule.order):
        times = zip(row, timeline.starts[rank], timeline.ends[rank], strict=True)
        spans[rank] = [Span(str(a), "compute", PHASES[a.kind], f"stage {a.stage}", start, end) for a, start, end in times]
    return spans
