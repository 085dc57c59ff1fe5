"""What `prove` promises: the copy, the reference, the figures, and what the JSON says of them."""

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import partita as pt
from partita.errors import Refused
from partita.mesh import Mesh
from partita.pages import text
from partita.pages.json import dumps
from partita.plans import Plan
from partita.program import Collective, Phase
from partita.proof.figures import JUDGED, Memory, Wire, wire_of
from partita.proof.matrix import HF
from partita.proof.numerics import Numerics
from partita.proof.prove import promise_of, prove_plan
from partita.proof.reference import alone, fresh, in_double, wide_program
from partita.proof.shrink import shrink_config, shrink_mesh, shrink_spec, shrink_workload
from partita.proof.verdict import Proof
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.strategies import DDP, TensorParallel
from partita.strategy import Promise
from partita.workload import GPT, MLP, Llama, ResNet, Workload

FINE = Numerics(1e-15, 1e-10, "parameter w")
KEYS = {"proved", "promise", "square", "numerics", "traffic", "memory", "invariants", "reasons", "shrunk", "notes", "differs"}


# ---------------------------------------------------------------- the copy: its mesh
@pytest.mark.law
@pytest.mark.parametrize(
    ("mesh", "ranks", "copy"),
    [
        ({"dp": 8, "tp": 4}, None, {"dp": 2, "tp": 2}),
        ({"dp": 1, "tp": 4}, None, {"dp": 1, "tp": 2}),
        ({"dp": 8, "tp": 4}, 8, {"dp": 4, "tp": 2}),
        ({"dp": 4}, 3, {"dp": 3}),
        ({"dp": 2, "tp": 2}, 99, {"dp": 2, "tp": 2}),
        ({"dp": 2048, "tp": 8}, 5, {"dp": 2, "tp": 2}),
        ({}, None, {}),
    ],
)
def test_every_axis_is_kept_at_two_or_what_ranks_allow(mesh, ranks, copy):
    assert shrink_mesh(Mesh.of(mesh), ranks) == Mesh.of(copy)


@pytest.mark.law
def test_too_few_ranks_are_refused_with_the_fewest():
    with pytest.raises(Refused) as caught:
        shrink_mesh(Mesh.of({"dp": 8, "tp": 4}), 3)
    (fault,) = caught.value.faults
    assert (fault.code, fault.cure) == ("P118", "--ranks 4")


@pytest.mark.law
@pytest.mark.parametrize(("size", "ranks", "copy"), [(6, None, 2), (9, None, 3), (6, 5, 3), (5, 5, 5)])
def test_a_model_of_its_own_size_is_split_by_a_divisor(size, ranks, copy):
    assert shrink_mesh(Mesh.of({"tp": size}), ranks, whole=True) == Mesh.of({"tp": copy})


# ---------------------------------------------------------------- the copy: its model
@pytest.mark.law
@pytest.mark.parametrize(
    ("spec", "cut", "kept"),
    [
        (GPT(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048), 8, {"heads": 2, "hidden": 16, "vocab": 16}),
        (GPT(hidden=24, heads=3, tie_embeddings=True, dropout=0.1), 1, {"tie_embeddings": True, "dropout": 0.1, "heads": 2}),
        (GPT(layers=12, hidden=768, heads=12, vocab=50257), 2, {"vocab": 17}),  # odd stays odd: it is not split
        (GPT(hidden=8, heads=2, vocab=6, sequence=4), 2, {"hidden": 8, "heads": 2, "vocab": 6, "sequence": 4}),  # small already
        (Llama(heads=64, kv_heads=8, hidden=8192), 8, {"heads": 4, "kv_heads": 2, "hidden": 32}),
        (Llama(heads=8, kv_heads=1), 2, {"heads": 4, "kv_heads": 1}),
        (Llama(heads=8), 2, {"heads": 2, "kv_heads": None}),
        (ResNet(layers=3, stages=4), 2, {"layers": 2, "stages": 4, "hidden": 4}),
        (MLP(layers=9, hidden=4096), 2, {"layers": 4, "hidden": 16}),
    ],
)
def test_the_copy_keeps_every_kind_and_the_smallest_widths(spec, cut, kept):
    small = shrink_spec(spec, cut, min(cut, 2))
    assert {name: getattr(small, name) for name in kept} == kept
    if isinstance(spec, GPT | Llama):
        assert small.layers == 2
        assert small.hidden % small.heads == 0


