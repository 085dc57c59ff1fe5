"""Published schedules: closed forms of their bubbles and memory, derived; any legal size runs."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.errors import Refused
from partita.program.schedules import (
    SCHEDULES,
    Durations,
    Pass,
    faults_of,
    generate,
    held_peak,
    in_flight,
    laws_of,
    play,
    read,
    write,
    zero_bubble,
)

SIZES = [(1, 1), (1, 4), (2, 2), (2, 7), (3, 4), (4, 8), (4, 13), (8, 32)]


@st.composite
def sizes(draw):
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks = draw(st.integers(1, 9))
    microbatches = draw(st.integers(SCHEDULES[name].least * ranks, SCHEDULES[name].least * ranks + 20))
    virtual = draw(st.integers(1, 5)) if SCHEDULES[name].virtual is None else None
    return name, ranks, microbatches, virtual


@pytest.mark.law
@settings(max_examples=150, deadline=None)
@given(size=sizes(), durations=st.tuples(*[st.floats(0.1, 3.0)] * 3, st.floats(0.0, 2.0)))
def test_any_legal_size_runs_by_any_clock(size, durations):
    schedule = generate(*size)
    assert faults_of(schedule) == []
    timeline = play(schedule, Durations(*durations[:3], send=durations[3]))
    work = schedule.stages // schedule.ranks * schedule.microbatches * sum(durations[:3])
    assert timeline.busy == pytest.approx([work] * schedule.ranks)
    assert timeline.makespan >= work - 1e-9


@pytest.mark.law
@settings(max_examples=60, deadline=None)
@given(size=sizes())
def test_text_gives_the_schedule_back(size):
    schedule = generate(*size)
    again = read(write(schedule), schedule.name, ranks=schedule.ranks, microbatches=schedule.microbatches)
    assert again == schedule


@pytest.mark.law
@settings(max_examples=60, deadline=None)
@given(size=sizes())
def test_gradients_are_summed_in_the_order_of_the_microbatches(size):
    """As on one device: the sums of a stage are then equal bit by bit."""
    schedule = generate(*size)
    for row in schedule.order:
        for stage in {a.stage for a in row}:
            sums = [a.microbatch for a in row if a.stage == stage and a.kind in (Pass.BACKWARD, Pass.WEIGHT)]
            assert sums == list(range(schedule.microbatches))


@pytest.mark.law
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "b"), [(1.0, 1.0), (1.0, 2.0), (3.0, 5.0)])
def test_bubble_of_a_filled_pipeline(name, p, m, f, b):
    """The last rank starts (p-1) f late, works m (f+b), and the last backward walks (p-1) b back."""
    timeline = play(generate(name, p, m), Durations(forward=f, backward=b))
    assert timeline.makespan == (m + p - 1) * (f + b)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)


@pytest.mark.law
@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_of_interleaving_is_that_of_v_times_the_microbatches(p, m, v):
    timeline = play(generate("interleaved", p, m, v), Durations(forward=1.0, backward=2.0))
    assert timeline.makespan == (v * m + p - 1) * 3
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-15)


@pytest.mark.law
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_breadth_first_fills_and_drains_as_fast_as_depth_first(p, m, v):
    timeline = play(generate("looped_bfs", p, m, v), Durations(forward=1.0, backward=2.0))
    assert timeline.makespan == (v * m + p - 1) * 3


@pytest.mark.law
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "i", "w"), [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 2.0, 1.5), (1.0, 1.25, 1.0)])
def test_zero_bubble_waits_a_w_less_where_1f1b_waits_one_more(p, m, f, i, w):
    """1F1B waits (p-1)(F+I+W).  ZB-H1 walks I alone back and does the Ws it owes while it waits: (p-1)(F+I-W)."""
    timeline = play(generate("zero_bubble", p, m), Durations(f, i, w))
    assert timeline.makespan == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w))
    plain = play(generate("one_f_one_b", p, m), Durations(f, i, w))
    assert plain.makespan == pytest.approx((m + p - 1) * (f + i + w))


@pytest.mark.law
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_waits_a_third_of_1f1b_where_passes_are_equal(p, m):
    waited = {name: play(generate(name, p, m)).makespan - 3 * m for name in ("zero_bubble", "one_f_one_b")}
    assert 3 * waited["zero_bubble"] == waited["one_f_one_b"]


@pytest.mark.law
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5, 20])
def test_zbv_never_waits_once_begun(p, more):
    """With equal passes a rank computes from its first action to its last; only the way to the last rank stays."""
    m = 2 * p - 1 + more
    schedule = generate("zbv", p, m)
    timeline = play(schedule)
    spans = [ends[-1] - starts[0] for starts, ends in zip(timeline.starts, timeline.ends, strict=True)]
    assert spans == [6 * m] * p
    assert timeline.makespan == 6 * m + p - 1


@pytest.mark.law
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5, 20])
def test_dualpipev_waits_no_longer_than_the_way_to_the_last_rank(p, more):
    m = 2 * p + more
    assert play(generate("dualpipev", p, m)).makespan == 6 * m + p - 1


@pytest.mark.law
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_microbatches_alive(p, m):
    assert in_flight(generate("gpipe", p, m)) == (m,) * p
    assert in_flight(generate("one_f_one_b", p, m)) == tuple(min(p - rank, m) for rank in range(p))
    assert held_peak(generate("looped_bfs", p, m, 3)) == (3 * m,) * p
    assert max(held_peak(generate("zero_bubble", p, m))) == max(held_peak(generate("one_f_one_b", p, m)))
    # a stage of a V is half as large: at most 2 p halves are the p of 1F1B's first rank
    assert max(held_peak(generate("zbv", p, m), [0.5] * 2 * p)) <= p


@pytest.mark.law
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_microbatches_alive_on_every_rank_of_a_v(p):
    assert held_peak(generate("zbv", p, 4 * p)) == (2 * p,) * p
    assert held_peak(generate("dualpipev", p, 4 * p)) == (2 * p + 1,) * p
    assert in_flight(generate("zbv", p, 4 * p)) == tuple(range(2 * p, 0, -1))


@pytest.mark.law
@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 4), (8, 3)])
def test_microbatches_alive_when_interleaved(p, v):
    """A rank runs 2 (p-1-r) + (v-1) p forwards ahead, and one more before its first backward."""
    assert held_peak(generate("interleaved", p, 4 * p, v)) == tuple(2 * (p - 1 - r) + (v - 1) * p + 1 for r in range(p))


@pytest.mark.law
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 3), (3, 7, 2)])
def test_zero_bubble_may_be_interleaved(p, m, v):
    schedule = zero_bubble(p, m, v)
    assert faults_of(schedule) == []
    assert play(schedule).makespan == 3 * v * m + p - 1


@pytest.mark.law
def test_sending_is_waited_for_between_ranks_only():
    """p = 2, m = 1: forward, send, forward, backward, send, backward; on a V's turn nothing is sent."""
    assert play(generate("gpipe", 2, 2), Durations(1, 1, 1, send=0.5)).makespan == 9 + 2 * 0.5
    one = read("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert play(one, Durations(forward=1, backward=2, send=0.5)).makespan == 12 + 4 * 0.5


@pytest.mark.case
def test_every_cut_has_its_own_way_there_and_back():
    timeline = play(read("0F0,0B0\n1F0,1B0\n2F0,2B0\n"), Durations(1, backward=2, send=[0.5, 10], send_back=[3, 0.25]))
    assert timeline.starts == ((0, 20.75), (1.5, 15.75), (12.5, 13.5))
    assert timeline.makespan == 22.75
    assert play(read("0F0,1F0,1B0,0B0\n"), Durations(send=5, send_back=7)).makespan == 6


@pytest.mark.case
def test_stages_of_their_own_durations():
    schedule = read("0F0,0B0\n1F0,1B0\n")
    timeline = play(schedule, Durations(forward=[1, 2], backward=[4, 8]))
    assert timeline.starts == ((0, 11), (1, 3))
    assert timeline.ends == ((1, 15), (3, 11))
    assert timeline.busy == (5, 10)
    assert timeline.bubbles == pytest.approx((10 / 15, 5 / 15))
    assert timeline.bubble == pytest.approx(0.5)


@pytest.mark.case
def test_a_large_schedule_is_generated_and_played_in_a_second():
    """64 stages on ranks, 4 a rank, 512 microbatches: 262,144 actions, in seconds of processor time, best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        schedule = generate("interleaved", 64, 512, 4)
        timeline = play(schedule)
        best = min(best, time.process_time() - began)
    assert sum(map(len, schedule.order)) == 262_144
    assert timeline.bubble == pytest.approx(63 / (4 * 512 + 63))
    assert best < 1.0


@pytest.mark.law
@pytest.mark.parametrize("name", SCHEDULES)
def test_too_few_microbatches_are_refused_with_the_law_and_the_cure(name):
    least = SCHEDULES[name].least * 4
    assert laws_of(name, 4, least) == []
    with pytest.raises(Refused) as caught:
        generate(name, 4, least - 1, at="plan.toml: strategy[1]")
    (fault,) = caught.value.faults
    assert fault.code == "P112"
    assert fault.have == f"microbatches = {least - 1}, ranks = 4, fewest = {least}"
    assert fault.cure.startswith(f"microbatches = {least} or more, or 3 ranks or fewer")
    assert fault.at == "plan.toml: strategy[1].microbatches"


@pytest.mark.case
def test_every_broken_law_is_said_at_once():
    assert [f.at for f in laws_of("zbv", 0, 0, 3)] == ["ranks", "microbatches", "virtual"]
    assert [f.at for f in laws_of("dualpipev", 2, 3, 1)] == ["microbatches", "virtual"]
    (unknown,) = laws_of("gpip", 2, 2)
    assert unknown.code == "P107"
    assert "gpipe" in unknown.cure
