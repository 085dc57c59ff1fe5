"""Laws of data parallelism as said, what is refused with which words, and what only real ranks can show."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.errors import Refused
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program import Collective, Phase
from partita.program.buckets import FLOOR, LIMIT, block_of
from partita.program.data import say_loss
from partita.program.fold import unfold
from partita.proof.prove import prove_plan
from partita.runtime.capture import capture
from partita.runtime.programs import program_of
from partita.runtime.subject import Subject
from partita.strategies.data.ddp import DDP
from partita.strategy import check, compose
from partita.workload import GPT, ResNet, Workload

TWO = Mesh.of({"dp": 2})
SMALL = GPT(layers=5, hidden=32, heads=4, vocab=64, sequence=8)


def gpt(batch=8, **changes):
    return program_of(Workload("gpt", SMALL, batch=batch, **changes))


def calls(program, mesh=TWO, **settings):
    strategies = [DDP(axis=axis, **settings) for axis in mesh.names]
    return [(c.op, c.axis, c.nbytes, c.dtype) for c in compose(program, strategies, mesh).collectives()]


def subject(make, loss=lambda o, b: F.cross_entropy(o, b["y"])):
    def batches(step):
        g = torch.Generator().manual_seed(step)
        return {"x": torch.randn(8, 6, generator=g), "y": torch.randint(3, (8,), generator=g)}

    def seeded():
        torch.manual_seed(0)
        return make()

    return Subject(seeded, batches, loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))


def refused(make, loss=None, **plan):
    s = subject(make, *([loss] if loss else []))
    two = pt.Plan(mesh={"dp": 2}, strategies=[DDP()], **plan)
    with pytest.raises(Refused) as caught:
        pt.prove(two, model=s.make, batches=s.batches, loss=s.loss, optimizer=s.optimizer)
    return caught.value.faults


# ---------------------------------------------------------------- what is said
@pytest.mark.law
def test_every_gradient_is_summed_once_a_step_whatever_the_microbatches():
    weights = sum(t.nbytes for t in unfold(gpt()).parameters())
    for accumulate in (1, 4):
        found = calls(gpt(accumulate=accumulate))
        assert sum(n for _, _, n, _ in found[:-1]) == weights
        assert found[-1] == ("all_reduce", "dp", 16, "float64")
        assert {c[:2] for c in found} == {("all_reduce", "dp")}


@pytest.mark.law
@pytest.mark.parametrize("bucket", [1, 1 << 12, 1 << 15, LIMIT])
def test_buckets_are_in_reverse_registration_order_and_no_larger_than_they_must(bucket):
    program = unfold(gpt())
    said = DDP(bucket=bucket).rewrite(program, TWO)
    sums = [c for c in said.collectives() if c.overlapped]
    order = [said.tensors[g].name for c in sums for g in c.tensors]
    assert order == [p.name for p in reversed(program.parameters()) if p.id in program.gradients]
    each = {said.tensors[g].name: said.local_bytes(g) for c in sums for g in c.tensors}
    for c in sums:
        names = [said.tensors[g].name for g in c.tensors]
        held = list(itertools.accumulate(each[name] for name in names))
        assert held[-1] == c.nbytes
        full = next((n for n, size in enumerate(held) if size >= bucket), len(held) - 1)
        left = names[full + 1 :]  # it closes as soon as it holds its limit; what is left of a block goes with it
        assert held[-1] - held[full] < min(FLOOR, bucket)
        assert {block_of(name) for name in left} <= {block_of(names[full])}


@pytest.mark.law
def test_a_bucket_is_sent_once_its_last_gradient_is_made():
    said = DDP(bucket=1).rewrite(unfold(gpt()), TWO)
    made = set()
    for event in said.events():
        if isinstance(event, Collective) and event.overlapped:
            assert set(event.tensors) <= made
            assert event.phase == Phase.BACKWARD
        elif not isinstance(event, Collective):
            made.update(event.outs)


@pytest.mark.law
def test_over_two_data_axes_the_second_sums_what_the_first_has_summed():
    mesh = Mesh.of({"outer": 2, "dp": 2})
    program = gpt()
    said = compose(program, [DDP(axis="dp", bucket=1), DDP(axis="outer")], mesh)
    first, second = ([c for c in said.collectives() if c.axis == axis] for axis in ("dp", "outer"))
    assert sum(c.nbytes for c in first) == sum(c.nbytes for c in second)
    assert not any(c.overlapped for c in second)
    assert said.local_shape(next(t.id for t in said.tensors if t.name == "tokens"))[0] == 2  # 8 samples over 4


@pytest.mark.law
def test_the_reduction_dtype_is_said():
    half = Workload("gpt", SMALL, batch=8, dtype="bfloat16", master="float32")
    own, wide = (calls(program_of(replace(half, reduce_dtype=dtype)))[:-1] for dtype in (None, "float32"))
    assert {c[3] for c in own} == {"bfloat16"}
    assert {c[3] for c in wide} == {"float32"}
    assert sum(c[2] for c in wide) == 2 * sum(c[2] for c in own)


@pytest.mark.law
def test_control_flow_that_depends_on_data_first_tells_who_has_a_gradient():
    program = replace(gpt(), dynamic=True)
    count = len(unfold(program).gradients)
    assert calls(program)[-2:] == [("all_reduce", "dp", count, "uint8"), ("all_reduce", "dp", 16, "float64")]
    assert compose(program, [], TWO).gradients != unfold(program).gradients
    assert say_loss(program, "dp").collectives()[0].nbytes == count  # folded or not


@pytest.mark.law
def test_where_nothing_is_learned_a_note_says_so():
    forward = unfold(gpt())
    segments = tuple(replace(s, events=tuple(e for e in s.events if e.phase == Phase.FORWARD)) for s in forward.segments)
    said = DDP().rewrite(replace(forward, segments=segments, gradients={}), TWO)
    assert [c.nbytes for c in said.collectives()] == [16]
    assert said.notes[-1] == "ddp: nothing is learned, so no gradient is summed over dp = 2"


@pytest.mark.law
def test_batch_norm_moves_two_numbers_a_channel_each_way():
    program = program_of(Workload("resnet", ResNet(layers=1, stages=1, hidden=4, classes=4, size=4), batch=8))
    inside = [c for c in DDP().rewrite(program, TWO).collectives() if not c.once]
    assert [(c.phase, c.nbytes) for c in inside] == [(Phase.FORWARD, 2 * 4 * 4)] * 3 + [(Phase.BACKWARD, 2 * 4 * 4)] * 3


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("batch", "accumulate", "cure"), [(10, 1, "batch = 8 or 12"), (4, 2, "batch = 8"), (2, 1, "batch = 4")]
)
def test_a_batch_that_does_not_divide_is_refused_with_its_neighbours(batch, accumulate, cure):
    (fault,) = check(gpt(batch, accumulate=accumulate), [DDP()], Mesh.of({"dp": 4}))
    assert (fault.code, fault.at) == ("P104", "workload.batch")
    assert fault.have == f"batch = {batch}, dp = 4, accumulate = {accumulate}"
    assert fault.cure == cure


def test_the_second_data_axis_divides_what_the_first_left():
    strategies = [DDP(axis="dp"), DDP(axis="outer")]
    (fault,) = check(gpt(4), strategies, Mesh.of({"outer": 4, "dp": 2}))
    assert "batch = 2, outer = 4" in fault.have
    assert not check(gpt(8), strategies, Mesh.of({"outer": 4, "dp": 2}))


@pytest.mark.parametrize(
    ("settings", "words", "at"),
    [
        ({"modules": ("blocks.*",)}, "ddp cannot be of some modules", "modules"),
        ({"bucket": 0}, "bucket = 0 is out of range", "bucket"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, words, at):
    with pytest.raises(Refused) as caught:
        DDP(**settings)
    (fault,) = caught.value.faults
    assert (fault.code, fault.at) == ("P112", at)
    assert words in fault.what
    assert fault.cure


class Centred(nn.Module):
    """Takes from each sample what all have in common."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        y = self.linear(x)
        return y - y.mean(0, keepdim=True)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Centred()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(("make", "who"), [(Centred, "the model itself, or its loss,"), (Holder, "module 'inner'")])
