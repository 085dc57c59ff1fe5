"""plan, estimate, load: everything that starts no rank. A program that is in the cache needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from partita import plans, search
from partita.cluster import Cluster, Where, cluster_of, probe_path
from partita.cost.figures import Figures
from partita.errors import Fault, refuse
from partita.pages.json import figures_json
from partita.plans import Plan
from partita.program import Program
from partita.program.rounds import usual
from partita.runtime.launch import cache_folder
from partita.runtime.programs import program_of
from partita.simulate import Played, Span, Timeline, play_roles, predict, simulate, spans_of
from partita.strategies import GARDEN
from partita.strategy import check, compose_roles
from partita.workload import Workload


@dataclass(frozen=True)
class Estimate:
    """Predicted figures of a plan, and the Program′ of each role they were read from."""

    plan: Plan
    roles: tuple[Program, ...]
    cluster: Cluster
    figures: Figures

    @property
    def program(self) -> Program:
        """Program′ of the first role: of every rank, where the plan has no pipeline."""
        return self.roles[0]

    def json(self) -> dict[str, Any]:
        """The keys of the contract."""
        return figures_json(self.figures, self.plan.hash)

    def timeline(self) -> Timeline:
        """Every event of the first role with start and end, for a trace; of the most frequent kind of step."""
        return simulate(usual(self.roles)[0], self.cluster, self.plan.mesh, traced=True)

    def played(self) -> Played | None:
        """The schedule by the clock, if the plan has a pipeline."""
        return play_roles(usual(self.roles), self.cluster, self.plan.mesh) if self.program.pipeline else None

    def spans(self) -> dict[int, list[Span]]:
        """Rank (along the pipeline) -> what it does when: of a pipeline its passes in one round, else every event."""
        played = self.played()
        return spans_of(played.schedule, played.table) if played else {0: list(self.timeline().spans)}


def load(path: str | Path, overrides: Mapping[str, str] | None = None) -> Plan:
    """The plan in a TOML file.

    Raises:
        Refused: With every fault of the file at once.
    """
    return plans.load(path, overrides, strategies=GARDEN)


def estimate(plan: Plan, program: Program | None = None) -> Estimate:
    """Time, memory and traffic of one step of a plan; no ranks, no GPU.

    Args:
        plan: Any legal plan.
        program: Of one device; None captures the plan's workload.

    Raises:
        Refused: With every reason why a strategy cannot split this workload on this mesh.
    """
    workload = plan.workload
    if program is None:
        workload = with_workload(plan)
        program = program_of(replace(workload, accumulate=plan.microbatches), cache_folder())
    refuse(check(program, plan.strategies, plan.mesh))
    roles = compose_roles(program, plan.strategies, plan.mesh, alike=True)
    cluster = cluster_at(plan.cluster, plan.mesh.ranks)
    return Estimate(plan, roles, cluster, predict(roles, cluster, plan.mesh, workload or Workload("python")))


def with_workload(plan: Plan) -> Workload:
    """The plan's workload.

    Raises:
        Refused: P119, if it has none and no model was given either.
    """
    if plan.workload is None:
        law = "a plan without a workload is trained and proved with a model of your own"
        cure = "Plan(workload=...), or model=, batches= and loss="
        refuse([Fault("P119", "the plan has no workload", law=law, cure=cure, at="plan.workload")])
    assert plan.workload is not None
    return plan.workload


def plan(
    workload: Workload | str,
    *,
    on: Where = "here",
    ranks: int | None = None,
    memory: float | None = None,
    minimise: str = "time",
) -> search.Choices:
    """The best plan of a workload on a cluster, the runner-up, and why each other one lost.

    Args:
        workload: A Workload, or what the command line takes: a catalogue name, ``hf:…``, ``python:…`` or a TOML file.
        on: Name or path of the cluster.
        ranks: Devices to use; None means all of them.
        memory: Bytes a device may use; None means what it has.
        minimise: "time", "memory" or "traffic".
    """
    task = plans.read_workload(workload) if isinstance(workload, str) else plans.complete(workload)
    cluster = cluster_at(on, ranks)
    kinds = list(GARDEN.values())

    def parted(microbatches: int) -> Program:
        return program_of(replace(task, accumulate=microbatches), cache_folder())

    return search.search(parted, cluster, ranks or cluster.devices, task, kinds, minimise=minimise, memory=memory)


def cluster_at(name: Where, ranks: int | None = None) -> Cluster:
    """A cluster by name, for so many ranks; this machine is read from its probe file, if there is one."""
    return cluster_of(name, folder=Path.cwd(), probe_dir=cache_folder(), ranks=ranks)


def probed() -> bool:
    """Whether this machine has been measured."""
    return probe_path(cache_folder()).is_file()