@pytest.mark.law
def test_the_copy_says_what_was_shrunk(tmp_path):
    work = Workload("gpt", GPT(layers=4, hidden=256, heads=8), batch=32, accumulate=4, data="/somewhere")
    small, lines = shrink_workload(work, (2, 2), 2, tmp_path)
    assert (small.batch, small.accumulate, small.data) == (8, 2, None)
    assert {"layers: 4 -> 2", "hidden: 256 -> 16", "batch: 32 -> 8", "accumulate: 4 -> 2"} <= set(lines)


@pytest.mark.law
@pytest.mark.parametrize("name", HF)
def test_a_config_of_transformers_shrinks_to_the_same_type(name):
    config = HF[name]
    large = {k: v * 8 if isinstance(v, int) and not isinstance(v, bool) and v > 1 else v for k, v in config.items()}
    less = shrink_config(large, 2, 2)
    assert less.keys() == config.keys()
    assert less["model_type"] == config["model_type"]
    assert next(less[k] for k in ("num_hidden_layers", "n_layer") if k in less) == 2
    assert less["vocab_size"] == 16


@pytest.mark.law
def test_a_config_keeps_every_kind_of_block_and_one_key_head():
    config = {
        "model_type": "x", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 512,
        "layer_types": ["sliding", "sliding", "full"] * 2, "vocab_size": 30523, "head_dim": 64, "eos_token_id": 30000,
    }  # fmt: skip
    less = shrink_config(config, 2, 2)
    assert less["layer_types"] == ["sliding", "full"]
    assert (less["num_hidden_layers"], less["num_attention_heads"], less["num_key_value_heads"]) == (2, 4, 1)
    assert (less["vocab_size"], less["head_dim"], less["eos_token_id"]) == (17, 8, 0)


# ---------------------------------------------------------------- the plan itself
def test_a_plan_that_is_illegal_at_its_own_size_is_not_proved_on_a_copy():
    plan = Plan(Workload("mlp", MLP(hidden=30), batch=8), mesh={"tp": 4}, strategies=[TensorParallel()])
    with pytest.raises(Refused) as caught:
        pt.prove(plan)
    assert caught.value.faults[0].code == "P104"
    assert "tp = 4" in caught.value.faults[0].have


@pytest.mark.gloo
def test_a_plan_file_is_proved_with_all_it_says(tmp_path):
    """Accumulation, clipping, dropout, ties, warm-up, half precision with a master copy, a reduction dtype, bucket size."""
    path = tmp_path / "plan.toml"
    path.write_text(
        '[workload]\nmodel = "gpt"\nbatch = 64\naccumulate = 4\nclip = 0.5\ndropout = 0.1\ntie_embeddings = true\nwarmup = 2\n'
        'dtype = "bfloat16"\nmaster = "float32"\nreduce_dtype = "float32"\n[cluster]\nranks = 16\n[mesh]\ndp = 4\ntp = 4\n'
        '[[strategy]]\nname = "tensor_parallel"\n[[strategy]]\nname = "ddp"\nbucket = 4096\n'
    )
    got = pt.prove(pt.load(path)).json()
    assert got["proved"], got["reasons"]
    assert got.keys() == KEYS
    assert got["square"].keys() == {"equal", "said", "heard", "first_difference"}
    assert got["square"]["said"] == got["square"]["heard"] > 25
    assert got["numerics"].keys() == {"max_relative_error", "bound", "worst_tensor"}
    assert got["numerics"]["bound"] == 1e-10
    assert 0 < got["numerics"]["max_relative_error"] < 1e-10  # float64, whatever the plan's dtype
    assert got["traffic"] == {"algorithmic_equal": True, "wire_error": None}
    assert got["memory"] == {"error": None}
    assert {"mesh dp: 4 -> 2", "mesh tp: 4 -> 2", "accumulate: 4 -> 2"} <= set(got["shrunk"])
    assert "shrunk: mesh dp: 4 -> 2" in text.proof(got)


