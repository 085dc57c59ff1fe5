"""A float32 copy for the optimizer: what small updates add up to, and what a run keeps of it."""

import pytest
import torch
from torch import nn

import partita as pt
from partita.runtime.master import KEY, Mastered
from partita.runtime.programs import program_of
from partita.strategies import DDP, TensorParallel
from partita.workload import GPT, Workload


@pytest.mark.law
@pytest.mark.parametrize("kind", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)], ids=["adamw", "sgd"])
def test_masters_step_as_a_float32_model_with_the_same_gradients(kind):
    torch.manual_seed(0)
    half = nn.Linear(8, 8).bfloat16()
    whole = nn.Linear(8, 8)
    whole.load_state_dict(half.state_dict())
    ours, theirs = Mastered(kind(half.parameters(), lr=1e-3)), kind(whole.parameters(), lr=1e-3)
    for _ in range(5):
        for p, q in zip(half.parameters(), whole.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    for p, q in zip(half.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.state[p][KEY], q)
        assert torch.equal(p, q.bfloat16())


@pytest.mark.case
def test_updates_too_small_for_a_half_parameter_add_up():
    half = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    plain = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    ours, theirs = Mastered(torch.optim.SGD([half], lr=1e-3)), torch.optim.SGD([plain], lr=1e-3)
    for _ in range(100):
        for p, optimizer in ((half, ours), (plain, theirs)):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert plain.item() == 1.0  # each update was rounded away
    assert half.item() == pytest.approx(0.9, abs=2**-9)


@pytest.mark.case
def test_a_parameter_without_a_gradient_is_left_alone():
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    Mastered(torch.optim.AdamW([p])).step()
    assert p.item() == 1.0


@pytest.mark.case
def test_masters_are_in_the_program_folded_and_counted():
    spec = GPT(layers=5, hidden=32, heads=4, vocab=64, sequence=8)
    plain, mastered = (program_of(Workload("gpt", spec, batch=2, dtype="bfloat16", master=m)) for m in (None, "float32"))
    assert any(s.count > 1 for s in mastered.segments)
    names = {t.name.rpartition(".")[2] for t in mastered.tensors if t.kind == "optimizer"}
    assert KEY in names
    assert KEY not in {t.name.rpartition(".")[2] for t in plain.tensors if t.kind == "optimizer"}


@pytest.mark.gloo
def test_a_bf16_plan_with_masters_is_proved_and_resumes_bitwise(tmp_path):
    workload = Workload(
        "gpt", GPT(layers=2, hidden=32, heads=4, vocab=256, sequence=16), batch=8, dtype="bfloat16", master="float32"
    )
    plan = pt.Plan(workload, mesh={"dp": 2, "tp": 2}, strategies=[TensorParallel(), DDP()])
    assert pt.prove(plan).proved
    through = pt.train(plan, steps=4, out=tmp_path / "through").losses
    pt.train(plan, steps=2, out=tmp_path / "parts")
    assert pt.train(plan, steps=4, resume=tmp_path / "parts").losses == through[2:]
