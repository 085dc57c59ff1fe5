"""The Python contract: train, prove, spawn, session, on a user's own module."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import partita as pt
from partita.errors import Refused
from partita.strategies import DDP, TensorParallel

ROOT = Path(__file__).parents[1]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


def batches(step):
    drawn = torch.Generator().manual_seed(step)
    return {"input": torch.randn(8, 8, generator=drawn, dtype=torch.double), "y": torch.randint(8, (8,), generator=drawn)}


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["y"])


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def whole(steps=3, clip=None):
    """One process, the whole batch, plain torch."""
    module = make()
    optimizer, losses = sgd(module), []
    for step in range(steps):
        batch = batches(step)
        value = loss(module(batch["input"]), batch)
        optimizer.zero_grad()
        value.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), *clip)
        optimizer.step()
        losses.append(value.item())
    return losses, module.state_dict(), {n: p.grad for n, p in module.named_parameters()}


def both(sizes=None):
    return pt.Plan(mesh=sizes or {"dp": 2, "tp": 2}, strategies=[TensorParallel(), DDP()])


def test_train_gives_what_one_device_gives_and_the_caller_may_have_trained_before():
    losses, state, gradients = whole(clip=(0.05, 2.0))
    run = pt.train(
        both(), model=make, batches=batches, loss=loss, optimizer=sgd, steps=3, clip=(0.05, 2.0), keep_gradients=True
    )
    assert run.losses == pytest.approx(losses, rel=1e-12)
    assert run.state_dict().keys() == state.keys()
    assert all(torch.allclose(t, state[n], rtol=1e-11, atol=1e-13) for n, t in run.state_dict().items())
    assert all(torch.allclose(t, gradients[n], rtol=1e-11, atol=1e-13) for n, t in run.gradients().items())
    assert run.error["traffic"] == 0
    assert run.figures is not None
    assert run.run_dir is None


def test_a_module_is_not_changed_and_batches_may_be_a_list():
    module = make()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    listed = [batches(step) for step in range(2)]
    run = pt.train(pt.Plan(mesh={"dp": 2}, strategies=[DDP()]), model=module, batches=listed, loss=loss, optimizer=sgd, steps=2)
    assert run.losses == pytest.approx(whole(2)[0], rel=1e-12)
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


def test_prove_holds_and_says_what_it_compared():
    proof = pt.prove(both(), model=make, batches=batches, loss=loss, optimizer=sgd)
    assert proof.proved
    said = proof.json()
    assert said["square"]["equal"]
    assert said["square"]["said"] == said["square"]["heard"] > 0
    assert said["numerics"]["max_relative_error"] <= 1e-10


def story(session):
    model, optimizer = session.wrap(make(), sgd)
    losses = []
    for batch in session.shard([batches(step) for step in range(3)]):
        losses.append(float(session.step(model, batch, loss)))
        session.clip(model, max_norm=0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_spawn_runs_a_story_on_every_rank():
    losses, _, _ = whole(clip=(0.05, 2.0))
    told = pt.spawn(both(), story)
    assert len(told) == 4
    assert all(one == pytest.approx(losses, rel=1e-12) for one in told)


def test_session_serves_one_rank_here_and_else_shows_the_torchrun_line():
    with pt.session(pt.Plan()) as session:
        assert story(session) == pytest.approx(whole(clip=(0.05, 2.0))[0], rel=1e-12)
    with pytest.raises(Refused, match=r"torchrun --nproc-per-node 4") as refused, pt.session(both()):
        pass
    assert refused.value.faults[0].code == "P118"


def test_what_a_story_returns_must_be_plain_data():
    with pytest.raises(Refused, match="P102"):
        pt.spawn(pt.Plan(), lambda session: torch.ones(1))


def test_parts_that_are_missing_are_all_named():
    with pytest.raises(Refused) as refused:
        pt.train(pt.Plan(), model=make, loss=3)  # pyright: ignore[reportArgumentType]
    assert {f.at for f in refused.value.faults} == {"train(batches=)", "train(loss=)"}
    with pytest.raises(Refused, match="P119"):
        pt.train(pt.Plan())


def test_report_prints_predicted_measured_error():
    run = pt.train(pt.Plan(), model=make, batches=batches, loss=loss, steps=1)
    page = pt.report(run)
    assert all(word in page for word in ("predicted", "measured", "error", "peak memory"))


@pytest.mark.slow
def test_the_reference_page_runs():
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs/reference/python.md").read_text(), re.DOTALL))
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120, capture_output=True)


@pytest.mark.slow
def test_a_story_runs_under_torchrun(tmp_path):
    script = tmp_path / "story.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import partita as pt\nfrom test_python import both, story, whole\n"
        "with pt.session(both({'dp': 1, 'tp': 2})) as session:\n"
        "    told = story(session)\n"
        "    assert max(abs(a - b) for a, b in zip(told, whole(clip=(0.05, 2.0))[0], strict=True)) < 1e-12\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