FACTORY = """
import torch
from torch import nn
import torch.nn.functional as F

def model(width=24):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))

def batches(step):
    g = torch.Generator().manual_seed(step)
    return {"input": torch.randn(12, 6, generator=g), "y": torch.randint(3, (12,), generator=g)}

def loss(output, batch):
    return F.cross_entropy(output, batch["y"])
"""


@pytest.mark.gloo
def test_a_users_own_factory_is_proved_at_its_own_size(tmp_path, monkeypatch):
    (tmp_path / "factory_of_a_user.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    work = Workload("python:factory_of_a_user:model", batch=12, accumulate=2, extra={"width": 30})
    plan = Plan(work, mesh={"dp": 3, "tp": 3}, strategies=[TensorParallel(), DDP()])
    with pytest.raises(Refused) as caught:
        pt.prove(plan, ranks=4)
    assert caught.value.faults[0].cure == "--ranks 9"
    proof = pt.prove(replace_mesh(plan, {"dp": 6, "tp": 2}))  # 6 -> 2
    assert proof.proved, proof.reasons
    assert proof.shrunk == ("mesh dp: 6 -> 2", "python:factory_of_a_user:model is proved at its own size")
    sys.modules.pop("factory_of_a_user", None)


def replace_mesh(plan, mesh):
    return Plan(plan.workload, mesh=mesh, strategies=plan.strategies)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", HF)
def test_a_large_config_of_transformers_is_proved_on_a_small_copy(name, tmp_path):
    grown = {k: v * 4 if k.startswith(("hidden_size", "n_embd", "intermediate", "num_hidden", "n_layer", "vocab")) else v
             for k, v in HF[name].items()}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(grown))
    work = Workload(f"hf:{tmp_path / 'config.json'}", batch=16)
    proof = pt.prove(Plan(work, mesh={"dp": 4, "tp": 4}, strategies=[TensorParallel(), DDP()]))
    assert proof.proved, proof.reasons
    assert any("vocab" in line for line in proof.shrunk)


# ---------------------------------------------------------------- the reference
@pytest.mark.gloo
@pytest.mark.law
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_new_interpreter_trains_the_same_single_device(dropout):
    """With and without dropout: every bit, for it is the same computation."""
    work = Workload("gpt", GPT(layers=1, hidden=16, heads=2, vocab=16, sequence=4, dropout=dropout), batch=4, accumulate=2)
    subject, training = in_double(subject_of(work, synthetic=True)), Training(2, microbatches=2, clip=(0.5, 2.0))
    program = wide_program(subject, 2)
    one, two = (run(subject, program, training) for run in (alone, fresh(work)))
    assert one.losses == two.losses
    for kind in ("state", "gradients"):
        a, b = getattr(one, kind), getattr(two, kind)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert all(t.dtype == torch.float64 for t in a.values())


@pytest.mark.law
def test_the_promise_of_a_plan_is_the_weakest_of_those_that_do_something():
    two, one = Mesh.of({"dp": 2}), Mesh.of({"dp": 1})
    exact = SimpleNamespace(promise=Promise.EXACT, axes=("dp",))
    assert promise_of([DDP()], two, 1) == Promise.REORDERED
    assert promise_of([DDP()], one, 1) == Promise.EXACT
    assert promise_of([DDP()], one, 2) == Promise.REORDERED
    assert promise_of([exact], two, 1) == Promise.EXACT
    assert promise_of([DDP(), SimpleNamespace(promise=Promise.RELAXED, axes=("dp",))], two, 1) == Promise.RELAXED


