"""Laws of recomputation as said: what is repeated, where, and what lives how long."""

import itertools
from dataclasses import replace

import pytest

from partita.cost.memory import occupancy
from partita.mesh import Mesh
from partita.program import Compute, Kind, Phase
from partita.program.fold import unfold
from partita.program.recompute import blocks_of, modules_of, say_recompute
from partita.program.text import from_json, to_json
from partita.runtime.programs import program_of
from partita.strategies import DDP, Recompute, TensorParallel
from partita.strategy import compose
from partita.workload import GPT, MLP, Llama, ResNet, Workload

SPECS = {
    "gpt": GPT(layers=5, hidden=32, heads=4, vocab=64, sequence=8),
    "dropped": GPT(layers=5, hidden=32, heads=4, vocab=64, sequence=8, dropout=0.1),
    "llama": Llama(layers=4, hidden=32, heads=4, kv_heads=2, vocab=64, sequence=8),
    "resnet": ResNet(layers=2, stages=2, hidden=4, classes=4, size=8),
}


def said_of(name, policy="block", keep=(), **changes):
    program = program_of(Workload(name if name != "dropped" else "gpt", SPECS[name], batch=4, **changes))
    return unfold(program), Recompute(policy=policy, **({"keep": keep} if keep else {})).rewrite(unfold(program), Mesh())


def again(program):
    return [e for e in program.events() if e.phase == Phase.RECOMPUTE]


def test_blocks_are_numbered_paths_whole():
    plain = program_of(Workload("gpt", SPECS["gpt"], batch=4))
    assert blocks_of(unfold(plain)) == [f"blocks.{n}" for n in range(5)]
    assert blocks_of(plain) == ["blocks.0", "blocks.1", "blocks.4"]  # a fold has a first, a middle and a last one
    assert blocks_of(program_of(Workload("mlp", MLP(layers=2), batch=4))) == ["layers.0", "layers.1"]


def test_globs_choose_the_outermost_modules_that_fit():
    program = unfold(program_of(Workload("gpt", SPECS["gpt"], batch=4)))
    assert modules_of(program, ["blocks.[02]*"]) == ["blocks.0", "blocks.2"]
    assert modules_of(program, ["*.mlp"]) == [f"blocks.{n}.mlp" for n in range(5)]
    assert modules_of(program, ["nothing"]) == []


@pytest.mark.law
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("policy", ["block", "full", "selective"])
def test_nothing_from_inside_a_block_outlives_the_forward_pass(name, policy):
    """Backward reads what was made again, the inputs of the regions, and what is kept."""
    _, said = said_of(name, policy)
    keep = Recompute().keep if policy == "selective" else ()
    kept = {
        t for e in said.events() if isinstance(e, Compute) and e.phase == Phase.FORWARD and e.op.endswith(keep) for t in e.outs
    }
    kept |= {t for e in said.events() if isinstance(e, Compute) and "attention" in e.op for t in e.outs}
    first = {t: e for e in said.events() if e.phase == Phase.FORWARD for t in e.outs}
    for e in said.events():
        if e.phase == Phase.BACKWARD and e.op != "drop":
            for t in e.ins:
                origin = first.get(t)
                if origin and "blocks" in origin.module and "blocks" in e.module:
                    same = origin.module.split(".")[1] == e.module.split(".")[1]
                    assert not same or said.tensors[t].root in kept or t in kept, (e.op, e.module, origin.op)


@pytest.mark.law
@pytest.mark.parametrize("name", SPECS)
def test_the_storages_that_stay_are_the_inputs_of_blocks(name):
    _, said = said_of(name)
    root = [t.root for t in said.tensors]
    made = {root[o]: e.module for e in said.events() if e.phase == Phase.FORWARD for o in e.outs if "blocks" in e.module}
    readers = {}
    for e in said.events():
        for i in e.ins:
            readers.setdefault(root[i], []).append(e)
    for storage, module in made.items():
        if said.tensors[storage].kind != Kind.ACTIVATION:
            continue
        block = module.split(".")[1]
        outside = [e for e in readers.get(storage, []) if "blocks" not in e.module or e.module.split(".")[1] != block]
        late = [e for e in readers.get(storage, []) if e.phase != Phase.FORWARD]
        assert outside or not late, (module, said.tensors[storage].shape)


