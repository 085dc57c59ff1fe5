"""Says everything that is wrong with a schedule, at once: what is missing, doubled, out of order, or waits in a circle."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from partita.errors import Fault
from partita.program.schedules.action import Action, Pass, Schedule, needs
from partita.program.schedules.clock import Stuck, play

F, I, W, B = Pass.FORWARD, Pass.INPUT, Pass.WEIGHT, Pass.BACKWARD
ONCE = "a step runs every microbatch through every stage once: F, then B or both I and W"
ORDER = "a rank runs its actions in the order of its line; on a stage F comes before B or I, and I before W"
CIRCLE = "a rank runs its actions in order and waits for what the next one needs; ranks that wait in a circle wait for ever"
CODE = "P120"

Runs = list[tuple[int, int]]  # of numbers: first and last of each


@dataclass(frozen=True)
class Where:
    """Where a fault stands.

    Args:
        file: The user's; "" if there is none.
        lines: Of each rank in it, if known.
    """

    file: str
    lines: Sequence[int] = ()

    def of(self, rank: int) -> str:
        place = f"line {self.lines[rank]}, rank {rank}" if self.lines else f"rank {rank}"
        return f"{self.file}: {place}" if self.file else place


def faults_of(schedule: Schedule, *, at: str = "", lines: Sequence[int] = ()) -> list[Fault]:
    """Why the schedule cannot run; an empty list if it can.

    Args:
        schedule: Any lists of actions.
        at: The user's file.
        lines: Where the actions of each rank stand in it, from 1.
    """
    where = Where(at, lines)
    homeless = _homeless(schedule, where)
    faults = [*homeless, *_count_faults(schedule, where), *_order_faults(schedule, where)]
    whole = 2 * schedule.stages * schedule.microbatches <= sum(map(len, schedule.order))
    return faults + (_circle_faults(schedule, where) if whole and not homeless else [])


def _homeless(schedule: Schedule, where: Where) -> list[Fault]:
    """Actions that no stage or microbatch of the schedule has, and actions on a rank that does not hold the stage."""
    faults = []
    for rank, row in enumerate(schedule.order):
        if not row:
            law = "every rank of a pipeline holds a stage"
            cure = "give it a stage, or make the axis smaller"
            faults.append(Fault(CODE, f"rank {rank} runs nothing", f"ranks = {schedule.ranks}", law, cure, where.of(rank)))
        beyond = [a for a in row if a.stage >= schedule.stages or a.microbatch >= schedule.microbatches]
        if beyond:
            have = f"beyond {schedule.stages} stages of {schedule.microbatches} microbatches"
            what = f"rank {rank} runs {_some(beyond)}, which is not of this pipeline"
            faults.append(Fault(CODE, what, have, ONCE, "leave it out", where.of(rank)))
        for stage in sorted({a.stage for a in row if a.stage < schedule.stages and schedule.placement[a.stage] != rank}):
            home = schedule.placement[stage]
            what = f"rank {rank} runs stage {stage}, which rank {home} holds"
            have = _some([a for a in row if a.stage == stage])
            law = "a stage and its parameters are on one rank"
            faults.append(Fault(CODE, what, have, law, f"give every action of stage {stage} to one rank", where.of(rank)))
    return faults


def _count_faults(schedule: Schedule, where: Where) -> list[Fault]:
    """Passes that are missing or doubled."""
    seen: dict[int, dict[Pass, Counter[int]]] = defaultdict(lambda: {kind: Counter() for kind in Pass})
    for action in (a for row in schedule.order for a in row):
        seen[action.stage][action.kind][action.microbatch] += 1
    faults = []
    if absent := _gaps(seen, schedule.stages):
        what = f"no rank runs {_named('stage', absent)}"
        faults.append(Fault(CODE, what, f"stages = {schedule.stages}", ONCE, f"add {absent[0][0]}F0 and the rest", where.file))
    for stage in (s for s, _ in enumerate(schedule.placement) if s in seen):
        rank = schedule.placement[stage]
        for fact, runs, cure in _stage_facts(seen[stage], schedule.microbatches):
            what = f"stage {stage} {fact} {_named('microbatch', runs)}"
            have = f"microbatches = {schedule.microbatches}, stage {stage} on rank {rank}"
            faults.append(Fault(CODE, what, have, ONCE, cure.format(stage=stage, k=runs[0][0]), where.of(rank)))
    return faults


def _stage_facts(seen: dict[Pass, Counter[int]], microbatches: int) -> Iterable[tuple[str, Runs, str]]:
    """(what is wrong, of which microbatches, the cure)."""
    whole, split = set(seen[B]), set(seen[I]) | set(seen[W])
    facts = [
        ("has no forward of", _gaps(seen[F], microbatches), "add {stage}F{k}"),
        ("has no backward of", _gaps(whole | split, microbatches), "add {stage}B{k}, or {stage}I{k} and {stage}W{k}"),
        ("has I but no W of", _runs(set(seen[I]) - set(seen[W]) - whole), "add {stage}W{k}"),
        ("has W but no I of", _runs(set(seen[W]) - set(seen[I]) - whole), "add {stage}I{k}"),
        ("has both a whole and a split backward of", _runs(whole & split), "keep {stage}B{k}, or {stage}I{k} and {stage}W{k}"),
    ]
    for kind in Pass:
        doubled = _runs(k for k, times in seen[kind].items() if times > 1)
        facts.append((f"has more than one {kind} of", doubled, f"keep one {{stage}}{kind}{{k}}"))
    return [fact for fact in facts if fact[1]]


def _order_faults(schedule: Schedule, where: Where) -> list[Fault]:
    """Passes that stand before what they need on their own rank."""
    faults = []
    for rank, row in enumerate(schedule.order):
        first = {action: place for place, action in reversed(list(enumerate(row)))}
        for action, place in first.items():
            stage, kind, microbatch = action
            before = Action(stage, I if kind is W else F, microbatch)
            if kind is F or first.get(before, -1) < place:
                continue
            what = f"rank {rank} runs {action} before {before}"
            have = f"{action} is number {place + 1} of the line, {before} number {first[before] + 1}"
            faults.append(Fault(CODE, what, have, ORDER, f"put {before} before {action}", where.of(rank)))
    return faults


def _circle_faults(schedule: Schedule, where: Where) -> list[Fault]:
    """Ranks that wait for each other for ever."""
    try:
        play(schedule)
    except Stuck as stuck:
        return [_circle_fault(schedule, circle, where) for circle in _circles(schedule, stuck.at)]
    return []


def _circles(schedule: Schedule, at: Sequence[int]) -> list[list[tuple[int, Action, Action]]]:
    """Each circle as (rank, the action it stands at, the action that one needs, which the next rank has still ahead)."""
    ahead = {action: rank for rank, row in enumerate(schedule.order) for action in row[at[rank] :]}
    waits = {}
    for rank, row in enumerate(schedule.order):
        if at[rank] < len(row) and (need := needs(row[at[rank]], schedule.stages)):
            stage, kind = need
            kinds = (kind,) if kind is F else (I, B)
            wanted = [a for a in (Action(stage, k, row[at[rank]].microbatch) for k in kinds) if a in ahead]
            if wanted:
                waits[rank] = (row[at[rank]], wanted[0])
    circles, seen = [], set()
    for start in waits:
        path: list[int] = []
        rank = start
        while rank in waits and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = ahead[waits[rank][1]]
        if rank in path:
            circles.append([(r, *waits[r]) for r in path[path.index(rank) :]])
    return circles


def _circle_fault(schedule: Schedule, circle: list[tuple[int, Action, Action]], where: Where) -> Fault:
    names = [rank for rank, _, _ in circle]
    ring = " -> ".join(map(str, [*names, names[0]]))
    who = f"ranks {ring} wait for each other" if len(names) > 1 else f"rank {names[0]} waits for itself"
    have = []
    for (rank, stands, wanted), (holder, blocked, _) in zip(circle, [*circle[1:], circle[0]], strict=True):
        have.append(f"rank {rank} stands at {stands}, which needs {wanted}: behind {blocked} on rank {holder}")
    rank, stands, wanted = circle[-1]
    holder, blocked, _ = circle[0]
    cure = f"put {wanted} before {blocked} on rank {holder}, or break the circle at another of its places"
    return Fault(CODE, who, "\n".join(have), CIRCLE, cure, where.of(names[0]))


def _some(actions: Sequence[Action], most: int = 4) -> str:
    names = ", ".join(map(str, actions[:most]))
    return names if len(actions) <= most else f"{names} and {len(actions) - most} more"


def _runs(numbers: Iterable[int]) -> Runs:
    """Numbers as runs (first, last)."""
    runs: Runs = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return runs


def _gaps(present: Iterable[int], count: int) -> Runs:
    """Which of 0 .. count - 1 are not present."""
    edges = [-1, *sorted(n for n in present if n < count), count]
    return [(a + 1, b - 1) for a, b in pairwise(edges) if b - a > 1]


def _named(noun: str, runs: Runs, most: int = 8) -> str:
    """The noun with its numbers: microbatches 0-3, 7."""
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    plural = noun if one else noun + ("es" if noun.endswith("ch") else "s")
    named = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:most])
    return f"{plural} {named}" + (f" and {len(runs) - most} runs more" if len(runs) > most else "")
