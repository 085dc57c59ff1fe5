"""A schedule as a drawing and as a trace."""

import json
import re
from itertools import pairwise

import pytest

from partita.pages import trace
from partita.pages.gantt import gantt
from partita.program.schedules import SCHEDULES, Durations, filled, generate, play, read, split_backward
from partita.simulate import Span, spans_of

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.golden
def test_a_small_schedule_is_drawn():
    schedule = generate("one_f_one_b", 3, 4)
    assert gantt(schedule, play(schedule), 55) == (
        "rank 0  0>1>2>........0<<<3>1<<<..2<<<..3<<<  33 %\n"
        "rank 1  ..0>1>....0<<<2>1<<<3>2<<<..3<<<....  33 %\n"
        "rank 2  ....0>0<<<1>1<<<2>2<<<3>3<<<........  33 %\n"
        "one_f_one_b: 3 stages, 4 microbatches, 18 s, bubble 33…\n"
        "0> forward  0< backward"
    )


@pytest.mark.golden
def test_a_long_step_is_cut_and_says_so():
    schedule = generate("zero_bubble", 2, 30)
    lines = gantt(schedule, play(schedule), 40).splitlines()
    assert lines[0] == "rank 0  01.a=2b=3c=4d=5e=6f=7g=8h=   1 %"
    assert lines[-1] == "shown: the first 26 s"


@pytest.mark.golden
def test_colours_paint_what_plain_text_spells():
    schedule = read("0F0,0I0,0W0\n", "own")
    drawn = gantt(schedule, play(schedule), 30, colour=True).splitlines()[0]
    assert drawn == "rank 0  \x1b[30;44m0    \x1b[30;46m0    \x1b[30;43m0    \x1b[0m   0 %"


@pytest.mark.law
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [1, 8, 15, 40, 80, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(name, width, colour):
    schedule = generate(name, 3, 12)
    drawn = gantt(schedule, play(schedule, Durations(1.0, 0.7, 0.01, send=0.3)), width, colour=colour)
    assert all(len(ANSI.sub("", line)) <= width for line in drawn.splitlines())


@pytest.mark.law
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_whole_drawing_shows_every_action_and_every_wait(name):
    schedule = generate(name, 2, 6)
    timeline = play(schedule)
    width = round(timeline.makespan)
    rows = [line[8 : 8 + width] for line in gantt(schedule, timeline, width + 14).splitlines()[:2]]
    for rank, row in enumerate(rows):
        assert len(row) == width
        assert row.count(".") == round(timeline.bubbles[rank] * width)


@pytest.mark.law
@pytest.mark.parametrize("doc", [filled.__doc__, split_backward.__doc__], ids=["filled", "split_backward"])
def test_the_pictures_of_the_generators_are_what_they_make(doc):
    pictures = re.findall(r"^    (\w+) *\n((?:    [0-9a-j.=<]+\n)+)", doc, re.MULTILINE)
    assert len(pictures) >= 3
    for name, picture in pictures:
        schedule = generate(name, 3, {"zbv": 5, "dualpipev": 6}.get(name, 4))
        timeline = play(schedule, Durations(backward=None if SCHEDULES[name].split else 1.0))
        width = round(timeline.makespan)
        drawn = [line[8 : 8 + width] for line in gantt(schedule, timeline, width + 14).splitlines()[:3]]
        assert picture.split() == drawn, name + "\n" + "\n".join("    " + row for row in drawn)


@pytest.mark.case
def test_an_empty_step_can_be_drawn():
    schedule = generate("gpipe", 1, 1)
    assert gantt(schedule, play(schedule, Durations(0, 0, 0)), 40).startswith("rank 0")


def events_of(got):
    return [e for e in json.loads(json.dumps(got, allow_nan=False))["traceEvents"] if e["ph"] == "X"]


@pytest.mark.law
@pytest.mark.parametrize("name", SCHEDULES)
def test_events_of_a_row_never_overlap(name):
    """Perfetto nests events of a row by time: they are apart or inside one another, to the nanosecond."""
    schedule = generate(name, 3, 8)
    predicted = spans_of(schedule, play(schedule, Durations(1 / 3, 0.1, 1e-7, send=1 / 7)))
    measured = spans_of(schedule, play(schedule, Durations(0.3, 0.11, 0.2)))
    events = events_of(trace.trace(predicted, measured))
    assert len(events) == 2 * sum(map(len, schedule.order))
    for pid, tid in {(e["pid"], e["tid"]) for e in events}:
        row = [(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in events if (e["pid"], e["tid"]) == (pid, tid)]
        assert all(a[1] <= b[0] for a, b in pairwise(row))
        assert row == sorted(row)


@pytest.mark.case
def test_predicted_and_measured_stand_side_by_side():
    spans = {0: [Span("0F0", "compute", "forward", "stage 0", 0.0, 1e-3), Span("sum", "dp", "backward", "", 0.5e-3, 2e-3)]}
    got = trace.trace(spans | {1: [Span("1F0", "compute", "forward", "stage 1", 1e-3, 3e-3)]}, spans)
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in got["traceEvents"] if e["ph"] == "M"]
    assert names == [
        *[(0, 0, "predicted"), (0, 0, "rank 0"), (0, 1, "rank 0: dp"), (0, 2, "rank 1")],
        *[(1, 0, "measured"), (1, 0, "rank 0"), (1, 1, "rank 0: dp")],
    ]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events_of(got)] == [
        ("0F0", 0, 0, 0.0, 1000.0),
        ("sum", 0, 1, 500.0, 1500.0),
        ("1F0", 0, 2, 1000.0, 2000.0),
        ("0F0", 1, 0, 0.0, 1000.0),
        ("sum", 1, 1, 500.0, 1500.0),
    ]


@pytest.mark.case
def test_without_a_run_only_the_prediction_stands():
    schedule = generate("gpipe", 2, 2)
    got = trace.trace(spans_of(schedule, play(schedule)))
    assert {e["pid"] for e in got["traceEvents"]} == {0}
