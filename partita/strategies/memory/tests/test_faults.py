"""Seeded faults of what saves memory: each is caught, and what differs is named."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest

from partita.mesh import Mesh
from partita.plans import Plan
from partita.program.recompute import blocks_of
from partita.proof.prove import prove_plan
from partita.runtime import offload, random, recompute
from partita.strategies import DDP, Offload, Recompute, TensorParallel
from partita.workload import GPT, ResNet, Workload

DROPPED = Workload("gpt", GPT(layers=2, hidden=16, heads=2, vocab=16, sequence=4, dropout=0.2), batch=4, seed=1)
NORMED = Workload("resnet", ResNet(layers=1, stages=2, hidden=4, classes=4, size=8), batch=4, seed=1)


@dataclass(frozen=True)
class SaysNothing(Recompute):
    def rewrite(self, program, mesh):
        return program


@dataclass(frozen=True)
class SaysLess(Recompute):
    """One block is said, the other is not."""

    def rewrite(self, program, mesh):
        return Recompute(modules=tuple(blocks_of(program)[:1])).rewrite(program, mesh)


@dataclass(frozen=True)
class DoesNothing(Recompute):
    def apply(self, site):
        return None


def proof_of(strategy, workload=DROPPED, mesh=None):
    mesh = mesh or {"tp": 2}
    split = [TensorParallel()] * ("tp" in mesh), [DDP()] * ("dp" in mesh)
    return prove_plan(Plan(workload, mesh=Mesh.of(mesh), strategies=[*split[0], strategy, *split[1]]), shrink=False)


@pytest.mark.gloo
@pytest.mark.parametrize("kind", [SaysNothing, SaysLess, DoesNothing])
def test_what_is_said_and_not_done_is_a_call_too_many_or_too_few(kind):
    proof = proof_of(kind())
    assert not proof.proved
    assert proof.differs == ("call",)


@pytest.mark.gloo
def test_masks_drawn_anew_are_wrong_numbers(monkeypatch):
    def shifted(self):
        return random._Drawn(self, self._at, self._calls + 1)

    monkeypatch.setattr(random.Stream, "place", shifted)
    assert proof_of(Recompute(), mesh={"dp": 2}).differs == ("numerics",)


@pytest.mark.gloo
def test_statistics_counted_twice_are_wrong_numbers(monkeypatch):
    monkeypatch.setattr(recompute._Kept, "restored", lambda self: nullcontext())
    proof = proof_of(Recompute(), NORMED, {"dp": 2})
    assert proof.differs == ("numerics",)
    assert "running" in proof.numerics.worst_tensor or "num_batches" in proof.numerics.worst_tensor


@pytest.mark.gloo
def test_a_parameter_left_on_the_host_is_a_wrong_number(monkeypatch):
    monkeypatch.setattr(offload.Offloaded, "_away", lambda self, p: True)  # copies, as where memory is apart
    assert proof_of(Offload(), mesh={"dp": 2}).proved
    monkeypatch.setattr(offload.Offloaded, "_back", lambda self, moved, twins: None)
    assert proof_of(Offload(), mesh={"dp": 2}).differs == ("numerics",)
