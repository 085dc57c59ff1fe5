"""A search offers pipelines: where nothing else fits one is found, and what it did not look at is told with a number."""

import re
from dataclasses import replace

import pytest

from partita.cluster import cluster_of
from partita.program.schedules import play
from partita.runtime.programs import program_of
from partita.search import search
from partita.search.candidates import layouts
from partita.search.pipelines import LOOKED
from partita.strategies import DDP, GARDEN, Recompute
from partita.workload import GPT, Workload

WORK = Workload("gpt", GPT(layers=16, hidden=256, heads=4, vocab=256, sequence=64), batch=64)
PIPELINES = [kind for name, kind in GARDEN.items() if kind.place.name == "PIPELINE"]
CLUSTER = cluster_of("2x4-h100")


def parted(microbatches):
    return program_of(replace(WORK, accumulate=microbatches))


def found(kinds=(DDP, *PIPELINES), **more):
    return search(parted, CLUSTER, 8, WORK, kinds, **more)


@pytest.mark.law
def test_layouts_are_every_depth_with_every_family_inside():
    got = [(layout.depth, [s.name for s in layout.inside], layout.axes) for layout in layouts(8, [DDP, *PIPELINES])]
    assert got == [(2, ["ddp"], (("dp", 4),)), (4, ["ddp"], (("dp", 2),)), (8, [], ())]


@pytest.mark.case
def test_a_pipeline_is_found_where_a_whole_model_does_not_fit():
    whole = found([DDP]).plans[0].figures
    got = found(memory=0.6 * whole.peak)
    best = got.plans[0]
    assert best.plan.strategies[-1].place.name == "PIPELINE"
    assert re.match(r"\w+\(pp=\d, microbatches=\d+\)", best.family)
    assert best.figures.peak <= 0.6 * whole.peak
    reasons = {r.family: r.reason for r in got.rejected}
    assert reasons["ddp(dp=8)"].startswith("does not fit")
    kinds = {c.plan.strategies[-1].name for c in got.plans} | {family.partition("(")[0] for family in reasons}
    assert kinds >= {"one_f_one_b", "interleaved", "zero_bubble", "zbv", "gpipe"}


@pytest.mark.law
def test_every_pipeline_that_lost_says_a_number():
    got = found()
    lost = [r for r in got.rejected if "pp=" in r.family or "deep" in r.family]
    assert lost
    assert all(re.search(r"\d", r.reason) for r in lost)


@pytest.mark.law
def test_no_bubble_rules_out_what_would_be_the_best():
    """The bound is below the time of every plan that was looked at."""
    got = found([DDP, Recompute, *PIPELINES], memory=None, minimise="memory")
    for choice in got.plans:
        pipeline = choice.plan.strategies[-1]
        if pipeline.place.name == "PIPELINE":
            table = play(pipeline.schedule(choice.plan.mesh.size("pp")))
            assert got.lower_bound_seconds / (1 - table.bubble) <= 1.05 * choice.figures.step_seconds


@pytest.mark.case
def test_a_file_of_the_users_is_never_offered():
    assert not any("own_schedule" in r.family for r in found().rejected)


@pytest.mark.law
def test_few_layouts_are_looked_at():
    got = found(minimise="traffic")
    assert got.candidates <= 1 + LOOKED + len(PIPELINES) + 3
