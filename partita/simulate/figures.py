"""Figures of a plan: the folds of its Program′ on a cluster, and which terms they are made of."""

from dataclasses import replace

from partita.cluster import Cluster
from partita.cost.collective import backend_bytes
from partita.cost.compute import Price
from partita.cost.figures import Figures, Traffic, Why
from partita.cost.memory import Occupancy, occupancy
from partita.mesh import Mesh
from partita.program.events import WIDTH, Collective, Compute
from partita.program.program import Program
from partita.simulate.clock import Timeline, run_clock
from partita.simulate.costs import Costs, costs_of
from partita.units import format_bytes, format_count
from partita.workload import Workload


def estimate(program: Program, cluster: Cluster, mesh: Mesh, workload: Workload, held: Occupancy | None = None) -> Figures:
    """Time, memory and traffic of one optimizer step of a plan.

    Args:
        program: Program′, as rewritten by every strategy of the plan.
        cluster: Where it runs.
        mesh: The plan's.
        workload: Samples and dtype.
        held: Its memory, where that is known.
    """
    costs = costs_of(program, cluster, mesh)
    line = run_clock(program, cluster, costs)
    memory = held or occupancy(program, cluster.backend, cluster.kernel)
    low, high, notes = band_of(cluster, costs.crowd, mesh)
    room = cluster.room(mesh.ranks)
    sequence = workload.sequence
    return Figures(
        step_seconds=line.seconds,
        step_seconds_band=(line.seconds * low, line.seconds * high),
        memory=dict(memory.parts),
        peak=memory.peak,
        peak_at=memory.at,
        traffic=traffic(program, cluster, mesh),
        flop=float(program.flop()),
        compute_seconds=line.compute,
        exposed_communication_seconds=line.seconds - line.compute,
        device_flop_per_second=cluster.flop_per_second(workload.dtype),
        samples=workload.batch,
        tokens=workload.batch * sequence if sequence else None,
        fits=memory.peak <= room,
        opaque_share=program.opaque_share(),
        why=explain(program, cluster, costs, line),
        notes=(*cluster.notes, *notes, *program.notes, f"room for tensors on a device: {format_bytes(room)}"),
    )


def band_of(cluster: Cluster, crowd: float, mesh: Mesh) -> tuple[float, float, tuple[str, ...]]:
    low, high = cluster.value("band.low"), cluster.value("band.high")
    if crowd == 1:
        return low, high, ()
    shared = f"{mesh.ranks} ranks share {mesh.ranks / crowd:.3g} cores"
    note = f"{shared}: time is the scheduler's, so the band is {crowd:.3g} times as wide"
    return low / crowd, high * crowd, (note,)


def traffic(program: Program, cluster: Cluster, mesh: Mesh) -> tuple[Traffic, ...]:
    """What a rank sends in one step, by axis and op, sorted; what it receives is the sender's."""
    rows: dict[tuple[str, str], list[float]] = {}
    for event, times in program.counted():
        if isinstance(event, Collective) and event.op != "receive":
            row = rows.setdefault((event.axis, event.op), [0, 0, 0.0])
            row[0] += times
            row[1] += times * event.nbytes
            row[2] += times * backend_bytes(cluster.backend, event.op, event.nbytes, mesh.size(event.axis), WIDTH[event.dtype])
    return tuple(Traffic(axis, op, *row) for (axis, op), row in sorted(rows.items()))


def explain(program: Program, cluster: Cluster, costs: Costs, line: Timeline) -> tuple[Why, ...]:
    """The step's time by term, largest first; the seconds of all terms add up to the step."""
    rows: dict[tuple[str, Price], list[float]] = {}
    for event, times in program.counted():
        if isinstance(event, Compute):
            work, found = costs.prices[id(event)]
            row = rows.setdefault((work.kind, replace(found, seconds=0.0)), [0.0, 0.0, 0.0])
            row[0] += times * costs.seconds[id(event)]
            row[1] += times * work.flop
            row[2] += times * work.bytes
    for (work, found), times in ((costs.adding, program.microbatches), (costs.clearing, 1)):
        row = rows.setdefault((work.kind, replace(found, seconds=0.0)), [0.0, 0.0, 0.0])
        row[0] += times * found.seconds * costs.crowd
        row[2] += times * work.bytes
    terms = [_compute_term(kind, found, row, cluster) for (kind, found), row in rows.items() if row[0]]
    terms += [_wait_term(axis, seconds, program, cluster, costs) for axis, seconds in line.exposed.items() if seconds]
    return tuple(sorted(terms, key=lambda term: -term.seconds))


FORMULAS = {
    "flop": "flop / (peak x efficiency) + launch",
    "bytes": "bytes / (bandwidth x efficiency) + launch",
    "launch": "ops x launch",
    "measured": "measured time of the nearest shapes",
}


def _compute_term(kind: str, found: Price, row: list[float], cluster: Cluster) -> Why:
    seconds, flop, moved = row
    amount = f"{format_count(flop)}flop" if flop else format_bytes(moved)
    if found.key in cluster.numbers:
        constant = f"{found.key} = {cluster.value(found.key):.4g}"
        return Why(kind, FORMULAS[found.bound], amount, constant, cluster.source(found.key), seconds)
    rate = f"{format_count(flop / seconds)}flop/s" if flop else f"{format_bytes(moved / seconds)}/s"
    return Why(kind, FORMULAS[found.bound], amount, f"{found.key}: {rate}", cluster.measured.source, seconds)


def _wait_term(axis: str, seconds: float, program: Program, cluster: Cluster, costs: Costs) -> Why:
    calls = [(e, n) for e, n in program.counted() if isinstance(e, Collective) and e.axis == axis]
    size = sum(e.nbytes * n for e, n in calls)
    used = sorted({costs.charges[id(e)].algorithm for e, _ in calls} - {"none"})
    route = costs.routes[axis]
    tier = f"{route.slowest.tier}: {format_bytes(route.bandwidth)}/s, {route.size} ranks, {route.inside} in a node"
    amount = f"{sum(n for _, n in calls):.0f} calls, {format_bytes(size)}"
    source = cluster.measured.source if used == ["measured"] else route.slowest.source
    return Why(
        f"communication over {axis}",
        "time of the calls that compute waits for: " + ", ".join(used),
        amount,
        tier,
        source,
        seconds,
    )
