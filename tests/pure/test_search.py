"""Search: every mesh, every loser with a number, and the bound below the best."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from partita.cluster import Number, named
from partita.errors import Fault, Refused
from partita.program.events import Collective, Compute, Kind, Phase
from partita.program.program import before_optimizer
from partita.search import candidates, factors, search
from partita.strategy import Place, Promise, Strategy
from partita.workload import MLP, Workload

WORK = Workload("mlp", MLP(), batch=512)


@dataclass(frozen=True)
class Halving(Strategy):
    """Divides every op's flop over the axis, if 8 of its units divide."""

    name: ClassVar[str] = "halving"
    place: ClassVar[Place] = Place.TENSOR
    promise: ClassVar[Promise] = Promise.REORDERED
    axis: str = "tp"
    sends: ClassVar[int] = 1 << 22

    def check(self, program, mesh):
        size = mesh.size(self.axis)
        return [] if 8 % size == 0 else [Fault("P104", "cannot split dim 'units'", have=f"units = 8, {self.axis} = {size}")]

    def rewrite(self, program, mesh):
        size = mesh.size(self.axis)

        def less(event):
            return replace(event, flop=event.flop // size) if isinstance(event, Compute) else event

        segments = tuple(replace(s, events=tuple(map(less, s.events))) for s in program.segments)
        said = replace(program, segments=segments, axes={**program.axes, self.axis: size})
        return before_optimizer(said, (Collective("all_reduce", self.axis, (), self.sends, "float32", Phase.SYNC),))

    def apply(self, site):
        raise NotImplementedError

    @classmethod
    def cases(cls):
        return ()


@dataclass(frozen=True)
class Sharing(Halving):
    """The same as a data strategy that sends less."""

    name: ClassVar[str] = "sharing"
    place: ClassVar[Place] = Place.DATA
    axis: str = "dp"
    sends: ClassVar[int] = 1 << 16


BOTH = (Halving, Sharing)


def test_factors_are_all_ordered_factorisations():
    assert list(factors(12, 2)) == [(2, 6), (3, 4), (4, 3), (6, 2)]
    assert list(factors(6, 1)) == [(6,)]
    assert list(factors(1, 0)) == [()]


def test_candidates_are_every_mesh_in_every_order():
    found = [(mesh.axes, [s.name for s in chosen]) for mesh, chosen in candidates(4, BOTH)]
    assert sorted(axes for axes, _ in found) == sorted(
        [(("dp", 4),), (("tp", 4),), (("tp", 2), ("dp", 2)), (("dp", 2), ("tp", 2))]
    )
    assert all(names == sorted(names) for _, names in found)  # innermost first


def test_one_rank_has_one_plan(chain):
    found = search(chain(), named("cpu"), 1, WORK, BOTH)
    assert found.candidates == 1
    assert found.best.strategies == ()
    assert found.runner_up is None


def test_the_best_is_the_least_and_every_loser_has_a_number(chain):
    found = search(chain(4, 512, 256), named("1x4-cpu"), 4, WORK, BOTH)
    times = [c.figures.step_seconds for c in found.plans]
    assert times == sorted(times)
    assert found.candidates == 4
    assert found.best.mesh.axes == (("dp", 4),)  # sends less
    assert found.runner_up is not None
    assert len(found.rejected) == 3
    assert all(re.fullmatch(r"[\d.e+]+ % slower", r.reason) for r in found.rejected)
    assert found.lower_bound_seconds <= times[0]
    assert found.gap == pytest.approx(times[0] / found.lower_bound_seconds - 1)
    assert [c.place for c in found.plans] == [1, 2, 3, 4]


def test_what_does_not_divide_says_the_numbers(chain):
    found = search(chain(), named("1x16-cpu"), 16, WORK, BOTH)
    reasons = {r.family: r.reason for r in found.rejected}
    assert reasons["halving(tp=16)"] == "cannot split dim 'units' (units = 8, tp = 16)"
    assert found.candidates == 8


def test_what_does_not_fit_says_how_much(chain):
    found = None
    with pytest.raises(Refused, match=r"P111(.|\n)*over the 1 MiB of a device"):
        found = search(chain(4, 512, 256), named("1x4-cpu"), 4, WORK, BOTH, memory=1 << 20)
    assert found is None


@pytest.mark.parametrize("aim", ["memory", "traffic"])
def test_other_aims_rank_by_their_own_fold(chain, aim):
    found = search(chain(4, 512, 256), named("1x4-cpu"), 4, WORK, BOTH, minimise=aim)
    key = (lambda c: c.figures.peak) if aim == "memory" else (lambda c: sum(t.bytes for t in c.figures.traffic))
    assert [key(c) for c in found.plans] == sorted(key(c) for c in found.plans)


def test_an_unknown_aim_is_refused(chain):
    with pytest.raises(Refused, match="P107"):
        search(chain(), named("cpu"), 2, WORK, BOTH, minimise="glory")


def test_a_slow_link_moves_the_choice_inwards(chain):
    """With a slow network the chatty strategy takes the inner axis."""
    cluster = named("2x4-a100")
    slow = replace(cluster, numbers={**cluster.numbers, "links.network.bandwidth": Number(1e8)})
    found = search(chain(4, 512, 256), slow, 8, WORK, BOTH)
    both = [c for c in found.plans if len(c.plan.strategies) == 2]
    assert both[0].plan.mesh.axes[1][0] == "tp"


# ---------------------------------------------------------------- what saves memory
@dataclass(frozen=True)
class Lighter(Halving):
    """Halves the bytes of activations for twice the flop."""

    name: ClassVar[str] = "lighter"
    place: ClassVar[Place] = Place.MEMORY
    by: int = 2

    @property
    def axes(self):
        return ()

    def check(self, program, mesh):
        return []

    def rewrite(self, program, mesh):
        kept = {t.root for t in program.tensors if t.kind == Kind.PARAMETER}
        tensors = tuple(
            replace(t, shape=tuple(max(n // self.by, 1) for n in t.shape)) if t.root not in kept else t for t in program.tensors
        )

        def more(event):
            return replace(event, flop=event.flop * self.by) if isinstance(event, Compute) else event

        return replace(
            program, tensors=tensors, segments=tuple(replace(s, events=tuple(map(more, s.events))) for s in program.segments)
        )

    @classmethod
    def offers(cls):
        return cls(), cls(by=4)


def test_what_saves_memory_is_tried_where_a_plan_does_not_fit(chain):
    program, cluster = chain(4, 512, 256), named("cpu")
    free = search(program, cluster, 1, WORK, [Halving, Sharing, Lighter])
    assert [c.family for c in free.plans] == ["one device"]
    need = free.plans[0].figures.peak
    tight = search(program, cluster, 1, WORK, [Halving, Sharing, Lighter], memory=0.9 * need)
    assert [c.family for c in tight.plans] == ["one device + lighter"]
    (lost,) = tight.rejected
    assert re.search(r"does not fit: .* over .*; fits as one device \+ lighter, [\d.e+]+ % slower", lost.reason)
    least = search(program, cluster, 1, WORK, [Lighter], minimise="memory")
    assert least.plans[0].family == "one device + lighter(by=4)"


def test_a_plan_that_nothing_makes_fit_says_how_near_it_comes(chain):
    program, cluster = chain(4, 512, 256), named("cpu")
    with pytest.raises(Refused, match=r"as one device \+ lighter\(by=4\) still .* over"):
        search(program, cluster, 1, WORK, [Lighter], memory=1000)
