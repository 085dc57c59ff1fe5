"""Batch norm over data ranks is batch norm on one device: outputs, gradients, statistics, and the bytes that were said."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.mesh import Mesh
from partita.program import Collective, Phase
from partita.runtime.batch import Share, taken
from partita.runtime.batch_norm import GlobalStatistics, microbatch_faults, norms
from partita.runtime.net import Net
from partita.runtime.programs import program_of
from partita.runtime.ranks import run_ranks
from partita.runtime.task import subject_of
from partita.strategies.data.ddp import DDP
from partita.workload import ResNet, Workload

CASES = {
    "1d": (lambda: nn.BatchNorm1d(5), (6, 5)),
    "1d of sequences": (lambda: nn.BatchNorm1d(5), (6, 5, 7)),
    "2d": (lambda: nn.BatchNorm2d(5), (6, 5, 3, 4)),
    "3d": (lambda: nn.BatchNorm3d(5), (6, 5, 2, 3, 2)),
    "cumulative": (lambda: nn.BatchNorm2d(5, momentum=None), (6, 5, 3, 4)),
    "plain": (lambda: nn.BatchNorm2d(5, affine=False), (6, 5, 3, 4)),
    "untracked": (lambda: nn.BatchNorm2d(5, track_running_stats=False), (6, 5, 3, 4)),
    "without bias": (lambda: nn.BatchNorm2d(5, bias=False), (6, 5, 3, 4)),
    "one sample a rank": (lambda: nn.BatchNorm1d(5), (2, 5)),
    "channels last": (lambda: nn.BatchNorm2d(5), (6, 5, 3, 4)),
}


def ran(module, xs, statistics):
    """Outputs, gradients and state after one pass per x, the gradients weighted unevenly."""
    outs, grads = [], []
    for x, w in xs:
        x = x.clone().requires_grad_()
        with statistics:
            out = module(x)
            (out * w).sum().backward()
        outs.append(out.detach())
        grads.append(x.grad)
    return outs, grads


def inputs(case, dtype, step):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(CASES[case][1], generator=g, dtype=torch.float64) * 2 + 3
    w = torch.randn(x.shape, generator=g, dtype=torch.float64)
    if case == "channels last":
        x = x.to(memory_format=torch.channels_last)
    return x.to(dtype), w.to(dtype)


def made(case, dtype):
    module = CASES[case][0]().to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.linspace(0.5, 1.5, p.numel()))
    return module


def worst(a, b):
    return max(float(((x - y).abs().max() / y.abs().max().clamp_min(1)).detach()) for x, y in zip(a, b, strict=True))


def compare(net):
    """{case and dtype: the largest error}."""
    errors = {}
    for case, dtype in [(c, torch.float64) for c in CASES] + [("2d", torch.float32), ("2d", torch.bfloat16)]:
        samples = CASES[case][1][0]
        if samples % net.ranks:
            continue
        one, split = made(case, dtype), made(case, dtype)
        mine = Share(net.rank * samples // net.ranks, samples // net.ranks)
        wholes = [inputs(case, dtype, s) for s in range(3)]
        parts = [tuple(taken({"x": t}, mine, samples)["x"] for t in pair) for pair in wholes]
        outs, grads = ran(one, wholes, torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
        ours, mygrads = ran(split, parts, GlobalStatistics(net, ["dp"], split))
        cut = slice(mine.first, mine.first + mine.samples)
        for p in split.parameters():
            net.all_reduce(p.grad, "dp")
        error = [
            worst(ours, [t[cut] for t in outs]),
            worst(mygrads, [t[cut] for t in grads]),
            worst(split.state_dict().values(), one.state_dict().values()) if one.state_dict() else 0.0,
            worst([p.grad for p in split.parameters()], [p.grad for p in one.parameters()]) if list(one.parameters()) else 0.0,
        ]
        one.eval()
        split.eval()
        if case != "untracked":
            with GlobalStatistics(net, ["dp"], split):
                error.append(worst([split(parts[0][0])], [one(wholes[0][0])[cut]]))
        errors[f"{case} {dtype}"] = max(error)
        assert split.state_dict().keys() == one.state_dict().keys()
        assert all(t.dtype == dtype for t in ours)
    return errors


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_batch_norm_on_one_device(ranks):
    bounds = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2e-2}
    for told in run_ranks(Mesh.of({"dp": ranks}), compare):
        assert len(told) >= 11
        for case, error in told.items():
            assert error <= bounds[case.rpartition(".")[2]], case


def mixed(net):
    """Half activations, float32 weights: what autocast makes."""
    x = inputs("2d", torch.bfloat16, 0)[0]
    module = nn.BatchNorm2d(5)
    with GlobalStatistics(net, ["dp"], module):
        out = module(x)
        out.float().square().sum().backward()
    return [str(out.dtype), str(module.weight.grad.dtype), [e.json() for e in net.ledger]]


@pytest.mark.gloo
def test_half_activations_keep_wide_statistics():
    for out, grad, ledger in run_ranks(Mesh.of({"dp": 2}), mixed):
        assert (out, grad) == ("torch.bfloat16", "torch.float32")
        assert ledger == [["all_reduce", "dp", 2 * 5 * 4, "float32", ""]] * 2


class Own(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.scale = nn.BatchNorm2d(channels)
        self.deep = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm2d(channels, affine=False))

    def forward(self, x):
        own = F.batch_norm(x, None, None, training=True)
        return self.deep(self.scale(own))


def named(net):
    module = Own(4)
    with GlobalStatistics(net, ["dp"], module):
        module(torch.randn(2, 4, 3, 3)).square().sum().backward()
    return [e.label for e in net.ledger]


@pytest.mark.gloo
def test_every_call_is_met_and_named():
    assert run_ranks(Mesh.of({"dp": 2}), named)[0] == ["batch_norm", "scale", "deep.1", "deep.1", "scale"]


def test_one_part_is_left_to_torch_and_one_value_is_refused():
    net = Net(Mesh.of({"dp": 1}), 0)
    module, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    with GlobalStatistics(net, ["dp"], module):
        assert torch.equal(module(x), other(x))
        with pytest.raises(ValueError, match="more than 1 value"):
            module(x[:1])
    with pytest.raises(ValueError, match="more than 1 value"):
        other(x[:1])


# ---------------------------------------------------------------- said and done
def tiny(dtype):
    spec = ResNet(layers=2, stages=2, hidden=4, classes=3, size=8)
    return Workload("resnet", spec, batch=4, dtype=dtype)


def heard(net, dtype):
    subject = subject_of(tiny(dtype))
    module, batch = subject.make(), subject.batches(0)
    part = taken(batch, Share(2 * net.rank, 2), 4)
    with GlobalStatistics(net, ["dp"], module):
        subject.evaluate(module, part).backward()
    return [[e.op, e.axis, e.nbytes, e.dtype, e.label] for e in net.ledger]


@pytest.mark.gloo
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_what_is_sent_is_what_data_parallelism_says(dtype, tmp_path):
    mesh = Mesh.of({"dp": 2})
    program = DDP().rewrite(program_of(tiny(dtype), tmp_path), mesh)
    said = [
        [e.op, e.axis, e.nbytes, e.dtype, e.module]
        for e in program.events()
        if isinstance(e, Collective) and not e.once and e.phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    for told in run_ranks(mesh, lambda net: heard(net, dtype)):
        assert told == said
    assert len(said) == 2 * len(norms(subject_of(tiny(dtype)).make()))


def test_accumulation_is_refused_by_name():
    module = Own(2)
    assert norms(module) == ["scale", "deep.1"]
    (fault,) = microbatch_faults(module, 2, None)
    assert fault.code == "P115"
    assert "'scale'" in fault.what
    assert not microbatch_faults(module, 2, "microbatch")
    assert not microbatch_faults(module, 1, None)
    assert not microbatch_faults(module.eval(), 2, None)
