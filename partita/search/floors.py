"""Seconds that no plan of a kind can be below: what one plan of the kind takes without what its data axes and optimizer take.

Plans that cut the batch into as many parts and have the same strategies inside run the same ops on the same parts. How
gradients, optimizer state and parameters are held over the data axes changes the calls over these axes and the optimizer, and
adds calls, not takes. A pipeline in place of a data axis gives a rank a part of the blocks instead of a part of the batch: as
much work, and as many bytes over the axes inside.
"""

from dataclasses import dataclass, field

from partita.cost.figures import Figures
from partita.mesh import Mesh
from partita.search.candidates import Layout
from partita.strategy import Pipelined, Place, Strategy

SLACK = 0.98  # gradients are also added up and cleared, which the terms of a step do not tell apart
Kind = tuple[tuple[Strategy, ...], tuple[tuple[str, int], ...]]


@dataclass
class Floors:
    """What is known of each kind."""

    known: dict[Kind, float] = field(default_factory=dict)

    def of(self, mesh: Mesh, chosen: tuple[Strategy, ...]) -> float:
        """The floor of a plan; 0 if none of its kind has been looked at."""
        return self.known.get(_kind(mesh, chosen), 0.0)

    def of_stages(self, layout: Layout) -> float:
        """The floor of a pipeline."""
        inside, axes = _kind(Mesh(layout.axes), layout.inside)
        parts = layout.depth
        for axis, size in axes:
            parts *= 1 if axis else size
        return self.known.get((inside, (("", parts), *(a for a in axes if a[0]))), 0.0)

    def learn(self, mesh: Mesh, chosen: tuple[Strategy, ...], figures: Figures) -> None:
        """Take the floor of a kind from the figures of the first of its plans."""
        if any(isinstance(s, Pipelined) for s in chosen):
            return
        over = {f"communication over {axis}" for axis in _data_axes(chosen)}
        gone = sum(term.seconds for term in figures.why if term.term in over or term.term == "optimizer")
        self.known.setdefault(_kind(mesh, chosen), SLACK * (figures.step_seconds - gone))


def _kind(mesh: Mesh, chosen: tuple[Strategy, ...]) -> Kind:
    """What plans of a kind have in common: strategies inside the data axes, and how many ranks each axis has, in order."""
    data = _data_axes(chosen)
    return tuple(s for s in chosen if s.place != Place.DATA), tuple((a if a not in data else "", n) for a, n in mesh.axes)


def _data_axes(chosen: tuple[Strategy, ...]) -> set[str]:
    return {axis for s in chosen if s.place == Place.DATA for axis in s.axes}
