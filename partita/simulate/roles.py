"""Figures of a pipeline: each role's passes by the clock of its rank, then all ranks by the schedule's own clock.

passes      seconds of F, B or I and W of each stage, with the calls of tensor axes inside them
schedule    play: who waits for whom; the bubble is what is waited
once        buckets still in flight, tied gradients, loss, norm and optimizer of the slowest rank
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partita.cluster import Cluster
from partita.cost.figures import Figures, Why
from partita.cost.stages import role_occupancy
from partita.mesh import Mesh
from partita.program.events import Collective, Phase
from partita.program.program import Program, stage_and_kind
from partita.program.schedules import Action, Durations, Schedule, Timetable, play
from partita.program.schedules import Pass as Kind
from partita.simulate.clock import Timeline, play_segment
from partita.simulate.costs import Costs, costs_of
from partita.simulate.figures import band_of, estimate, explain, traffic
from partita.units import format_bytes
from partita.workload import Workload

COMPUTES = {kind.value: kind for kind in Kind}


@dataclass(frozen=True)
class Played:
    """A step of all roles by the clock.

    Args:
        schedule, table: One round.
        rounds: Of a step.
        once: Seconds after the last round, of the slowest rank.
        costs: Per role.
        compute: Per role, seconds it computes in a step.
    """

    schedule: Schedule
    table: Timetable
    rounds: int
    once: float
    costs: tuple[Costs, ...]
    compute: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.rounds * self.table.makespan + self.once


def schedule_of(roles: Sequence[Program]) -> Schedule:
    """The schedule whose roles these are."""
    first = roles[0].pipeline
    assert first is not None, "a role has turns"
    placement = [0] * first.count
    order = []
    for role in roles:
        pipeline = role.pipeline
        assert pipeline is not None, "a role has turns"
        for s in pipeline.stages:
            placement[s] = pipeline.rank
        passes = [(turn, *stage_and_kind(turn.part)) for turn in pipeline.turns]
        order.append(tuple(Action(s, COMPUTES[kind], t.microbatch) for t, s, kind in passes if kind in COMPUTES))
    return Schedule("", tuple(order), tuple(placement), first.microbatches)


def play_roles(roles: Sequence[Program], cluster: Cluster, mesh: Mesh) -> Played:
    """One step of all roles by the clock."""
    schedule = schedule_of(roles)
    costs = tuple(costs_of(role, cluster, mesh) for role in roles)
    seconds: dict[str, dict[int, float]] = {kind: {} for kind in COMPUTES}
    send, back = [0.0] * (schedule.stages - 1), [0.0] * (schedule.stages - 1)
    once = []
    for role, cost in zip(roles, costs, strict=True):
        assert role.pipeline is not None, "a role has turns"
        late = 0.0
        for segment in (s for s in role.segments if s.part):
            stage, kind = stage_and_kind(segment.part)
            plain = play_segment(segment, cluster, cost, last=False)
            if kind in COMPUTES:
                adding = cost.handling(last=False) / len(role.pipeline.stages) if kind in "BW" else 0.0
                seconds[kind][stage] = plain + adding
                late += play_segment(segment, cluster, cost, last=True) - plain
            elif kind.startswith("SEND"):
                cut, way = (stage, send) if kind == "SEND_F" else (stage - 1, back)
                way[cut] = plain
        tail = sum(play_segment(s, cluster, cost, last=True) for s in role.segments if not s.part)
        once.append(late + tail + cost.handling(last=True) - cost.handling(last=False))
    each = {k: [by.get(s, 0.0) for s in range(schedule.stages)] for k, by in seconds.items()}
    durations = Durations(forward=each["F"], input=each["I"], weight=each["W"], backward=each["B"], send=send, send_back=back)
    table = play(schedule, durations)
    rounds = roles[0].microbatches // schedule.microbatches
    compute = tuple(rounds * busy for busy in table.busy)
    return Played(schedule, table, rounds, max(once), costs, compute)


def estimate_roles(roles: Sequence[Program], cluster: Cluster, mesh: Mesh, workload: Workload) -> Figures:
    """Time, memory and traffic of one optimizer step of a pipelined plan: memory of the fullest role, traffic of the busiest.

    Args:
        roles: By coordinate on the pipeline axis.
        cluster, mesh, workload: As of `estimate`.
    """
    played = play_roles(roles, cluster, mesh)
    fullest = max((role_occupancy(role, cluster.backend, cluster.kernel) for role in roles), key=lambda found: found.peak)
    low, high, notes = band_of(cluster, played.costs[0].crowd, mesh)
    room = cluster.room(mesh.ranks)
    busiest = max(range(len(roles)), key=lambda r: played.compute[r])
    seconds = played.seconds
    return Figures(
        step_seconds=seconds,
        step_seconds_band=(seconds * low, seconds * high),
        memory=dict(fullest.parts),
        peak=fullest.peak,
        peak_at=fullest.at,
        traffic=traffic(busiest_of(roles), cluster, mesh),
        flop=sum(float(role.flop()) for role in roles) / len(roles),
        compute_seconds=played.compute[busiest],
        exposed_communication_seconds=max(0.0, played.once - _optimizer(roles[busiest], played.costs[busiest])),
        bubble_fraction=played.table.bubble,
        device_flop_per_second=cluster.flop_per_second(workload.dtype),
        samples=workload.batch,
        tokens=workload.batch * workload.sequence if workload.sequence else None,
        fits=fullest.peak <= room,
        opaque_share=max(role.opaque_share() for role in roles),
        why=_why(roles, cluster, played, busiest),
        notes=(
            *cluster.notes,
            *notes,
            *dict.fromkeys(n for role in roles for n in role.notes),
            f"room for tensors on a device: {format_bytes(room)}",
        ),
    )


def predict(roles: Sequence[Program], cluster: Cluster, mesh: Mesh, workload: Workload) -> Figures:
    """The figures of a plan, whether its ranks do the same or have roles in a pipeline."""
    if roles[0].pipeline is None:
        return estimate(roles[0], cluster, mesh, workload)
    return estimate_roles(roles, cluster, mesh, workload)


def busiest_of(roles: Sequence[Program]) -> Program:
    """The role that sends most, the first of equals."""
    return max(roles, key=sent_bytes)


def sent_bytes(role: Program) -> int:
    """Bytes a rank of this role passes to the network in a step: the large side of each call, received messages left out."""
    return sum(e.nbytes * n for e, n in role.counted() if isinstance(e, Collective) and e.op != "receive")


def _optimizer(role: Program, costs: Costs) -> float:
    events = (e for e in role.events() if e.phase == Phase.OPTIMIZER)
    return sum(costs.seconds[id(e)] for e in events)


def _why(roles: Sequence[Program], cluster: Cluster, played: Played, busiest: int) -> tuple[Why, ...]:
    """The terms of the busiest rank, and what it waits for the others."""
    role, cost = roles[busiest], played.costs[busiest]
    terms = explain(role, cluster, cost, Timeline(played.seconds, played.compute[busiest], {}, ()))
    told = sum(term.seconds for term in terms)
    share = f"{100 * played.table.bubbles[busiest]:.3g} % of the schedule"
    source = f"{played.schedule.microbatches} microbatches on {played.schedule.stages} stages"
    rest = Why("waiting in the pipeline", "step - what this rank computes", share, source, "schedule", played.seconds - told)
    return tuple(sorted((*terms, rest), key=lambda term: -term.seconds))
