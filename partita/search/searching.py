"""Finds the best plan: every mesh of the given strategies, what is legal, what fits, what is fastest.

    strategies ─▶ families (at most one of each place) ─▶ meshes (factors of the ranks, every order)
        ─▶ legal? (the plan's laws, the strategy's own check) ─▶ fits? (memory fold) ─▶ ranked (time, memory or traffic fold)

Pipelines come after: what no bubble rules out is looked at (`pipelines.py`). Strategies that use no axis and stand at the place
of memory (recompute, offload) cost time and save memory: they are tried where a plan that could be the best does not fit
without them, all together and then alone, or where memory is the aim.

Each loser keeps its reason, with a number. The bound is the time of one device's compute divided evenly over the ranks, with no
communication: no plan of these ranks can beat it by more than what smaller pieces win in the caches.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from partita.cluster import Cluster
from partita.cost.collective import crowding
from partita.errors import Fault, Refused
from partita.mesh import Mesh
from partita.program.program import Program
from partita.search.candidates import candidates, family_of, layouts
from partita.search.choices import AIMS, Candidate, Choice, Choices, Rejected, aimed, behind, over
from partita.search.judging import Judge
from partita.search.pipelines import Pipelines
from partita.simulate import costs_of, run_clock
from partita.strategy import Pipelined, Place, Strategy
from partita.workload import Workload

ALL = 24  # plans that are looked at in full, whatever they are
WORTH = 1.1  # times the fastest so far: of slower plans no memory is asked after that

HELPED = 4  # plans that fit with less memory, the fastest without it first: what is behind them is not tried


def search(
    program: Program | Callable[[int], Program],
    cluster: Cluster,
    ranks: int,
    workload: Workload,
    strategies: Sequence[type[Strategy]],
    *,
    minimise: str = "time",
    memory: float | None = None,
) -> Choices:
    """The plans of `ranks` ranks, best first.

    Args:
        program: Of one device; or what it is with so many microbatches a step, by which pipelines are tried too.
        cluster, ranks: Where, and on how many devices.
        workload: What is trained.
        strategies: Classes to combine, with their default settings.
        minimise: "time", "memory" or "traffic".
        memory: Bytes a rank may use; None means what the device has.

    Raises:
        Refused: If no plan is legal and fits, with every reason (P111), or `minimise` is unknown (P107).
    """
    began = time.perf_counter()
    if minimise not in AIMS:
        raise Refused(Fault("P107", f"cannot minimise {minimise!r}", cure=", ".join(AIMS), at="--minimise"))
    room = min(cluster.room(ranks), memory if memory is not None else float("inf"))
    savers = [cls for cls in strategies if cls.place == Place.MEMORY and not cls().axes]
    of = (lambda _: program) if isinstance(program, Program) else cache(program)
    judge = Judge(of, cluster, workload, savers, room)
    found: list[Candidate] = []
    large: list[Candidate] = []
    rejected: list[Rejected] = []
    split = [cls for cls in strategies if cls not in savers]
    fastest = float("inf")
    for mesh, chosen in candidates(ranks, split):
        limit = fastest if judge.looked >= ALL else float("inf")
        floor = judge.floors.of(mesh, chosen)
        slow = f"at least {100 * (floor / limit - 1):.3g} % slower than the best" if floor > limit else ""
        judged = slow or judge.judge(mesh, chosen, WORTH * limit)
        if isinstance(judged, str):
            rejected.append(Rejected(family_of(mesh, chosen), judged))
            continue
        (found if judged[1].peak <= room else large).append(judged)
        if minimise == "time" and judged[1].peak <= room:
            fastest = min(fastest, judged[1].step_seconds)
    bound = lower_bound(of(workload.accumulate), cluster, ranks)
    kinds = [cls for cls in split if issubclass(cls, Pipelined)]
    if kinds and not isinstance(program, Program):
        fastest = min((c[1].step_seconds for c in found), default=float("inf"))
        pipelines = Pipelines(judge, kinds, fastest if minimise == "time" else float("inf"), bound)
        pipelines.look(layouts(ranks, split))
        found, large, rejected = found + pipelines.found, large + pipelines.large, rejected + pipelines.rejected
    rejected += _lightened(judge, found, large, minimise)
    if not found:
        raise Refused(_nothing(ranks, cluster, rejected))
    found.sort(key=lambda item: (aimed(item[1], minimise), item[1].step_seconds, len(item[0].strategies)))
    plans = tuple(Choice(plan, figures, family, at + 1) for at, (plan, figures, family) in enumerate(found))
    losers = [Rejected(c.family, behind(c.figures, plans[0].figures, minimise)) for c in plans[1:]]
    best = plans[0].figures.step_seconds
    bound = min(bound, best)  # a piece that fits a cache may be faster than its share
    return Choices(plans, (*losers, *rejected), bound, best / bound - 1, time.perf_counter() - began, judge.looked)


def _lightened(judge: Judge, found: list[Candidate], large: Sequence[Candidate], minimise: str) -> list[Rejected]:
    """Adds to `found` what fits with less memory; why plans that do not fit lost."""
    if minimise == "memory":
        found += [best for plain in list(found) if (best := min(judge.lighter(plain), key=lambda s: s[1].peak, default=None))]
    fastest = min((figures.step_seconds for _, figures, _ in found), default=float("inf"))
    rejected, helped = [], 0
    for plain in sorted(large, key=lambda c: c[1].step_seconds):
        worth = minimise == "memory" or (plain[1].step_seconds < fastest and helped < HELPED)
        tried = judge.lighter(plain) if worth else []
        best = min((s for s in tried if s[1].peak <= judge.room), key=lambda s: aimed(s[1], minimise), default=None)
        if best:
            helped += 1
            found.append(best)
            fastest = min(fastest, best[1].step_seconds)
        rejected.append(Rejected(plain[2], over(plain[1], judge.room, tried, best)))
    return rejected


def lower_bound(program: Program, cluster: Cluster, ranks: int) -> float:
    """Seconds of the whole program's compute on one device, divided over the ranks (over the cores, if ranks share them)."""
    alone = replace(program, axes={})
    one = run_clock(alone, cluster, costs_of(alone, cluster, Mesh()))
    return one.compute * crowding(ranks, cluster) / ranks


def _nothing(ranks: int, cluster: Cluster, rejected: Sequence[Rejected]) -> Fault:
    return Fault(
        "P111",
        f"no plan of {ranks} ranks on {cluster.name!r} works",
        have="\n".join(f"{r.family}: {r.reason}" for r in rejected) or "no strategy to split with",
        law="a plan must be legal and its peak memory fit a device",
        cure="more ranks, a smaller batch, or accumulate more microbatches",
        at="--ranks",
    )