@pytest.mark.gloo
@pytest.mark.law
def test_a_plan_of_one_rank_is_proved_bitwise():
    plan = Plan(Workload("mlp", MLP(layers=2), batch=4), mesh={"dp": 1, "tp": 1}, strategies=[TensorParallel(), DDP()])
    proof = pt.prove(plan)
    assert proof.proved, proof.reasons
    assert (proof.promise, proof.numerics.bound, proof.said) == (Promise.EXACT, 0.0, 0)
    assert proof.numerics.max_relative_error == 0.0


# ---------------------------------------------------------------- figures: checks that can fail
def outcome(wire, sent, peak=math.nan):
    return SimpleNamespace(wire_bytes_per_rank=wire, peak=peak, traffic=lambda **_: [SimpleNamespace(backend_bytes=sent)])


@pytest.mark.law
@pytest.mark.parametrize(
    ("wire", "largest", "error", "held"),
    [
        (1_000_000, 10**6, 0.0, True),
        (1_009_000, 10**6, 0.009, True),
        (1_011_000, 10**6, 0.011, False),
        (980_000, 10**6, -0.02, False),
        (1_500_000, 10**6 - 1, None, True),
        (None, 10**6, None, True),
    ],
)
def test_the_wire_is_judged_at_one_percent_from_a_megabyte_on(wire, largest, error, held):
    call = Collective("all_reduce", "dp", (), largest, "float32", Phase.BACKWARD)
    found = wire_of([call], outcome(wire, 1_000_000))
    assert found.error == (None if error is None else pytest.approx(error))
    assert found.held is held
    assert proof_with(wire=found).proved is held
    assert held or "wire" in proof_with(wire=found).differs


@pytest.mark.law
@pytest.mark.parametrize(
    ("predicted", "held"), [(JUDGED, True), (1.05 * JUDGED + (2 << 20), True), (1.08 * JUDGED, False), (0.9 * JUDGED, False)]
)
def test_memory_is_judged_at_five_percent_and_two_mebibytes(predicted, held):
    proof = proof_with(memory=Memory(predicted, JUDGED))
    assert proof.proved is held
    assert held or proof.differs == ("memory",)
    assert held or "memory: predicted" in proof.reasons[0]
    assert Memory().held
    assert Memory().error is None


def proof_with(**changes):
    return Proof(**{"promise": Promise.REORDERED, "numerics": FINE, "said": 1, "heard": 1, **changes})


@pytest.mark.law
def test_whatever_does_not_hold_is_named():
    assert proof_with().proved
    bad = proof_with(
        numerics=replace(FINE, max_relative_error=math.inf),
        ledger_equal=False,
        wire=Wire(0.5),
        memory=Memory(1.0, JUDGED),
        invariants=({"name": "mean kept", "held": False},),
    )
    assert bad.differs == ("numerics", "ledger", "wire", "memory", "invariant mean kept")
    assert [reason.partition(":")[0] for reason in bad.reasons] == ["numerics", "traffic", "traffic", "memory", "invariant"]
    got = json.loads(dumps(bad.json()))
    assert got["numerics"]["max_relative_error"] is None  # JSON has no infinity; the reason has
    assert "parameter w is off by inf" in got["reasons"][0]
    assert got["traffic"]["algorithmic_equal"] is False


@pytest.mark.gloo
@pytest.mark.law
def test_the_wire_of_a_large_payload_is_counted_and_as_modelled():
    spec = MLP(layers=2, inputs=256, hidden=1024, outputs=64)
    plan = Plan(Workload("mlp", spec, batch=4), mesh={"dp": 2}, strategies=[DDP()])
    proof = prove_plan(plan, shrink=False)
    assert proof.proved, proof.reasons
    assert proof.wire.error is not None
    assert abs(proof.wire.error) <= 0.01
