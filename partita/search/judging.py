"""Judges a candidate: is it legal, what are its figures; what plans have in common is said once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

from partita.cluster import Cluster
from partita.cost.figures import Figures
from partita.cost.memory import Occupancy, occupancy
from partita.errors import Fault, Refused
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program.events import Kind
from partita.program.program import Program
from partita.search.candidates import family_of
from partita.search.choices import Candidate
from partita.search.floors import Floors
from partita.simulate import predict
from partita.strategy import Place, Remembered, Strategy, check, compose_roles
from partita.units import format_bytes, format_time
from partita.workload import Workload

UNASKED = Occupancy(0, "", dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "other"), 0), {})
WHOLE = 0.9  # of the weights: who holds so much of them shares nothing out over a data axis


@dataclass
class Judge:
    """What plans are judged by, and what may be added to one that does not fit.

    Args:
        program: Microbatches of a step -> the program of one device.
        savers: Classes of strategies that save memory and never time.
        room: Bytes of a device.
        looked: Plans looked at so far.
        known: What was best added to a plan, whatever the order of its axes: memory does not know the order.
    """

    program: Callable[[int], Program]
    cluster: Cluster
    workload: Workload
    savers: Sequence[type[Strategy]]
    room: float
    looked: int = 0
    known: dict[object, tuple[Strategy, ...]] = field(default_factory=dict)
    rewrite: Remembered = field(default_factory=Remembered)
    heavy: dict[tuple[type, ...], float] = field(default_factory=dict)  # strategies -> weights that alone do not fit
    floors: Floors = field(default_factory=Floors)
    last: tuple[object, tuple[Program, ...]] | None = None
    occupied: dict[object, Occupancy] = field(default_factory=dict)  # strategies and axes, in any order -> what a rank holds

    def judge(self, mesh: Mesh, chosen: tuple[Strategy, ...], at_most: float = inf) -> Candidate | str:
        """The plan, its figures and its family, or why it cannot be; one slower than `at_most` is asked for no more."""
        self.looked += 1
        kinds, weights = tuple(map(type, chosen)), self.weights(mesh, chosen)
        if weights >= self.heavy.get(kinds, float("inf")):
            return f"does not fit: a rank holds {format_bytes(weights)} of parameters, gradients and optimizer state"
        try:
            plan = Plan(self.workload, self.cluster.name, mesh.ranks, mesh, chosen)
            said = self._said(plan)
        except Refused as refused:
            return _reason(list(refused.faults))
        if isinstance(said, str):
            return said
        figures = predict(said, self.cluster, mesh, self.workload, UNASKED)
        self.floors.learn(mesh, chosen, figures)
        if figures.step_seconds > at_most:
            return f"{format_time(figures.step_seconds)} a step, where {format_time(at_most)} would be worth a look"
        if said[0].pipeline is None:
            figures = self._with_memory(figures, said[0], (chosen, tuple(sorted(mesh.axes))))
        static = sum(figures.memory[name] for name in ("parameters", "gradients", "optimizer"))
        if static > self.room and static >= WHOLE * weights:
            self.heavy[kinds] = min(weights, self.heavy.get(kinds, weights))
        return plan, figures, family_of(mesh, chosen)

    def weights(self, mesh: Mesh, chosen: tuple[Strategy, ...]) -> float:
        """Bytes of parameters, gradients and optimizer state of a rank that shares nothing out over data axes."""
        whole = weights_of(self.program(self.workload.accumulate))
        return whole / prod(mesh.size(axis) for s in chosen if s.place != Place.DATA for axis in s.axes)

    def _with_memory(self, figures: Figures, program: Program, alike: object) -> Figures:
        if alike not in self.occupied:
            self.occupied[alike] = occupancy(program, self.cluster.backend, self.cluster.kernel)
        held = self.occupied[alike]
        fits = held.peak <= self.cluster.room(prod(program.axes.values()))
        return replace(figures, memory=dict(held.parts), peak=held.peak, peak_at=held.at, fits=fits)

    def _said(self, plan: Plan) -> tuple[Program, ...] | str:
        """The roles of a plan, which do not know the order of the axes."""
        mesh = Mesh(tuple(sorted(plan.mesh.axes)))
        alike = plan.strategies, mesh
        if self.last is None or self.last[0] != alike:
            program = self.program(plan.microbatches)
            if faults := check(program, plan.strategies, mesh, rewrite=self.rewrite):
                return _reason(faults)
            self.last = alike, compose_roles(program, plan.strategies, mesh, alike=True, rewrite=self.rewrite)
        return self.last[1]

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
        judged = self.judge(plan.mesh, tuple(sorted((*plan.strategies, *extra), key=lambda s: s.place)))
        return [] if isinstance(judged, str) else [judged]


def weights_of(program: Program) -> int:
    """Bytes of parameters, as many of gradients, and of optimizer state, on one device."""
    copies, times = program.copies(), {Kind.PARAMETER: 2, Kind.OPTIMIZER: 1}
    return sum(times[t.kind] * t.nbytes * copies.get(t.id, 1) for t in program.tensors if t.kind in times)


def _reason(faults: list[Fault]) -> str:
    return "; ".join(dict.fromkeys(f"{fault.what} ({fault.have})" if fault.have else fault.what for fault in faults))