def test_a_module_that_mixes_samples_is_refused_by_name(make, who):
    (fault,) = refused(make)
    assert fault.code == "P116"
    assert fault.what == f"DDP(axis='dp') cannot split the batch: {who} mixes samples"
    assert "''" not in str(fault)


class Functional(nn.Module):
    """Normalises without a batch norm module."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        return F.batch_norm(self.linear(x), None, None, training=True)


class Norm(nn.Module):
    def __init__(self, kind=nn.SyncBatchNorm):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 3), kind(3)

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.mark.gloo
def test_batch_norm_outside_a_module_is_refused():
    (fault,) = refused(Functional)
    assert fault.code == "P116"
    assert "F.batch_norm" in fault.have
    assert "nn.BatchNorm1d" in fault.cure


@pytest.mark.gloo
@pytest.mark.parametrize("kind", [nn.SyncBatchNorm, nn.BatchNorm1d])
def test_batch_norm_under_accumulation_is_refused(kind):
    (fault,) = refused(lambda: Norm(kind), accumulate=2)
    assert (fault.code, fault.at) == ("P115", "workload.accumulate")
    assert "'norm'" in fault.what


# ---------------------------------------------------------------- on ranks
@pytest.mark.gloo
def test_synchronised_batch_norm_is_a_batch_norm_like_any_other():
    s = subject(Norm)
    proof = pt.prove(pt.Plan(mesh={"dp": 2}, strategies=[DDP()]), model=s.make, batches=s.batches, loss=s.loss)
    assert proof.proved, proof.reasons
    assert proof.said == 4  # statistics forward and backward, a bucket, the loss


@pytest.mark.gloo
@pytest.mark.parametrize("order", list(itertools.permutations(["dp", "outer"])))
def test_two_data_axes_with_a_reduction_dtype_of_their_own_commute(order):
    workload = Workload("gpt", replace(SMALL, layers=1), batch=8, dtype="bfloat16", reduce_dtype="float32", accumulate=2)
    strategies = [DDP(axis=order[0], bucket=1 << 10), DDP(axis=order[1], bucket=1)]
    proof = prove_plan(Plan(workload, mesh={"dp": 2, "outer": 2}, strategies=strategies), shrink=False)
    assert proof.proved, proof.reasons


@pytest.mark.law
def test_capture_names_the_batch_of_a_users_module():
    program = capture(subject(Norm), 8)
    assert check(program, [DDP()], TWO) == []
    assert len(check(program, [DDP()], Mesh.of({"dp": 3}))) == 1
