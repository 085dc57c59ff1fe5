"""Finds the best plan: every mesh of the given strategies, what is legal, what fits, what is fastest.

    strategies ─▶ families (at most one of each place) ─▶ meshes (factors of the ranks, every order)
        ─▶ legal? (the plan's laws, the strategy's own check) ─▶ fits? (memory fold) ─▶ ranked (time, memory or traffic fold)

Strategies that use no axis and stand at the place of memory (recompute, offload) cost time and save memory: they are tried
where a plan that could be the best does not fit without them, all together and then alone, or where memory is the aim.

Each loser keeps its reason, with a number. The bound is the time of one device's compute divided evenly over the ranks, with no
communication: no plan of these ranks can beat it by more than what smaller pieces win in the caches.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product

from partita.cluster import Cluster
from partita.cost.collective import crowding
from partita.cost.figures import Figures
from partita.errors import Fault, Refused
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program.program import Program
from partita.simulate import costs_of, predict, run_clock
from partita.strategy import Place, Strategy, check, compose_roles
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
    large: list[Candidate] = []
    for mesh, chosen in candidates(ranks, [cls for cls in strategies if cls not in savers]):
        looked += 1
        family = family_of(mesh, chosen)
        judged = _judge(program, cluster, workload, mesh, chosen)
        if isinstance(judged, str):
            rejected.append(Rejected(family, judged))
        else:
            (found if judged[1].peak <= room else large).append((*judged, family))
    task = _Task(program, cluster, workload, savers, room)
    if minimise == "memory":
        found += [best for plain in list(found) if (best := min(task.lighter(plain), key=lambda s: s[1].peak, default=None))]
    fastest = min((figures.step_seconds for _, figures, _ in found), default=float("inf"))
    for plain in sorted(large, key=lambda c: c[1].step_seconds):
        tried = task.lighter(plain) if minimise == "memory" or plain[1].step_seconds < fastest else []
        best = min((s for s in tried if s[1].peak <= room), key=lambda s: _aim(s[1], minimise), default=None)
        if best:
            found.append(best)
            fastest = min(fastest, best[1].step_seconds)
        rejected.append(Rejected(plain[2], _over(plain[1], room, tried, best)))
    looked += task.looked
    if not found:
        raise Refused(_nothing(ranks, cluster, rejected))
    found.sort(key=lambda item: (_aim(item[1], minimise), item[1].step_seconds, len(item[0].strategies)))
    plans = tuple(Choice(plan, figures, family, at + 1) for at, (plan, figures, family) in enumerate(found))
    behind = [Rejected(c.family, _behind(c.figures, plans[0].figures, minimise)) for c in plans[1:]]
    best, bound = plans[0].figures.step_seconds, lower_bound(program, cluster, ranks)
    bound = min(bound, best)  # a piece that fits a cache may be faster than its share
    return Choices(plans, (*behind, *rejected), bound, best / bound - 1, time.perf_counter() - began, looked)


@dataclass
class _Task:
    """What plans are judged by, and what may be added to one that does not fit.

    Args:
        savers: Classes of strategies that save memory and never time.
        room: Bytes of a device.
        looked: Plans looked at so far.
        known: What was best added to a plan, whatever the order of its axes: memory does not know the order.
    """

    program: Program
    cluster: Cluster
    workload: Workload
    savers: Sequence[type[Strategy]]
    room: float
    looked: int = 0
    known: dict[object, tuple[Strategy, ...]] = field(default_factory=dict)

    def lighter(self, plain: Candidate) -> list[Candidate]:
        """A plan with all that saves memory and, if that fits, with less of it."""
        offers = [list(cls.offers()) for cls in self.savers]
        alike = plain[0].strategies, tuple(sorted(plain[0].mesh.axes))
        if not offers or alike in self.known:
            return self._with(plain, self.known[alike]) if offers else []
        most = tuple(some[-1] for some in offers)
        tried = {most: self._with(plain, most)}
        if any(c[1].peak <= self.room for c in tried[most]):
            tried |= {(one,): self._with(plain, (one,)) for some in offers for one in some}
        tried = dict(sorted(tried.items(), key=lambda item: len(item[0])))  # of two alike, the simpler
        fit = [extra for extra, found in tried.items() if found and found[0][1].peak <= self.room]
        self.known[alike] = min(fit, key=lambda extra: tried[extra][0][1].step_seconds, default=most)
        return [c for found in tried.values() for c in found]

    def _with(self, plain: Candidate, extra: Sequence[Strategy]) -> list[Candidate]:
        plan = plain[0]
        chosen = tuple(sorted((*plan.strategies, *extra), key=lambda s: s.place))
        self.looked += 1
        judged = _judge(self.program, self.cluster, self.workload, plan.mesh, chosen)
        return [] if isinstance(judged, str) else [(*judged, family_of(plan.mesh, chosen))]


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
    strategies = [cls for cls in strategies if cls.place != Place.PIPELINE]  # their microbatches are the user's to choose yet
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
        said = compose_roles(program, chosen, mesh)
    except Refused as refused:
        return _reason(list(refused.faults))
    return plan, predict(said, cluster, mesh, workload)


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
