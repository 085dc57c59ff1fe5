"""in_network: what is said, that packets are those of the formula, that every rank has the same bits, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt
from partita.cluster import Testbed, cluster_of
from partita.cost.collective import algorithmic, backend_bytes, charge, route_of
from partita.errors import Refused, RunFailed
from partita.mesh import Mesh
from partita.plans import Plan
from partita.program.switched import PACKET, packets_of
from partita.proof.prove import prove_plan
from partita.runtime.programs import program_of
from partita.runtime.testbed.hosts import missing
from partita.strategies import DDP, InNetwork
from partita.strategy import compose
from partita.workload import GPT, Workload

TWO = Mesh.of({"dp": 2})
SMALL = GPT(layers=2, hidden=32, heads=4, vocab=64, sequence=8)
WIDE = GPT(layers=2, hidden=160, heads=4, vocab=256, sequence=8)  # more than 1 MB of gradients: the wire is judged


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))


def batches(step):
    g = torch.Generator().manual_seed(step)
    return {"input": torch.randn(8, 12, generator=g), "y": torch.randint(3, (8,), generator=g)}


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def trained(plan, model=make, steps=3):
    return pt.train(plan, model=model, batches=batches, loss=loss, steps=steps)


def test_a_bucket_is_one_sum_after_backward():
    program = program_of(Workload("gpt", SMALL, batch=8))
    said = [c for c in compose(program, [InNetwork(bucket=1 << 14)], TWO).collectives() if c.op == "switch_reduce"]
    plain = [c for c in compose(program, [DDP(bucket=1 << 14)], TWO).collectives() if c.op == "all_reduce" and c.overlapped]
    assert [(c.nbytes, c.dtype, c.module) for c in said] == [(c.nbytes, c.dtype, c.module) for c in plain]
    assert not any(c.overlapped for c in said)


@pytest.mark.law
@pytest.mark.parametrize("width", [2, 4, 8])
def test_bytes_are_the_packets_of_the_formula(width):
    for count in (1, 256, 257, 65537, 1_000_000):
        for ranks in (2, 4, 32):
            sent = backend_bytes("gloo", "switch_reduce", count * width, ranks, width)
            assert sent == packets_of(count, width) * PACKET
            assert algorithmic("switch_reduce", count * width, ranks) == count * width  # each link carries it once


@pytest.mark.law
def test_time_does_not_grow_with_ranks_where_the_link_is_slow():
    def seconds(op, ranks):
        cluster, mesh = cluster_of(Testbed.of(hosts=ranks, rate="10 Mbit/s"), ranks=ranks), Mesh.of({"dp": ranks})
        return charge(op, 1 << 22, route_of("dp", mesh, cluster), cluster).seconds

    assert seconds("switch_reduce", 8) == pytest.approx(seconds("switch_reduce", 2), rel=0.02)
    assert seconds("all_reduce", 8) > 1.6 * seconds("switch_reduce", 8)


@pytest.mark.gloo
def test_training_is_that_of_ddp_and_every_run_has_the_same_bits():
    plan = pt.Plan(mesh={"dp": 2}, strategies=[InNetwork()])
    first, again = trained(plan), trained(plan)
    plain = trained(replaced(plan, DDP()))
    blocks = trained(replaced(plan, InNetwork(reduce="gloo")))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(tensor, blocks.state_dict()[name])  # the same whole numbers, whoever adds them up
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


def replaced(plan, strategy):
    return pt.Plan(mesh=plan.mesh, strategies=[strategy])


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("reduce", ["udp", "gloo"])
def test_the_wire_carries_what_was_said(reduce):
    plan = Plan(Workload("gpt", WIDE, batch=4), "here", 2, TWO, [InNetwork(reduce=reduce)])
    proof = prove_plan(plan, shrink=False)
    assert not proof.reasons
    assert proof.wire.error == pytest.approx(0, abs=0.01)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=f"no testbed here: {missing()}")
@pytest.mark.parametrize("reduce", ["udp", "xdp"])
def test_it_trains_in_a_testbed(reduce):
    plan = pt.Plan(cluster=Testbed.of(hosts=2, rate="100 Mbit/s"), mesh={"dp": 2}, strategies=[InNetwork(reduce=reduce)])
    alone = trained(pt.Plan())
    found = trained(plan)
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)


def test_without_a_kernels_switch_udp_is_used_and_the_reason_said():
    run = trained(pt.Plan(mesh={"dp": 2}, strategies=[InNetwork(reduce="xdp")]), steps=1)
    assert any("reduced over UDP: XDP cannot be had here" in note for note in run.notes)


@pytest.mark.gloo
def test_a_gradient_that_is_no_number_is_named():
    def broken(step):
        batch = batches(step)
        return batch if step < 2 else {**batch, "input": batch["input"] * float("inf")}

    plan = pt.Plan(mesh={"dp": 2}, strategies=[InNetwork()])
    with pytest.raises(RunFailed, match=r"the gradient of '2\.bias' on rank \d is nan at 0: no switch can sum it"):
        pt.train(plan, model=make, batches=broken, loss=loss, steps=3)


def test_it_is_refused_where_there_is_no_switch():
    with pytest.raises(Refused, match="no switch adds up on '8x8-h100'") as refused:
        Plan(Workload("gpt", SMALL, batch=8), "8x8-h100", 2, TWO, [InNetwork()])
    (fault,) = refused.value.faults
    assert (fault.code, fault.at) == ("P115", "Plan: strategy.in_network.reduce")


def test_a_slot_has_a_bit_for_each_of_32_ranks():
    workload = Workload("gpt", SMALL, batch=64)
    with pytest.raises(Refused) as refused:
        Plan(workload, "here", 64, Mesh.of({"dp": 64}), [InNetwork()])
    (fault,) = refused.value.faults
    assert (fault.code, fault.cure, fault.at) == ("P112", "dp = 32 or less", "Plan: mesh.dp")
    Plan(workload, "here", 32, Mesh.of({"dp": 32}), [InNetwork()])
    Plan(workload, "here", 64, Mesh.of({"dp": 64}), [InNetwork(reduce="gloo")])
