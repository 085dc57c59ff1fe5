"""The clock: streams, overlap, microbatches, and figures that add up."""

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.cluster import Number, named
from partita.mesh import Mesh
from partita.program.events import Collective, Phase
from partita.simulate import Streams, costs_of, estimate, simulate, traffic
from partita.workload import Workload

DP4 = Mesh.of({"dp": 4})
CALL = Collective("all_reduce", "dp", (), 8, "float32", Phase.BACKWARD, overlapped=True)


def sharing(cluster, u, w):
    numbers = {"interference.compute": Number(u), "interference.communication": Number(w)}
    return replace(cluster, numbers={**cluster.numbers, **numbers})


@pytest.mark.law
@given(d=st.floats(1e-6, 10), c=st.floats(1e-6, 10), u=st.floats(0, 0.5), w=st.floats(0, 0.5))
def test_two_rates_lie_between_perfect_hiding_and_none(d, c, u, w):
    streams = Streams(u, w)
    streams.launch("dp", c, CALL)
    streams.run(d)
    streams.wait()
    assert max(d, c) * (1 - 1e-9) <= streams.now <= (d + c) * (1 + 1e-9)
    assert streams.now == pytest.approx(d + streams.exposed["dp"], rel=1e-6)


@pytest.mark.case
def test_the_two_rate_model_by_hand():
    streams = Streams(0.25, 0.5)
    streams.launch("dp", 1.0, CALL)  # takes 2 s beside compute, which loses 0.5 s of work in them
    streams.run(3.0)
    assert streams.now == pytest.approx(3.5)


def test_calls_on_one_axis_queue_and_on_two_axes_do_not():
    one, two = Streams(0, 0), Streams(0, 0)
    for axis in ("dp", "dp"):
        one.launch(axis, 1.0, CALL)
    for axis in ("dp", "tp"):
        two.launch(axis, 1.0, CALL)
    one.wait()
    two.wait()
    assert (one.now, two.now) == (2.0, 1.0)


def test_overlap_hides_on_its_own_hardware_and_buys_nothing_on_shared_cores(chain):
    program = chain(layers=6, tokens=4096, width=512, bucket=True)
    alone = simulate(program, sharing(named("cpu"), 0, 0), DP4)
    shared = simulate(program, sharing(named("cpu"), 0.5, 0.5), DP4)
    calls = 6 * (shared.seconds - shared.compute) / 6
    assert alone.seconds - alone.compute < calls / 3
    assert shared.seconds == pytest.approx(shared.compute + sum(shared.exposed.values()))


def test_a_blocking_call_is_exposed_whole(builder, chain):
    b = builder()
    x = b.tensor(64, 64)
    b.call("all_reduce", "dp", (x,), 1 << 20, Phase.FORWARD)
    line = simulate(b.program(), named("8x8-h100"), DP4)
    assert line.seconds == line.exposed["dp"] > 0


@pytest.mark.law
@pytest.mark.parametrize("cluster", ["8x8-h100", "2x2-a100", "cpu"])
def test_terms_add_up_to_the_step(chain, cluster):
    found = estimate(chain(4, 512, 256, bucket=True), named(cluster), DP4, Workload("mlp"))
    assert sum(term.seconds for term in found.why) == pytest.approx(found.step_seconds, rel=1e-9)
    assert found.step_seconds == pytest.approx(found.compute_seconds + found.exposed_communication_seconds)
    assert all(term.source and term.constant for term in found.why)
    assert found.step_seconds_band[0] < found.step_seconds < found.step_seconds_band[1]


def test_microbatches_repeat_all_but_buckets_and_optimizer(chain):
    one, three = chain(bucket=True), replace(chain(bucket=True), microbatches=3)
    a, b = simulate(one, named("cpu"), DP4), simulate(three, named("cpu"), DP4)
    costs = costs_of(one, named("cpu"), DP4)
    once = costs.handling(last=True) - costs.handling(last=False)
    once += sum(costs.seconds[id(e)] for e in one.events() if e.phase == Phase.OPTIMIZER)
    assert b.compute == pytest.approx(3 * a.compute - 2 * once)
    assert traffic(one, named("cpu"), DP4) == traffic(three, named("cpu"), DP4)


def test_more_ranks_than_cores_widen_the_band_and_say_so(chain):
    fits = estimate(chain(), named("1x4-cpu"), DP4, Workload("mlp"))
    crowded = estimate(chain(), named("1x2-cpu"), DP4, Workload("mlp"))
    width = [f.step_seconds_band[1] / f.step_seconds_band[0] for f in (fits, crowded)]
    assert width[1] == pytest.approx(4 * width[0])
    assert crowded.step_seconds == pytest.approx(2 * fits.step_seconds, rel=0.1)
    assert any("share 2 cores" in note for note in crowded.notes)


def test_spans_follow_each_other_on_each_stream(chain):
    program = chain(4, 512, 256, bucket=True)
    line = simulate(program, named("8x8-h100"), DP4, traced=True)
    assert line.seconds == pytest.approx(simulate(program, named("8x8-h100"), DP4).seconds)
    assert len(line.spans) == sum(1 for _ in program.events())
    for stream in ("compute", "dp"):
        spans = [s for s in line.spans if s.stream == stream]
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(spans))
    assert max(s.end for s in line.spans) == pytest.approx(line.seconds)


def test_a_plan_that_does_not_fit_says_so(chain):
    small = named("1x4-cpu")
    tight = replace(small, numbers={**small.numbers, "device.memory": Number(1.0)})
    assert estimate(chain(), small, DP4, Workload("mlp")).fits
    assert not estimate(chain(), tight, DP4, Workload("mlp")).fits


def test_the_clock_runs_400_000_events_a_second():
    streams, events = Streams(0.1, 0.1), 200_000
    start = time.process_time()
    for _ in range(events // 4):
        streams.run(1e-3)
        streams.run(1e-3)
        streams.launch("dp", 1e-4, CALL)
        streams.run(1e-3)
    streams.wait()
    assert events / (time.process_time() - start) > 4e5
