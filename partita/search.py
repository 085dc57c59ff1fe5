"""Finds the best plan: every mesh of the given strategies, what is legal, what fits, what is fastest.

    strategies ─▶ families (at most one of each place) ─▶ meshes (factors of the ranks, every order)
        ─▶ legal? (the plan's laws, the strategy's own check) ─▶ fits? (memory fold) ─▶ ranked (time, memory or traffic fold)

Strategies that use no axis and stand at the place of memory (recompute, offload) cost time and save memory: they are tried
where a plan does not fit without them, alone and then all together, or where memory is the aim.

Each loser keeps its reason, with a number. The bound is the time of one device's compute divided evenly over the ranks, with no
communication: no plan of these ranks can beat it by more than what smaller pieces win in the caches.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from partita.cluster import Cluster
from partita.cost.collective import crowding
from partita.cost.figures import Figures
from partita.errors import Fault, Refused
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program.program import Program
from partita.simulate import costs_of, estimate, run_clock
from partita.strategy import Place, Strategy, check, compose
from partita.units import format_bytes
from partita.workload import Workload

Candidate = tuple[Plan, Figures, str]  # with its family
AIMS = ("time", "memory", "traffic")


@dataclass(frozen=True)
class Choice:
    """A legal plan that fits: its place in the ranking (1 is best) and its predicted figures."""

    plan: Plan
    figures: Figures
    family: str
    place: int


@dataclass(frozen=True)
class Rejected:
    """A plan that lost: its family, as `ddp(dp=4) x tensor_parallel(tp=2)`, and why, with a number."""

    family: str
    reason: str


@dataclass(frozen=True)
class Choices:
    """What a search found.

    Args:
        plans: Legal plans that fit, best first.
        rejected: Every other candidate, and every plan behind the best, each with its reason.
        lower_bound_seconds: Compute divided evenly, no communication.
        gap: How far the best plan's time is above the bound, as a fraction.
        search_seconds: Wall time.
        candidates: Plans looked at.
    """

    plans: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    lower_bound_seconds: float
    gap: float
    search_seconds: float
    candidates: int

    @property
    def best(self) -> Plan:
        return self.plans[0].plan

    @property
    def runner_up(self) -> Plan | None:
        return self.plans[1].plan if len(self.plans) > 1 else None


def search(
    program: Program,
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
        program: Of one device.
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
    found: list[Candidate] = []
    rejected: list[Rejected] = []
    looked = 0
    savers = [cls for cls in strategies if cls.place == Place.MEMORY and not cls().axes]
    for mesh, chosen in candidates(ranks, [cls for cls in strategies if cls not in savers]):
        looked += 1
        family = family_of(mesh, chosen)
        judged = _judge(program, cluster, workload, mesh, chosen)
        if isinstance(judged, str):
            rejected.append(Rejected(family, judged))
            continue
        fits = judged[1].peak <= room
        found += [(*judged, family)] if fits else []
        if fits and minimise != "memory":
            continue
        saved = list(_lighter(program, cluster, workload, (mesh, chosen), savers, room))
        looked += len(saved)
        best = min((s for s in saved if s[1].peak <= room), key=lambda s: _aim(s[1], minimise), default=None)
        found += [best] if best else []
        if not fits:
            rejected.append(Rejected(family, _over(judged[1], room, saved, best)))
    if not found:
        raise Refused(_nothing(ranks, cluster, rejected))
    found.sort(key=lambda item: (_aim(item[1], minimise), item[1].step_seconds, len(item[0].strategies)))
    plans = tuple(Choice(plan, figures, family, at + 1) for at, (plan, figures, family) in enumerate(found))
    behind = [Rejected(c.family, _behind(c.figures, plans[0].figures, minimise)) for c in plans[1:]]
    best, bound = plans[0].figures.step_seconds, lower_bound(program, cluster, ranks)
    bound = min(bound, best)  # a piece that fits a cache may be faster than its share
    return Choices(plans, (*behind, *rejected), bound, best / bound - 1, time.perf_counter() - began, looked)


def _lighter(
    program: Program,
    cluster: Cluster,
    workload: Workload,
    plain: tuple[Mesh, tuple[Strategy, ...]],
    savers: Sequence[type[Strategy]],
    room: float,
) -> Iterator[Candidate]:
    """A plan with what saves memory; with all of it together only where nothing alone makes it fit."""
    mesh, chosen = plain
    fits = False
    for extra in _savings(savers):
        if len(extra) > 1 and fits:
            return
        all_of_it = tuple(sorted((*chosen, *extra), key=lambda s: s.place))
        judged = _judge(program, cluster, workload, mesh, all_of_it)
        if not isinstance(judged, str):
            fits |= judged[1].peak <= room
            yield *judged, family_of(mesh, all_of_it)


def _savings(savers: Sequence[type[Strategy]]) -> Iterator[tuple[Strategy, ...]]:
    """What may be added to a plan to save memory: each offer alone, then the last offers of all together."""
    offers = [list(cls.offers()) for cls in savers]
    yield from ((one,) for some in offers for one in some)
    if len(offers) > 1:
        yield tuple(some[-1] for some in offers)


def _over(figures: Figures, room: float, saved: Sequence[Candidate], best: Candidate | None) -> str:
    """Why a plan does not fit, and what would make it."""
    over, peak = format_bytes(figures.peak - room), format_bytes(figures.peak)
    reason = f"does not fit: {over} over the {format_bytes(room)} of a device (peak {peak})"
    if best is not None:
        slower = 100 * (best[1].step_seconds / figures.step_seconds - 1)
        return f"{reason}; fits as {best[2]}, {slower:.3g} % slower"
    if saved:
        least = min(saved, key=lambda s: s[1].peak)
        return f"{reason}; as {least[2]} still {format_bytes(least[1].peak - room)} over"
    return reason


def candidates(ranks: int, strategies: Sequence[type[Strategy]]) -> Iterator[tuple[Mesh, tuple[Strategy, ...]]]:
    """Every mesh and strategies of `ranks` ranks: at most one of each place, axes of 2 or more, in every order."""
    if ranks == 1:
        yield Mesh(), ()
        return
    places = sorted({cls.place for cls in strategies})
    options = [[None, *(cls for cls in strategies if cls.place == place)] for place in places]
    for combination in product(*options):
        chosen = tuple(cls() for cls in combination if cls is not None)  # innermost first, as places are
        axes = [axis for strategy in chosen for axis in strategy.axes]
        for sizes in factors(ranks, len(axes)):
            for order in permutations(zip(axes, sizes, strict=True)):
                yield Mesh(order), chosen


def factors(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """The ways to write n as an ordered product of `parts` factors of at least 2.

    Example:
        >>> list(factors(8, 2))
        [(2, 4), (4, 2)]
    """
    if parts == 0:
        if n == 1:
            yield ()
        return
    for first in range(2, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in factors(n // first, parts - 1))


def family_of(mesh: Mesh, strategies: Sequence[Strategy]) -> str:
    """A plan in one line, axes outermost first."""
    owner = {axis: strategy.name for strategy in strategies for axis in strategy.axes}
    split = [f"{owner[axis]}({axis}={size})" for axis, size in mesh.axes] or ["one device"]
    return " + ".join([" x ".join(split), *(_named(s) for s in strategies if not s.axes)])


def _named(strategy: Strategy) -> str:
    """A strategy without an axis, with the settings that are not its defaults."""
    default = type(strategy)().settings()
    other = [f"{k}={v}" for k, v in strategy.settings().items() if v != default[k]]
    return f"{strategy.name}({', '.join(other)})" if other else strategy.name


def _judge(
    program: Program, cluster: Cluster, workload: Workload, mesh: Mesh, chosen: tuple[Strategy, ...]
) -> tuple[Plan, Figures] | str:
    """The plan and its figures, or why it cannot be."""
    try:
        plan = Plan(workload, cluster.name, mesh.ranks, mesh, chosen)
        if faults := check(program, chosen, mesh):
            return _reason(faults)
        said = compose(program, chosen, mesh)
    except Refused as refused:
        return _reason(list(refused.faults))
    return plan, estimate(said, cluster, mesh, workload)


def _reason(faults: list[Fault]) -> str:
    return "; ".join(dict.fromkeys(f"{fault.what} ({fault.have})" if fault.have else fault.what for fault in faults))


def _aim(figures: Figures, minimise: str) -> float:
    if minimise == "memory":
        return figures.peak
    if minimise == "traffic":
        return sum(row.bytes for row in figures.traffic)
    return figures.step_seconds


def _behind(figures: Figures, best: Figures, minimise: str) -> str:
    mine, least = _aim(figures, minimise), _aim(best, minimise)
    if minimise == "time":
        return f"{100 * (mine / least - 1):.3g} % slower"
    more = f"{100 * (mine / least - 1):.3g} % more" if least else format_bytes(mine)
    return f"{more} {minimise}"


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
