"""The recorder hears every collective, its axis, its large side, its dtype and its phase."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from partita.program.events import Phase
from partita.runtime.record import Recorder

pytestmark = pytest.mark.law


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield dist.new_group([0])
    dist.destroy_process_group()


class Sum(torch.autograd.Function):
    """Identity forward, all_reduce backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Module(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.inner, self.group = nn.Linear(4, 4, bias=False), group

    def forward(self, x):
        return Sum.apply(self.inner(x), self.group)


def test_phases_axes_and_sizes_are_heard(group):
    module = Module(group)
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    with Recorder({group.group_name: "tp", dist.group.WORLD.group_name: "dp"}, module) as recorder:
        x = torch.ones(3, 4, dtype=torch.float32)
        dist.all_reduce(x, group=group, async_op=True).wait()
        module(x).sum().backward()
        dist.all_reduce(torch.zeros(2, dtype=torch.float64))
        optimizer.step()
    found = [(h.op, h.axis, h.nbytes, h.dtype, h.phase) for h in recorder.heard]
    assert found == [
        ("all_reduce", "tp", 48, "float32", Phase.FORWARD),
        ("all_reduce", "tp", 48, "float32", Phase.BACKWARD),
        ("all_reduce", "dp", 16, "float64", Phase.FORWARD),
    ]


def test_the_large_side_counts_and_barriers_do_not(group):
    with Recorder({group.group_name: "tp"}) as recorder:
        part, whole = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
        dist.all_gather_single(whole, part, group=group)
        dist.reduce_scatter_single(part, whole, group=group)
        dist.all_to_all_single(part, whole, group=group)
        dist.broadcast(part, 0, group=group)
        dist.all_gather([whole], part, group=group)
        dist.barrier(group=group)
    assert [h.op for h in recorder.heard] == ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "all_gather"]
    assert {(h.nbytes, h.dtype, h.axis) for h in recorder.heard} == {(4, "bfloat16", "tp")}


def test_a_group_it_was_not_told_of_is_heard_all_the_same(group):
    with Recorder({}) as recorder:
        dist.all_reduce(torch.ones(1), group=group)
    assert [h.axis for h in recorder.heard] == ["?"]


def test_nothing_stays_behind(group):
    before = (len(nn.modules.module._global_forward_pre_hooks), len(nn.modules.module._global_forward_hooks))
    with pytest.raises(ZeroDivisionError), Recorder({}):
        raise ZeroDivisionError
    assert before == (len(nn.modules.module._global_forward_pre_hooks), len(nn.modules.module._global_forward_hooks))
