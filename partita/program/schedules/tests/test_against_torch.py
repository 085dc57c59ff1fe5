"""Our schedules beside those that torch makes of the same name: both legal, ours by no clock longer, no larger."""

import re

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from partita.program.schedules import Durations, Schedule, faults_of, generate, held_peak, loop, play, read, vee, zero_bubble

NAMES = {
    "gpipe": "ScheduleGPipe",
    "one_f_one_b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
CLOCKS = [Durations(), Durations(send=0.25), Durations(1.0, 1.3, 0.8), Durations(1.0, 0.9, 1.2, send=0.5)]
ROWS = [
    *(("gpipe", p, m, 1) for p, m in [(2, 2), (4, 8), (3, 7)]),
    *(("one_f_one_b", p, m, 1) for p, m in [(2, 2), (4, 8), (3, 7)]),
    *(("interleaved", p, m, v) for p, m, v in [(2, 2, 2), (2, 8, 2), (4, 8, 2), (4, 8, 3), (4, 10, 2), (3, 5, 2)]),
    *(("looped_bfs", p, m, v) for p, m, v in [(2, 2, 2), (4, 8, 2), (3, 7, 3)]),
    *(("zero_bubble", p, m, 1) for p, m in [(2, 2), (4, 8), (4, 10), (3, 5)]),
    *(("zbv", p, m, 2) for p, m in [(2, 2), (2, 3), (4, 4), (4, 7), (4, 16), (3, 9)]),
    *(("dualpipev", p, m, 2) for p, m in [(2, 4), (2, 9), (4, 8), (4, 16), (3, 7)]),
]


class Stage:
    """What torch's generators ask of a stage, without a process group."""

    def __init__(self, at, ranks, placement):
        self.stage_index, self.num_stages, self.group_rank, self.group_size = at, len(placement), 0, ranks
        self.is_first, self.is_last, self.has_backward = at == 0, at == len(placement) - 1, True
        self.group, self.device, self.dw_builder, self.submod = None, torch.device("cpu"), None, torch.nn.Identity()
        self.stage_index_to_group_rank = dict(enumerate(placement))


def of_torch(name, p, m, v) -> Schedule:
    """The lists torch makes, read from the text it writes."""
    placement = vee(p) if name in ("zbv", "dualpipev") else loop(p, v)
    stages = [Stage(at, p, placement) for at, rank in enumerate(placement) if rank == 0]
    made = getattr(theirs, NAMES[name])
    if issubclass(made, theirs.PipelineScheduleSingle):
        order = made(stages[0], m, loss_fn=torch.sum)._get_pipeline_order()
    else:
        order = made(stages, m, loss_fn=torch.sum).pipeline_order
    lines = [",".join("" if action is None else str(action) for action in order[rank]) for rank in range(p)]
    if name == "one_f_one_b" and f"{p - 1}F0" not in lines[-1]:
        # torch 2.13 counts the last rank's forwards from 1 in the list it prints; what its loop runs starts at 0
        lines[-1] = re.sub(r"F(\d+)", lambda found: f"F{int(found[1]) - 1}", lines[-1])
    return read("\n".join(lines), name, ranks=p, microbatches=m)


@pytest.mark.law
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_no_clock_is_longer_than_torchs_and_no_rank_holds_more(row):
    name, p, m, v = row
    ours, other = generate(name, p, m, v), of_torch(name, p, m, v)
    assert faults_of(ours) == faults_of(other) == []
    assert ours.placement == other.placement
    for clock in CLOCKS:
        assert play(ours, clock).makespan <= play(other, clock).makespan + 1e-9
    assert max(held_peak(ours)) <= max(held_peak(other))


@pytest.mark.law
@pytest.mark.parametrize("row", [row for row in ROWS if row[0] != "looped_bfs"], ids=lambda row: "-".join(map(str, row)))
def test_the_lists_are_torchs(row):
    """All but breadth first, whose backwards torch runs from the last microbatch and which here keep the order of the sums."""
    assert generate(*row).order == of_torch(*row).order


@pytest.mark.law
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 5, 2)])
def test_zero_bubble_interleaved_is_torchs(p, m, v):
    assert zero_bubble(p, m, v).order == of_torch("zero_bubble", p, m, v).order
