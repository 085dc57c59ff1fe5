"""Prices every event of a Program once."""

from dataclasses import dataclass

from partita.cluster import Cluster
from partita.cost.collective import Charge, Route, charge, crowding, route_of
from partita.cost.compute import Price, Work, price, work_of
from partita.mesh import Mesh
from partita.program.events import Collective, Compute, Phase
from partita.program.program import Program


@dataclass(frozen=True)
class Costs:
    """Every event of a program, priced once.

    Args:
        seconds: Event (by identity) -> seconds of one call.
        prices, charges: The same with how they were found.
        routes: axis -> its route.
        crowd: Ranks that share a core.
        adding: Work and price of adding one microbatch's gradients to their buffers.
        clearing: Of what happens to gradients once a step: buffers zeroed, norm taken and clipped.
    """

    seconds: dict[int, float]
    prices: dict[int, tuple[Work, Price]]
    charges: dict[int, Charge]
    routes: dict[str, Route]
    crowd: float
    adding: tuple[Work, Price]
    clearing: tuple[Work, Price]

    def handling(self, *, last: bool) -> float:
        """Seconds spent on gradients beside the program's own ops, after a microbatch."""
        return self.crowd * (self.adding[1].seconds + (self.clearing[1].seconds if last else 0.0))


def costs_of(program: Program, cluster: Cluster, mesh: Mesh) -> Costs:
    """Price every event of `program` on `cluster`."""
    crowd = crowding(mesh.ranks, cluster)
    routes = {axis: route_of(axis, mesh, cluster) for axis in mesh.names}
    seconds: dict[int, float] = {}
    prices: dict[int, tuple[Work, Price]] = {}
    charges: dict[int, Charge] = {}
    known: dict[tuple[Work, Phase], Price] = {}
    for event in program.events():
        if isinstance(event, Compute):
            work = work_of(event, program)
            found = known.get((work, event.phase))
            if found is None:
                found = known[work, event.phase] = price(work, event.phase, cluster)
            prices[id(event)] = (work, found)
            seconds[id(event)] = found.seconds * crowd
        else:
            charges[id(event)] = charge(event.op, event.nbytes, routes[event.axis], cluster)
            seconds[id(event)] = charges[id(event)].seconds
    adding, clearing = gradient_work(program)
    priced = [(work, price(work, Phase.OPTIMIZER, cluster) if work.bytes else NOTHING) for work in (adding, clearing)]
    return Costs(seconds, prices, charges, routes, crowd, *priced)


NOTHING = Price(0.0, "launch", "device.launch")


def gradient_work(program: Program) -> tuple[Work, Work]:
    """What a step does to gradients that no captured op says: (per microbatch, once).

    Gradients are added to buffers (`gradient_buffers`): two reads and a write. Once a step the buffers are zeroed, and with
    clipping each gradient is read for the norm, read and written.
    """
    copies = program.copies()
    size = sum(program.local_bytes(g) * copies.get(g, 1) for g in program.gradients.values())
    buffered = program.microbatches > 1 or any(
        isinstance(e, Collective) and e.overlapped and e.once and e.tensors for e in program.events()
    )
    once = (size if buffered else 0) + (3 * size if program.clip else 0)
    return Work("add_", "gradients", "float32", 0, 3 * size if buffered else 0), Work("mul_", "gradients", "float32", 0, once)