@pytest.mark.law
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_what_a_block_ends_with_is_not_repeated(name):
    """Its last product saves its inputs, so it need not run again; dropout behind it saves a mask."""
    flat, said = said_of(name)
    last = [e.module for e in flat.events() if e.phase == Phase.FORWARD and e.op in ("mm", "addmm") and "blocks" in e.module]
    ends = {m for m in last if m.endswith("mlp.down")}
    assert ends
    assert not ends & {e.module for e in again(said) if e.op in ("mm", "addmm")}
    _, dropped = said_of("dropped")
    assert {e.module for e in again(dropped) if e.op == "addmm"} >= {f"blocks.{n}.mlp.down" for n in range(5)}


@pytest.mark.law
def test_a_block_is_repeated_just_before_its_backward_from_the_last_to_the_first():
    _, said = said_of("gpt")
    works = (e for e in said.events() if "blocks" in e.module and e.phase != Phase.OPTIMIZER and not e.view)
    runs = [key for key, _ in itertools.groupby((e.phase, e.module.split(".")[1]) for e in works)]
    back = [(phase, str(n)) for n in reversed(range(5)) for phase in (Phase.RECOMPUTE, Phase.BACKWARD)]
    assert runs == [(Phase.FORWARD, str(n)) for n in range(5)] + back


@pytest.mark.law
def test_selective_repeats_no_op_it_keeps():
    _, said = said_of("gpt", "selective")
    assert again(said)
    assert not [e.op for e in again(said) if e.op == "addmm" or e.op.startswith("_scaled_dot_product")]
    _, own = said_of("gpt", "selective", keep=("gelu",))
    ops = {e.op for e in again(own)}
    assert "gelu" not in ops
    assert "addmm" in ops


@pytest.mark.law
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("policy", "mesh"), [("block", {}), ("block", {"tp": 2}), ("selective", {"dp": 2, "tp": 2}), ("full", {"dp": 2})]
)
def test_every_fold_is_equal_with_and_without_folding(name, policy, mesh):
    program = program_of(Workload(name if name != "dropped" else "gpt", SPECS[name], batch=8, accumulate=2))
    strategies = [TensorParallel()] * ("tp" in mesh) + [Recompute(policy=policy)] + [DDP()] * ("dp" in mesh)
    folded, flat = (compose(p, strategies, Mesh.of(mesh)) for p in (program, unfold(program)))
    key = lambda c: (c.op, c.axis, c.nbytes, c.dtype)
    assert list(map(key, folded.collectives())) == list(map(key, flat.collectives()))
    assert folded.flop() == flat.flop()
    a, b = occupancy(folded), occupancy(flat)
    assert (a.peak, dict(a.parts)) == (b.peak, dict(b.parts))
    assert sorted(e.op for e in unfold(folded).events()) == sorted(e.op for e in flat.events())


@pytest.mark.law
def test_memory_falls_and_work_grows_by_less_than_a_forward_pass():
    spec = GPT(layers=12, hidden=64, heads=4, vocab=64, sequence=64)
    program = program_of(Workload("gpt", spec, batch=32))
    peak, flop = {}, {}
    for policy in ("block", "full", "selective"):
        said = Recompute(policy=policy).rewrite(program, Mesh())
        peak[policy], flop[policy] = occupancy(said).peak, said.flop()
    whole = occupancy(program).peak
    forward = sum(e.flop * n for e, n in program.counted() if isinstance(e, Compute) and e.phase == Phase.FORWARD)
    assert peak["block"] < peak["selective"] < whole <= peak["full"] * 1.05
    assert program.flop() == flop["selective"] < flop["block"] < flop["full"] < program.flop() + forward


def test_the_kinds_and_names_of_tensors_stay():
    flat, said = said_of("gpt")
    assert [replace(t, root=0) for t in said.tensors[: len(flat.tensors)]] == [replace(t, root=0) for t in flat.tensors]
    assert {t.kind for t in said.tensors[len(flat.tensors) :]} == {Kind.ACTIVATION}
    assert from_json(to_json(said)) == said


def test_a_module_called_twice_is_repeated_twice():
    _, said = said_of("gpt")
    program = unfold(program_of(Workload("gpt", SPECS["gpt"], batch=4)))
    both = say_recompute(program, ["blocks.1", "blocks.3"])
    assert {e.module.split(".")[1] for e in again(both)} == {"1", "3"}
    assert len(again(said)) > len(again(both))
