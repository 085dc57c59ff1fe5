"""Seeded faults: every strategy x every fault is caught, and the field that differs is named."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

from partita.mesh import Mesh
from partita.pages import text
from partita.plans import Plan
from partita.program import Collective
from partita.proof.prove import prove_plan
from partita.strategies import DDP, FSDP, TensorParallel, Zero1, Zero2
from partita.strategy import Place
from partita.workload import GPT, Workload

KINDS = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2, "fsdp": FSDP, "tensor_parallel": TensorParallel}
# The two that share their verbs with another are of the slow lane.
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in ("zero1", "zero2") else name for name in KINDS]
VERBS = {DDP: "average_gradients", Zero1: "scatter_gradients", Zero2: "scatter_gradients", FSDP: "shard_parameters"}
OTHER = {"dp": "tp", "tp": "dp"}
WORKLOAD = Workload("gpt", GPT(layers=1, hidden=16, heads=2, vocab=16, sequence=4), batch=4, seed=1)


def proof_of(kind, mesh=None):
    """A small GPT on two axes, one of whose strategies is at fault."""
    mesh = mesh or {"dp": 2, "tp": 2}
    houses = (kind, DDP) if kind.place == Place.TENSOR else (TensorParallel, kind)
    strategies = [house() for house in houses if house().axis in mesh]
    return prove_plan(Plan(WORKLOAD, mesh=Mesh.of(mesh), strategies=strategies), shrink=False)


# ---------------------------------------------------------------- saying otherwise
def saying(change):
    """A strategy that changes the first call it says."""

    def made(kind):
        @dataclass(frozen=True)
        class Faulty(kind):
            def rewrite(self, program, mesh):
                said = super().rewrite(program, mesh)
                first = next(e for e in said.events() if isinstance(e, Collective) and e.axis == self.axis)

                def changed(event):
                    return change(first) if event is first else [event]

                parts = (replace(s, events=tuple(c for e in s.events for c in changed(e))) for s in said.segments)
                return replace(said, segments=tuple(parts))

        return Faulty

    return made


# ---------------------------------------------------------------- doing otherwise
class Through:
    """Something real, some of whose verbs are changed."""

    def __init__(self, real, **verbs):
        self._real, self._verbs = real, verbs

    def __getattr__(self, name):
        return self._verbs[name] if name in self._verbs else getattr(self._real, name)


def doing(of_data, of_tensor):
    """A strategy that changes what it does: the verb of its site (data), or the network of its replay (tensor).

    `of_data` is given that verb, its axis, its buckets or units, its dtype, and its keywords.
    """

    def made(kind):
        @dataclass(frozen=True)
        class Faulty(kind):
            def apply(self, site):
                name = next((verb for house, verb in VERBS.items() if issubclass(kind, house)), None)
                if name:
                    verb = getattr(site, name)
                    return super().apply(Through(site, **{name: lambda *a, **k: of_data(verb, *a, **k)}))
                super().apply(site)
                talk = site._replays[-1].talk
                reduce = talk.net.all_reduce
                talk.net = Through(talk.net, all_reduce=lambda *a, **k: of_tensor(reduce, *a, **k))
                return None

        return Faulty

    return made


def forget(reduce, tensor, axis, *, op="sum", label=""):
    """No sum before the last norm, of what the MLP made."""
    if label != "norm":
        reduce(tensor, axis, op=op, label=label)


def astray(reduce, tensor, axis, *, op="sum", label=""):
    reduce(tensor, OTHER[axis], op=op, label=label)


def widened(reduce, tensor, axis, *, op="sum", label=""):
    wide = tensor.to(torch.bfloat16 if tensor.dtype == torch.float32 else torch.float32)
    reduce(wide, axis, op=op, label=label)
    tensor.copy_(wide)


def cut(reduce, tensor, axis, *, op="sum", label=""):
    """Half of it only."""
    reduce(tensor.view(-1)[: tensor.numel() // 2], axis, op=op, label=label)


def halved(verb, axis, groups, dtype, **how):
    """The last parameter of a bucket goes in a bucket of its own; of units, the root holds everything."""
    if isinstance(groups[0], tuple):
        names = [n for _, some in groups for n in some]
        return verb(axis, [("", names)], dtype, **how)
    names = [n for b in groups for n in b]
    return verb(axis, [names[:-1], names[-1:]], dtype, **how)


FAULTS = {
    "says a call less": (saying(lambda call: []), {"call"}),
    "says other bytes": (saying(lambda call: [replace(call, nbytes=call.nbytes * 2)]), {"nbytes"}),
    "says another axis": (saying(lambda call: [replace(call, axis=OTHER[call.axis])]), {"axis"}),
    "says another dtype": (saying(lambda call: [replace(call, dtype="bfloat16")]), {"dtype"}),
    "says another op": (saying(lambda call: [replace(call, op="all_to_all")]), {"op"}),
    "forgets a reduction": (doing(lambda verb, *a, **k: None, forget), {"call", "numerics"}),
    "reduces other bytes": (doing(halved, cut), {"nbytes"}),
    "reduces on another axis": (doing(lambda verb, axis, *a, **k: verb(OTHER[axis], *a, **k), astray), {"axis", "numerics"}),
    "reduces in another dtype": (
        doing(lambda verb, axis, groups, dtype, **k: verb(axis, groups, "bfloat16", **k), widened),
        {"dtype", "numerics"},
    ),
}


@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_and_named(kind, fault):
    made, fields = FAULTS[fault]
    proof = proof_of(made(KINDS[kind]))
    assert not proof.proved
    assert fields <= set(proof.differs), proof.reasons
    got = proof.json()
    assert got["proved"] is False
    assert set(got["square"]["first_difference"]["fields"]) >= fields - {"numerics"}
    assert got["square"]["equal"] is got["traffic"]["algorithmic_equal"] is False
    assert any(name in text.proof(got) for name in fields)
    if fault.startswith("says"):
        assert proof.numerics.held
        assert set(proof.differs) <= {*fields, "nbytes"}, proof.reasons


# ---------------------------------------------------------------- faults that one check alone can see
def on_gradient(act):
    """A strategy that acts whenever the gradient of one parameter is done."""

    def made(kind):
        @dataclass(frozen=True)
        class Faulty(kind):
            def apply(self, site):
                super().apply(site)
                weight = site.module.get_parameter("norm.weight")
                weight.register_post_accumulate_grad_hook(lambda p: act(site.net, self.axis))

        return Faulty

    return made


def around(net, axis):
    """Past the door: the recorder hears it, the ledger does not."""
    dist.all_reduce(torch.zeros(3), group=net.group(axis))


@pytest.mark.gloo
@pytest.mark.parametrize("kind", EVERY)
def test_an_idle_call_is_seen_by_the_square_alone(kind):
    faulty = on_gradient(lambda net, axis: net.all_reduce(torch.zeros(3), axis))(KINDS[kind])
    proof = proof_of(faulty)
    assert proof.differs == ("call",)
    assert proof.numerics.held
    assert proof.difference.said is None or proof.difference.heard.nbytes == 12


@pytest.mark.gloo
def test_a_call_past_the_door_is_no_line_of_the_ledger():
    assert proof_of(on_gradient(around)(DDP)).differs == ("call", "ledger")


@dataclass(frozen=True)
class Unscaled(DDP):
    """Says and sends what it should, of gradients twice too large."""

    def apply(self, site):
        super().apply(site)
        for p in site.module.parameters():
            p.register_hook(lambda g: g * 2)


@dataclass(frozen=True)
class EachAddsTheBias(TensorParallel):
    """Says and sends what it should, but what is whole is added to a summand on every rank."""

    def apply(self, site):
        super().apply(site)
        replay = site._replays[-1]
        steps = tuple(s._replace(edges=tuple(e for e in s.edges if e.kind != "one")) for s in replay.steps)
        replay.scripts[True] = replace(replay.scripts[True], steps=steps)


@dataclass(frozen=True)
class Silent(DDP):
    """An honest liar: sums no gradient, and says so."""

    def rewrite(self, program, mesh):
        said = super().rewrite(program, mesh)
        parts = (
            replace(s, events=tuple(e for e in s.events if not (isinstance(e, Collective) and e.overlapped)))
            for s in said.segments
        )
        return replace(said, segments=tuple(parts))

    def apply(self, site):
        super().apply(Through(site, average_gradients=lambda *a: None))


@pytest.mark.gloo
@pytest.mark.parametrize("faulty", [Unscaled, EachAddsTheBias, Silent])
def test_a_wrong_number_is_seen_by_numerics_alone(faulty):
    proof = proof_of(faulty)
    assert proof.differs == ("numerics",)
    assert proof.difference is None
    assert proof.numerics.max_relative_error > 1e-6
    assert proof.numerics.worst_tensor in proof.reasons[0]
    assert proof.numerics.worst_tensor in text.proof(proof.json())


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}])
def test_what_has_no_fault_is_proved(mesh):
    proof = proof_of(DDP, mesh)
    assert proof.proved
    assert proof.differs == ()
    assert proof.said == proof.heard > 8


# ---------------------------------------------------------------- faults that end the run
def alike(verb, axis, buckets, dtype):
    """A bucket is forgotten, the others are not."""
    verb(axis, buckets[:-1], dtype)


def apart(verb, axis, buckets, dtype):
    """Ranks do not cut alike: gloo ends a process that gets a message of the wrong size."""
    names = [n for b in buckets for n in b]
    cut = 1 + verb.__self__.net.rank
    verb(axis, [names[:cut], names[cut:]], dtype)


@dataclass(frozen=True)
class Fine(DDP):
    """Buckets small enough to have several."""

    bucket: int = 64


@pytest.mark.gloo
@pytest.mark.parametrize("act", [alike, apart])
def test_a_run_that_does_not_end_is_no_proof(act):
    proof = proof_of(doing(act, None)(Fine), {"dp": 2})
    assert proof.differs == ("run",)
    assert proof.reasons[0].startswith("run: rank ")
    assert act is apart or "no strategy sums the gradient of 'tokens.weight' over dp" in proof.reasons[0]
    got = proof.json()
    assert (got["proved"], got["square"]["equal"], got["traffic"]["algorithmic_equal"]) == (False, False, False)
    assert "NOT proved" in text.proof(got)
    assert "run: rank " in text.proof(got)
