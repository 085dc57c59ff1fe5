"""After a lost rank: the same run again, from its newest good checkpoint, on as many ranks or on fewer.

    a rank is lost for the first time        again on the same mesh
    the same rank a second time, or shrink   the outermost data axis shrinks to the largest smaller size that is legal; where
                                             there is none, the same mesh

The global batch, and so the curve, stays the same function: a smaller data axis gives each rank a larger part. On the same mesh
the curve is the same bit for bit. Only lost ranks are restarted: what raises or fills the disk would do so again.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from partita.api.planning import estimate
from partita.errors import Fault, RankLost, Refused
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program import Program
from partita.runtime import metrics
from partita.runtime.batch import Feed, divides
from partita.runtime.checkpoint import check, peek, steps
from partita.runtime.forked import Progress
from partita.runtime.launch import ranks_from_environment
from partita.runtime.outcome import Outcome, run
from partita.runtime.subject import Subject
from partita.runtime.training import Training
from partita.strategy import Place

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Restart:
    """One rank lost, and how the run went on.

    Args:
        rank: That was lost.
        why: In words.
        step: The run went on after this one.
        mesh: On these ranks.
        aside: Checkpoints that were damaged and were renamed.
    """

    rank: int
    why: str
    step: int
    mesh: Mesh
    aside: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        mesh = dict(self.mesh.axes)
        return {"lost_rank": self.rank, "why": self.why, "from_step": self.step, "ranks": self.mesh.ranks, "mesh": mesh}

    def __str__(self) -> str:
        ranks = "1 rank" if self.mesh.ranks == 1 else f"{self.mesh.ranks} ranks"
        where = " x ".join(f"{axis} = {size}" for axis, size in self.mesh.axes)
        bad = f"; damaged and set aside: {', '.join(self.aside)}" if self.aside else ""
        return f"{self.why}\n  restarted after step {self.step} on {ranks}" + (f", {where}" if where else "") + bad


@dataclass(frozen=True)
class Policy:
    """What to do about lost ranks.

    Args:
        restarts: At most so many.
        shrink: On fewer data ranks at once.
        say: Told of every restart.
    """

    restarts: int = 0
    shrink: bool = False
    say: Callable[[Restart], None] = lambda _: None


@dataclass(frozen=True)
class Ran:
    """A run that came to its end.

    Args:
        plan: As it ended.
        outcome: Of the ranks it ended on.
        before: Losses of the steps earlier ranks ran, up to where those went on.
        restarts: In order.
    """

    plan: Plan
    outcome: Outcome
    before: tuple[float, ...] = ()
    restarts: tuple[Restart, ...] = ()


def policy_faults(policy: Policy) -> list[Fault]:
    """Restarts asked for under torchrun, which has its own, or a number that is none."""
    if policy.restarts < 0:
        return [Fault("P112", f"restarts = {policy.restarts}", law="a number of restarts", cure="0 or more", at="restarts")]
    if not policy.restarts or ranks_from_environment() is None:
        return []
    law = "the process that starts the ranks restarts them, and that is torchrun"
    cure = "torchrun --max-restarts N ... partita train --resume DIR"
    return [Fault("P115", "restarts do not reach the ranks of torchrun", law=law, cure=cure, at="--restart")]


def run_on(
    plan: Plan, subject: Subject, program: Program, training: Training, policy: Policy, progress: Progress | None
) -> Ran:
    """Train on the ranks of a plan, and again after a lost rank as the policy says.

    Raises:
        RankLost: If one rank too many is lost.
    """
    began = peek(training.resume).step if training.resume else 0
    done: list[Restart] = []
    seen: set[int] = set()
    now = training
    while True:
        try:
            outcome = run(plan.mesh, subject, plan.strategies, program, now, progress=progress, cluster=plan.cluster)
        except RankLost as lost:
            if len(done) == policy.restarts:
                raise _enough(lost, done) from lost
            fewer = smaller(plan, subject, program, training) if policy.shrink or lost.rank in seen else None
            plan, seen = (fewer, set()) if fewer else (plan, seen | {lost.rank})
            now, step, aside = _onward(training, began)
            done.append(Restart(lost.rank, str(lost), step, plan.mesh, aside))
            policy.say(done[-1])
            continue
        return Ran(plan, outcome, _before(began, training, done, outcome), tuple(done))


def _enough(lost: RankLost, done: list[Restart]) -> RankLost:
    return RankLost(f"{lost}; {len(done)} of {len(done)} restarts were used" if done else str(lost), lost.rank)


def smaller(plan: Plan, subject: Subject, program: Program, training: Training) -> Plan | None:
    """The plan with the largest smaller data axis that is legal and fits; None if there is none."""
    axes = [a for s in plan.strategies if s.place == Place.DATA for a in s.axes]
    axis = next((a for a, size in plan.mesh.axes if size > 1 and a in axes), None)
    if axis is None:
        return None
    samples = subject.batches.samples if isinstance(subject.batches, Feed) else None
    for size in range(plan.mesh.size(axis) - 1, 0, -1):
        mesh = Mesh(tuple((a, size if a == axis else n) for a, n in plan.mesh.axes))
        try:
            less = Plan(plan.workload, plan.cluster, None, mesh, plan.strategies, plan.accumulate, plan.path)
            parts = math.prod(mesh.size(a) for s in plan.strategies for a in s.batch_axes)
            if not divides(samples or 0, parts, training.microbatches) and estimate(less, program).figures.fits:
                return less
        except Refused:  # the strategy, the batch or the cluster does not allow this size
            continue
    return None


def _onward(training: Training, began: int) -> tuple[Training, int, tuple[str, ...]]:
    """Where the next ranks start: the training with its newest good checkpoint, that step, and what was set aside."""
    root = training.folder / CHECKPOINTS if training.folder else None
    aside = []
    for step in reversed(steps(root) if root else []):
        assert root is not None
        found = root / f"step-{step}"
        if not check(found):
            return replace(training, resume=found), step, tuple(aside)
        aside.append(found.rename(found.with_name(f"{found.name}.bad")).name)
    return training, began, tuple(aside)


def _before(began: int, training: Training, done: list[Restart], outcome: Outcome) -> tuple[float, ...]:
    """Losses of the steps that lost ranks ran for those that went on."""
    if not done or training.folder is None:
        return ()
    rows = metrics.read(training.folder / metrics.NAME)
    return tuple(row["loss"] for row in rows if began < row.get("step", 0) <= outcome.results[0]["first"])
