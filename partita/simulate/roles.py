"""Figures of a pipeline: each role's passes by the clock of its rank, then all ranks by the schedule's own clock.

passes      seconds of F, B or I and W of each stage, with the calls of tensor axes inside them
schedule    play: who waits for whom; the bubble is what is waited
once        buckets still in flight, tied gradients, loss, norm and optimizer of the slowest rank
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from partita.cluster import Cluster
from partita.cost.figures import Figures, Why
from partita.cost.memory import Occupancy
from partita.cost.stages import role_occupancy, stage_passes
from partita.mesh import Mesh
from partita.program.events import Collective, Phase, Repeat
from partita.program.program import Program, stage_and_kind
from partita.program.rounds import rounds_of
from partita.program.schedules import Action, Durations, Schedule, Timetable, play
from partita.program.schedules import Pass as Kind
from partita.simulate.clock import Timeline, play_segment
from partita.simulate.costs import Costs, costs_of
from partita.simulate.figures import band_of, estimate, explain, traffic
from partita.simulate.mean import mean_of
from partita.units import format_bytes
from partita.workload import Workload

T = TypeVar("T")
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
    first = firsts(roles)
    costs = of_kind(first, lambda r: costs_of(roles[r], cluster, mesh))
    alone = of_kind(first, lambda r: [_played(s, cluster, costs[r]) for s in roles[r].segments])
    seconds: dict[str, dict[int, float]] = {kind: {} for kind in COMPUTES}
    send, back = [0.0] * (schedule.stages - 1), [0.0] * (schedule.stages - 1)
    once, rounds = [], roles[0].microbatches // schedule.microbatches
    for role, cost, played in zip(roles, costs, alone, strict=True):
        assert role.pipeline is not None, "a role has turns"
        late = 0.0
        for segment, (plain, last) in ((s, times) for s, times in zip(role.segments, played, strict=True) if s.part):
            stage, kind = stage_and_kind(segment.part)
            if kind in COMPUTES:
                adding = cost.handling(last=False) / len(role.pipeline.stages) if kind in "BW" else 0.0
                seconds[kind][stage] = plain + adding
                late += last - plain
            elif kind.startswith("SEND"):
                cut, way = (stage, send) if kind == "SEND_F" else (stage - 1, back)
                way[cut] = plain
            elif kind == "UNSHARD":  # gathered when a round begins
                late += rounds * plain
        tail = sum(last for s, (_, last) in zip(role.segments, played, strict=True) if not s.part)
        once.append(late + tail + cost.handling(last=True) - cost.handling(last=False))
    each = {k: [by.get(s, 0.0) for s in range(schedule.stages)] for k, by in seconds.items()}
    durations = Durations(forward=each["F"], input=each["I"], weight=each["W"], backward=each["B"], send=send, send_back=back)
    table = play(schedule, durations)
    compute = tuple(rounds * busy for busy in table.busy)
    return Played(schedule, table, rounds, max(once), costs, compute)


def _played(segment: Repeat, cluster: Cluster, cost: Costs) -> tuple[float, float]:
    """Seconds of a segment by itself: of any microbatch, and of the last."""
    plain = play_segment(segment, cluster, cost, last=False) if segment.part else 0.0
    return plain, play_segment(segment, cluster, cost, last=True)


def firsts(roles: Sequence[Program]) -> list[int]:
    """Per role, the first one that it shares its tensors with: roles of one kind are said once."""
    seen: dict[int, int] = {}
    return [seen.setdefault(id(role.tensors), r) for r, role in enumerate(roles)]


def of_kind(first: Sequence[int], of: Callable[[int], T]) -> tuple[T, ...]:
    """Per role, what is found of the first of its kind."""
    found = {r: of(r) for r in dict.fromkeys(first)}
    return tuple(found[r] for r in first)


def estimate_roles(roles: Sequence[Program], cluster: Cluster, mesh: Mesh, workload: Workload) -> Figures:
    """Time, memory and traffic of one optimizer step of a pipelined plan: memory of the fullest role, traffic of the busiest.

    Args:
        roles: By coordinate on the pipeline axis.
        cluster, mesh, workload: As of `estimate`.
    """
    played = play_roles(roles, cluster, mesh)
    first = firsts(roles)
    passes = of_kind(first, lambda r: stage_passes(roles[r], cluster.backend))
    held = (role_occupancy(r, cluster.backend, cluster.kernel, known) for r, known in zip(roles, passes, strict=True))
    fullest = max(held, key=lambda found: found.peak)
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
        flop=sum(of_kind(first, lambda r: float(roles[r].flop()))) / len(roles),
        compute_seconds=played.compute[busiest],
        exposed_communication_seconds=max(0.0, played.once - _optimizer(roles[busiest], played.costs[busiest])),
        bubble_fraction=played.table.bubble,
        device_flop_per_second=cluster.flop_per_second(workload.dtype),
        samples=workload.batch,
        tokens=workload.batch * workload.sequence if workload.sequence else None,
        fits=fullest.peak <= room,
        opaque_share=max(of_kind(first, lambda r: roles[r].opaque_share())),
        why=_why(roles, cluster, played, busiest),
        notes=(
            *cluster.notes,
            *notes,
            *dict.fromkeys(n for role in roles for n in role.notes),
            f"room for tensors on a device: {format_bytes(room)}",
        ),
    )


def predict(
    roles: Sequence[Program], cluster: Cluster, mesh: Mesh, workload: Workload, held: Occupancy | None = None
) -> Figures:
    """The figures of a plan: of a step, or of the mean step where they differ; `held`: as of `estimate`."""
    found = [(_of_step(r.roles, cluster, mesh, workload, held), r.count) for r in rounds_of(roles)]
    return found[0][0] if len(found) == 1 else mean_of(found)


def _of_step(roles: Sequence[Program], cluster: Cluster, mesh: Mesh, workload: Workload, held: Occupancy | None) -> Figures:
    """Whether ranks do the same or have roles in a pipeline."""
    if roles[0].pipeline is None:
        return estimate(roles[0], cluster, mesh, workload, held)
    return estimate_roles(roles, cluster, mesh, workload)


def busiest_of(roles: Sequence[Program]) -> Program:
    """The role that sends most, the first of equals."""
    sent = of_kind(firsts(roles), lambda r: sent_bytes(roles[r]))
    return roles[sent.index(max(sent))]


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
