"""A user's own loop on ranks ends where it ends on one device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.errors import Refused
from partita.mesh import Mesh
from partita.runtime.checkpoint import read_whole
from partita.runtime.ranks import run_ranks
from partita.runtime.session import Session
from partita.strategies.data.ddp import DDP
from partita.strategies.tensor.tensor_parallel import TensorParallel

pytestmark = pytest.mark.gloo


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 4)).double()


def optimizer(module):
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def pairs(count=3, samples=8):
    for k in range(count):
        g = torch.Generator().manual_seed(k)
        yield torch.randn(samples, 8, generator=g, dtype=torch.float64), torch.randint(4, (samples,), generator=g)


FORMS = {
    "tuple": (lambda x, y: (x, y), lambda out, batch: F.cross_entropy(out, batch[1])),
    "mapping": (lambda x, y: {"input": x, "y": y}, lambda out, batch: F.cross_entropy(out, batch["y"])),
    "tensor": (lambda x, y: x, lambda out, batch: (out[:, 0] - batch[:, 1]).square().mean()),
}


def alone(form):
    shape, loss_fn = FORMS[form]
    model = make()
    chosen, losses = optimizer(model), []
    for x, y in pairs():
        loss = loss_fn(model(x), shape(x, y))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def story(session, form, *, none=True):
    shape, loss_fn = FORMS[form]
    model, chosen = session.wrap(make(), optimizer)
    losses = []
    for batch in session.shard(shape(x, y) for x, y in pairs()):
        loss = session.step(model, batch, loss_fn)
        session.clip(model, max_norm=0.3)
        chosen.step()
        chosen.zero_grad(set_to_none=none)
        losses.append(float(loss))
    return [losses, {k: v.tolist() for k, v in session.state_dict().items()}]


@pytest.mark.parametrize(
    ("mesh", "strategies", "accumulate", "form", "none"),
    [
        ({"dp": 2}, [DDP()], 1, "tuple", True),
        ({"dp": 2}, [DDP()], 2, "mapping", False),
        ({"tp": 2}, [TensorParallel()], 1, "tensor", True),
        ({"dp": 2, "tp": 2}, [TensorParallel(), DDP()], 1, "mapping", True),
    ],
    ids=["dp2", "dp2 accumulate2", "tp2", "dp2 tp2"],
)
def test_an_own_loop_equals_one_device(mesh, strategies, accumulate, form, none):
    losses, state = alone(form)
    for got, whole in run_ranks(
        Mesh.of(mesh), lambda net: story(Session(net, strategies, accumulate=accumulate), form, none=none)
    ):
        assert got == pytest.approx(losses, rel=1e-12)
        for name, t in state.items():
            assert torch.allclose(torch.tensor(whole[name], dtype=torch.float64), t, rtol=1e-10, atol=1e-13)


def test_gradients_of_two_steps_add_up_without_zero_grad():
    def work(net):
        session = Session(net, [DDP()])
        model, _ = session.wrap(make(), optimizer)
        for batch in session.shard(pairs(2)):
            session.step(model, batch, FORMS["tuple"][1])
        return [p.grad.tolist() for p in model.parameters()]

    whole = make()
    for batch in pairs(2):
        FORMS["tuple"][1](whole(batch[0]), batch).backward()
    for grads in run_ranks(Mesh.of({"dp": 2}), work):
        for g, p in zip(grads, whole.parameters(), strict=True):
            assert torch.allclose(torch.tensor(g, dtype=torch.float64), p.grad, rtol=1e-10, atol=1e-14)


def test_a_part_made_by_the_user_is_taken_as_it_is():
    def work(net):
        session = Session(net, [DDP()])
        model, _ = session.wrap(make(), optimizer)
        x, y = next(pairs())
        mine = slice(4 * net.rank, 4 * net.rank + 4)
        return float(session.step(model, (x[mine], y[mine]), FORMS["tuple"][1]))

    assert run_ranks(Mesh.of({"dp": 2}), work) == pytest.approx([alone("tuple")[0][0]] * 2)


def test_a_short_last_batch_is_refused():
    def wrapped(net):
        session = Session(net, [DDP()])
        session.wrap(make(), optimizer)
        return list(session.shard([torch.zeros(8, 8), torch.zeros(6, 8)]))

    with pytest.raises(Refused, match="batch 1 has 6 samples"):
        run_ranks(Mesh.of({"dp": 2}), wrapped)


def test_a_batch_that_does_not_divide_is_refused():
    def work(net):
        session = Session(net, [DDP()], accumulate=3)
        session.wrap(make(), optimizer)
        return len(list(session.shard(pairs())))

    with pytest.raises(Refused, match="6 must divide 8"):
        run_ranks(Mesh.of({"dp": 2}), work)


def told(mesh, strategies, steps, folder=None, save=False):
    """Losses of a loop that goes on from a folder, if there is one."""

    def story(net):
        session = Session(net, strategies)
        model, opt = session.wrap(make(), optimizer)
        done = session.resume(folder) if folder and not save else 0
        losses = []
        for x, y in session.shard(list(pairs(steps))[done:]):
            losses.append(float(session.step(model, (x, y), FORMS["tuple"][1])))
            opt.step()
            opt.zero_grad()
        if save:
            session.save(folder, steps)
        return losses

    return run_ranks(Mesh.of(mesh), story)[0]


def test_a_story_goes_on_from_a_checkpoint_under_any_split(tmp_path):
    whole = told({"dp": 2}, [DDP()], 5)
    assert told({"dp": 2}, [DDP()], 3, tmp_path, save=True) == whole[:3]
    assert told({"dp": 2}, [DDP()], 5, tmp_path) == whole[3:]
    assert told({"tp": 2}, [TensorParallel()], 5, tmp_path) == pytest.approx(whole[3:], rel=1e-12)


def test_a_story_can_save(tmp_path):
    def work(net):
        session = Session(net, [TensorParallel()])
        model, chosen = session.wrap(make(), optimizer)
        for batch in session.shard(pairs(1)):
            session.step(model, batch, FORMS["tuple"][1])
            chosen.step()
        session.save(tmp_path, 1)
        return {k: v.tolist() for k, v in session.state_dict().items()}

    state = run_ranks(Mesh.of({"tp": 2}), work)[0]
    tensors, _ = read_whole(tmp_path)
    for name, value in state.items():
        assert tensors[f"model/{name}"].tolist() == value


TORCHRUN = """
import json, sys
from pathlib import Path
import torch
from partita.mesh import Mesh
from partita.runtime.capture import capture
from partita.runtime.ranks import run_ranks
from partita.runtime.loop import train_ranks
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.strategies.data.ddp import DDP
from partita.strategies.tensor.tensor_parallel import TensorParallel
from partita.workload import GPT, Workload

spec = GPT(layers=2, hidden=32, heads=4, vocab=64, sequence=16)
subject = subject_of(Workload("gpt", spec, batch=8, dtype="float64"), synthetic=True)
program = capture(subject, 8)
work = lambda net: train_ranks(net, subject, [TensorParallel(), DDP()], program, Training(3, folder=Path(sys.argv[1])))
ranks = run_ranks(Mesh.of({"dp": 1, "tp": 2}), work)
if ranks[0]["pid"] == __import__("os").getpid():
    print(json.dumps([[r["losses"], r["rank"], len(r["heard"]), r["ledger"] == ranks[0]["ledger"]] for r in ranks]))
"""


@pytest.mark.slow
def test_the_same_call_runs_under_torchrun(split, gpt, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    whole = split(gpt, {"dp": 1})
    for rank, (losses, number, calls, same) in enumerate(found):
        assert losses == pytest.approx(whole.losses, rel=1e-12)
        assert number == rank
        assert calls > 0
        assert same
    assert (tmp_path / "run" / "checkpoints" / "step-3" / "index.json").is_file()
    assert Path(tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 4
