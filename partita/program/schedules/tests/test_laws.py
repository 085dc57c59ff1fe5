"""The clock and the checks against slow, plain readings of the same rules."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.program.schedules import SCHEDULES, Action, Durations, Pass, Schedule, Stuck, faults_of, generate, in_flight, play

F, I, W, B = Pass.FORWARD, Pass.INPUT, Pass.WEIGHT, Pass.BACKWARD


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks = draw(st.integers(1, 4))
    least = SCHEDULES[name].least * ranks
    return generate(
        name, ranks, draw(st.integers(least, least + 5)), draw(st.integers(1, 3)) if SCHEDULES[name].virtual is None else None
    )


def before(action, stages):
    """Groups of actions of which one must have ended: what the action needs, by the rules of a pipeline."""
    stage, kind, k = action
    if kind is F:
        return [{Action(stage - 1, F, k)}] if stage else []
    own = [{Action(stage, F, k)}]
    if kind is W:
        return [*own, {Action(stage, I, k)}]
    return own + ([{Action(stage + 1, B, k), Action(stage + 1, I, k)}] if stage < stages - 1 else [])


def runs(schedule):
    """Whether the lists can be run to their ends: any rank whose next action has what it needs goes on, round and round."""
    done, at = set(), [0] * schedule.ranks
    going = True
    while going:
        going = False
        for rank, row in enumerate(schedule.order):
            if at[rank] < len(row) and all(group & done for group in before(row[at[rank]], schedule.stages)):
                done.add(row[at[rank]])
                at[rank] += 1
                going = True
    return all(i == len(row) for i, row in zip(at, schedule.order, strict=True))


def complete(schedule):
    """Whether every microbatch is on every stage once: F, and B or both I and W."""
    actions = [a for row in schedule.order for a in row]
    expected = len(actions) == len(set(actions))
    for stage in range(schedule.stages):
        for k in range(schedule.microbatches):
            kinds = {a.kind for a in actions if (a.stage, a.microbatch) == (stage, k)}
            expected &= kinds in ({F, B}, {F, I, W})
    return expected


@pytest.mark.law
@settings(max_examples=80, deadline=None)
@given(schedule=schedules(), seconds=st.tuples(*[st.floats(0.0, 2.0)] * 4))
def test_no_action_starts_before_what_it_needs_has_come_or_later_than_it_must(schedule, seconds):
    durations = Durations(*seconds[:3], send=seconds[3])
    timeline = play(schedule, durations)
    ends = {a: e for row, times in zip(schedule.order, timeline.ends, strict=True) for a, e in zip(row, times, strict=True)}
    home = {a: rank for rank, row in enumerate(schedule.order) for a in row}
    for rank, row in enumerate(schedule.order):
        free = 0.0
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            needs = [a for group in before(action, schedule.stages) for a in group if a in ends]
            arrived = [ends[a] + (durations.send if home[a] != rank else 0.0) for a in needs]
            assert start == max([free, *arrived])
            assert end == pytest.approx(start + durations.of(schedule.stages)[action.kind][action.stage])
            free = end


@pytest.mark.law
@settings(max_examples=250, deadline=None)
@given(data=st.data(), schedule=schedules())
def test_a_damaged_schedule_is_refused_exactly_when_it_cannot_run(data, schedule):
    """Actions dropped, doubled, moved, renamed: the checks agree with a plain run of the lists."""
    order = [list(row) for row in schedule.order]
    for _ in range(data.draw(st.integers(0, 3))):
        row = order[data.draw(st.integers(0, schedule.ranks - 1))]
        if not row:
            continue
        at = data.draw(st.integers(0, len(row) - 1))
        to = data.draw(st.integers(0, len(row) - 1))
        match data.draw(st.sampled_from(["drop", "double", "move", "move", "move", "rename"])):
            case "drop":
                row.pop(at)
            case "double":
                row.insert(to, row[at])
            case "move":
                row.insert(to, row.pop(at))
            case "rename":
                row[at] = row[at]._replace(kind=data.draw(st.sampled_from(list(Pass))))
    damaged = Schedule("damaged", tuple(map(tuple, order)), schedule.placement, schedule.microbatches)
    legal = complete(damaged) and runs(damaged)
    faults = faults_of(damaged, at="file")
    assert (faults == []) == legal, [f.what for f in faults]
    assert all((f.what, f.have, f.law, f.cure, f.at) and f.code == "P120" for f in faults)
    if complete(damaged) and not legal:
        order_faults = any(" before " in f.what for f in faults)
        circle = any("wait" in f.what for f in faults)
        assert order_faults or circle


@pytest.mark.law
@settings(max_examples=60, deadline=None)
@given(schedule=schedules())
def test_alive_is_counted_as_by_hand(schedule):
    peaks = [0] * schedule.stages
    for row in schedule.order:
        for at in range(len(row)):
            for stage in {a.stage for a in row}:
                begun = sum(a.kind is F and a.stage == stage for a in row[: at + 1])
                over = sum(a.kind in (B, W) and a.stage == stage for a in row[:at])
                peaks[stage] = max(peaks[stage], begun - over)
    assert in_flight(schedule) == tuple(peaks)


@pytest.mark.case
def test_a_schedule_that_is_stuck_says_how_far_it_came():
    ring = (
        (Action(0, F, 0), Action(0, B, 0), Action(0, F, 1), Action(0, B, 1)),
        tuple(Action(1, k, m) for m in (1, 0) for k in (F, B)),
    )
    with pytest.raises(Stuck) as caught:
        play(Schedule("ring", ring, (0, 1), 2))
    assert caught.value.at == [1, 0]
