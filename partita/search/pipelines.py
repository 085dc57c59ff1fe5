"""Which pipelines are tried: a layout first with the schedule that keeps least, then the best layout with every schedule.

    bound      compute divided evenly / (1 - bubble), with F, I and W alike; and the floor of its axes inside (`floors.py`)
               no layout behind the best plan is looked at
    then       the best layout with every other schedule, and the best of those with other numbers of microbatches

So a search among hundreds of pipelines looks at tens of them. What is not looked at is told with its bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from partita.program.schedules import held_peak, play
from partita.search.candidates import Layout, family_of
from partita.search.choices import Candidate, Rejected
from partita.search.judging import Judge
from partita.strategy import Pipelined
from partita.units import format_time

TIMES = (4, 2, 8, 1)  # microbatches, in ranks of the pipeline: the first that divides the batch is tried first
LOOKED = 4  # layouts
NEAR = 1.25  # times the best: a layout behind that is not tried with other schedules, which win less


@dataclass
class Pipelines:
    """The pipelines of a search.

    Args:
        judge: Of plans.
        kinds: Schedules to choose from.
        best: Seconds that a plan must stay below to be worth a look.
        ideal: Seconds of the compute divided evenly.
    """

    judge: Judge
    kinds: Sequence[type[Pipelined]]
    best: float
    ideal: float

    def __post_init__(self) -> None:
        self.found: list[Candidate] = []
        self.large: list[Candidate] = []
        self.rejected: list[Rejected] = []

    def look(self, layouts: Iterable[Layout]) -> None:
        """Judge what could be the best."""
        first = [(layout, own) for layout in layouts if (own := self._first(layout))]
        seen = 0
        for layout, own in sorted(first, key=lambda one: self._floor(*one)):
            if reason := self._hopeless(layout, own, seen):
                self._lost(family_of(*layout.with_pipeline(own)), reason)
            else:
                seen += self._judged(layout, own) is not None
        good = min((*self.found, *self.large), key=self._rank, default=None)
        if good and good[1].step_seconds < NEAR * self.best:
            self._vary(good)

    def _hopeless(self, layout: Layout, own: Pipelined, seen: int) -> str:
        """Why a layout is not looked at; "" if it is."""
        bound = self._floor(layout, own)
        waits = f"{100 * bubble(own, layout.depth):.3g} % of the time is waited"
        if bound >= self.best:
            return f"at least {100 * (bound / self.best - 1):.3g} % slower: {waits}"
        if seen >= LOOKED:
            return f"not looked at after {LOOKED} more promising ones: {format_time(bound)} or more, {waits}"
        return ""

    def _vary(self, good: Candidate) -> None:
        """The best layout with other schedules, then the best of these with other numbers of microbatches."""
        plan = good[0]
        pipeline = plan.strategies[-1]
        assert isinstance(pipeline, Pipelined), "a layout has a pipeline outermost"
        layout = Layout(plan.mesh.size(pipeline.axis), plan.strategies[:-1], plan.mesh.axes[1:])
        others = [own for kind in self.kinds for own in self._made(kind, layout.depth, pipeline.microbatches)]
        judged = (self._judged(layout, own) for own in others if own != pipeline and self._bound(own, layout.depth) < self.best)
        best = min([good, *(c for c in judged if c)], key=self._rank)[0]
        kind = next(k for k in self.kinds if isinstance(best.strategies[-1], k))
        for parts in (n for n in self._microbatches(layout) if n != pipeline.microbatches):
            for own in self._made(kind, layout.depth, parts):
                self._judged(layout, own)

    def _rank(self, candidate: Candidate) -> tuple[bool, float]:
        return candidate[1].peak > self.judge.room, candidate[1].step_seconds

    def _judged(self, layout: Layout, own: Pipelined) -> Candidate | None:
        mesh, chosen = layout.with_pipeline(own)
        judged = self.judge.judge(mesh, chosen)
        if isinstance(judged, str):
            self._lost(family_of(mesh, chosen), judged)
            return None
        fits = judged[1].peak <= self.judge.room
        (self.found if fits else self.large).append(judged)
        if fits:
            self.best = min(self.best, judged[1].step_seconds)
        return judged

    def _lost(self, family: str, reason: str) -> None:
        self.rejected.append(Rejected(family, reason))

    # ---- what is tried of a layout
    def _first(self, layout: Layout) -> Pipelined | None:
        """Of the schedules of fewest stages and whole backward passes, the one that keeps least."""
        parts = next(iter(self._microbatches(layout)), None)
        if parts is None:
            each = layout.data_ranks() * self.judge.workload.accumulate
            have = f"batch = {self.judge.workload.batch}, data ranks x accumulate = {each}"
            self._lost(layout.named(), f"no {layout.depth} or more microbatches of whole samples ({have})")
            return None
        made = [own for kind in self.kinds for own in self._made(kind, layout.depth, parts)]
        return min(made, key=lambda own: plainness(own, layout.depth), default=None)

    def _microbatches(self, layout: Layout) -> list[int]:
        whole, left = divmod(self.judge.workload.batch, layout.data_ranks() * self.judge.workload.accumulate)
        return [] if left else [layout.depth * n for n in TIMES if whole % (layout.depth * n) == 0]

    def _made(self, kind: type[Pipelined], depth: int, microbatches: int) -> list[Pipelined]:
        return [own for own in kind.parted(microbatches) if not own.laws(depth)]

    # ---- bounds
    def _floor(self, layout: Layout, own: Pipelined) -> float:
        return max(self._bound(own, layout.depth), self.judge.floors.of_stages(layout))

    def _bound(self, own: Pipelined, depth: int) -> float:
        return self.ideal / (1 - bubble(own, depth))


@cache
def bubble(own: Pipelined, depth: int) -> float:
    """Share of the time that is waited, with F, I and W alike."""
    return play(own.schedule(depth)).bubble


@cache
def plainness(own: Pipelined, depth: int) -> tuple[int, bool, float]:
    """Stages, whether backward is split, and microbatches alive on the fullest rank."""
    schedule = own.schedule(depth)
    return schedule.stages, schedule.splits_backward, max(held_peak(schedule))
