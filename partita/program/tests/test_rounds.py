"""A period of several steps: what happens in some of them only, and the figures of the mean step."""

from dataclasses import replace

import pytest

from partita.cluster import cluster_of
from partita.mesh import Mesh
from partita.program import Collective, Compute, Phase
from partita.program.events import Repeat
from partita.program.fold import unfold
from partita.program.rounds import rounds_of, usual
from partita.program.text import from_json, to_json
from partita.runtime.programs import program_of
from partita.simulate import predict
from partita.workload import GPT, Workload

TWO = Mesh.of({"dp": 2})
WORKLOAD = Workload("gpt", GPT(layers=5, hidden=32, heads=4, vocab=64, sequence=8), batch=8)


def every(*numbers, nbytes=1 << 20, phase=Phase.OPTIMIZER):
    return Repeat(1, (Collective("all_reduce", "dp", (), nbytes, "float32", phase, "flat"),), when=numbers)


def periodic(period, *segments):

    program = program_of(WORKLOAD)
    return replace(program, segments=(*program.segments, *segments), period=period, axes={"dp": 2})


@pytest.mark.law
def test_rounds_are_the_kinds_of_steps_and_their_counts_add_up_to_the_period():
    program = periodic(6, every(0), every(0, 2, 4, nbytes=8))
    found = rounds_of([program])
    assert [(r.first, r.count, [c.nbytes for c in r.roles[0].collectives()]) for r in found] == [
        (0, 1, [1 << 20, 8]),
        (1, 3, []),
        (2, 2, [8]),
    ]
    assert usual([program])[0].collectives() == []
    for number in range(18):  # from the start of training, period after period
        wanted = next(r for r in found if program.kind(r.first) == program.kind(number))
        assert program.step(number) == wanted.roles[0]


@pytest.mark.law
def test_a_step_is_asked_of_a_round_and_never_of_a_period():
    program = periodic(2, every(1))
    for read in (program.collectives, program.flop):
        with pytest.raises(AssertionError, match="rounds"):
            read()


@pytest.mark.law
def test_figures_of_a_period_are_the_mean_of_its_steps_and_memory_that_of_the_fullest():
    cluster, period = cluster_of("8x8-h100"), 5
    silent, loud = periodic(1), periodic(1, every())
    one, two, both = (predict([p], cluster, TWO, WORKLOAD) for p in (silent, loud, periodic(period, every(3))))
    assert both.step_seconds == pytest.approx((4 * one.step_seconds + two.step_seconds) / 5, rel=1e-12)
    (row,), (whole,) = both.traffic, two.traffic
    assert (row.count, row.bytes, row.backend_bytes) == (1 / 5, whole.bytes / 5, whole.backend_bytes / 5)
    assert both.peak == max(one.peak, two.peak)
    assert both.flop == one.flop
    assert sum(t.seconds for t in both.why) == pytest.approx(both.step_seconds, rel=1e-9)


@pytest.mark.law
def test_rounds_survive_writing_out_and_writing_down():
    program = periodic(3, every(0), every(2, phase=Phase.SYNC))
    assert from_json(to_json(program)) == program
    flat = unfold(program)
    assert [s.when for s in flat.segments] == [(), (2,), (), (0,)]
    assert sum(isinstance(e, Compute) for e in flat.step(1).events()) == sum(isinstance(e, Compute) for e in flat.events())
    counts = [[len(r.roles[0].collectives()) for r in rounds_of([p])] for p in (program, flat)]
    assert counts == [[1, 0, 1]] * 2
