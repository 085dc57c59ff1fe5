"""Lifetimes: what is alive at the peak, and who owns it."""

from dataclasses import replace

import pytest

from partita.cluster import named
from partita.cost.memory import gradient_buffers, half_products, occupancy
from partita.program.events import Kind, Phase

MB = 1 << 20


def test_a_chain_of_two_layers_by_hand(chain):
    """Peak at the gradient of the last activation: x1, both h, y and g are alive; weights and x are static."""
    found = occupancy(chain(layers=2, tokens=512, width=128))
    activation, weight = 512 * 128 * 4, 128 * 128 * 4
    assert found.parts["parameters"] == 2 * weight
    assert found.parts["activations"] == 5 * activation
    assert found.parts["other"] == activation  # the input
    assert found.peak == sum(found.parts.values())
    assert found.at == "backward m: ones_like"


def test_buckets_live_all_along_and_gradients_are_added_to_them(chain):
    weight = 128 * 128 * 4
    early, late = occupancy(chain(tokens=512)), occupancy(chain(tokens=512, bucket=True))
    assert (early.parts["gradients"], late.parts["gradients"]) == (0, 2 * weight)  # the peak is before any is made
    deep = occupancy(chain(12, 8, bucket=True))
    assert deep.parts["gradients"] == 12 * weight + weight  # the one just made, not yet added


def test_accumulated_gradients_are_there_when_forward_runs_again(chain):
    once, twice = occupancy(chain(tokens=512)), occupancy(replace(chain(tokens=512), microbatches=2))
    assert twice.peak - once.peak == 2 * 128 * 128 * 4


def test_half_gradients_accumulate_in_float32(chain):
    program = chain()
    half = tuple(replace(t, dtype="bfloat16") for t in program.tensors)
    assert gradient_buffers(replace(program, tensors=half)) == 0
    assert gradient_buffers(replace(program, tensors=half, microbatches=2)) == 2 * 128 * 128 * (2 + 4)
    assert gradient_buffers(replace(program, microbatches=2)) == 2 * 128 * 128 * 4


def test_views_own_nothing(builder):
    b = builder()
    x = b.tensor(MB, kind=Kind.INPUT)
    y = b.op("neg", Phase.FORWARD, (x,), MB)
    z = b.op("view", Phase.FORWARD, (y,), MB, root=y, view=True)
    b.op("neg", Phase.FORWARD, (z,), MB)
    assert occupancy(b.program()).peak == 3 * 4 * MB


def test_a_drop_keeps_a_storage_alive(builder):
    def built(*, held):
        b = builder()
        x = b.tensor(MB, kind=Kind.INPUT)
        y = b.op("neg", Phase.FORWARD, (x,), MB)
        z = b.op("neg", Phase.FORWARD, (y,), MB)
        b.op("neg", Phase.FORWARD, (z,), MB)
        if held:
            b.events.append(replace(b.events[-1], op="drop", ins=(y,), outs=(), view=True))
        return occupancy(b.program()).peak

    assert built(held=True) - built(held=False) == 4 * MB


def test_optimizer_state_is_static_and_shared_storage_counts_once(builder):
    b = builder()
    w = b.tensor(MB, kind=Kind.PARAMETER, name="w")
    m = b.tensor(MB, kind=Kind.OPTIMIZER, name="w.exp_avg")
    g = b.op("neg", Phase.BACKWARD, (w,), MB)
    b.gradients[w] = g
    b.op("lerp_", Phase.OPTIMIZER, (m, g), MB, root=m)
    found = occupancy(b.program())
    assert found.parts == {"parameters": 4 * MB, "gradients": 4 * MB, "optimizer": 4 * MB, "activations": 0, "other": 0}


@pytest.mark.parametrize(("op", "copies"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 0), ("all_to_all", 0)])
def test_gloo_copies_the_large_side_of_gathers_and_scatters(builder, op, copies):
    b = builder()
    x = b.tensor(MB, kind=Kind.INPUT)
    b.call(op, "tp", (x,), 4 * MB, Phase.FORWARD)
    assert occupancy(b.program(), "gloo").parts["other"] == 4 * MB * (1 + copies)
    assert occupancy(b.program(), "nccl").parts["other"] == 4 * MB


def test_a_product_of_half_types_keeps_a_kernel_for_every_shape(chain):
    program = chain(layers=2, tokens=512, width=128)
    half = replace(program, tensors=tuple(replace(t, dtype="bfloat16") for t in program.tensors))
    assert (half_products(program), half_products(half)) == (0, 2)  # (tokens, width) times a weight, and times its like
    plain, kept = occupancy(half, "gloo"), occupancy(half, "gloo", kernel=1000)
    assert kept.peak - plain.peak == kept.other["kernels"] == 2000
    assert sum(kept.parts.values()) == kept.peak


def test_operands_that_lie_another_way_are_another_kernel(builder):
    b = builder()
    x, w = (b.tensor(64, 64, dtype="bfloat16") for _ in range(2))

    def product(*ins):
        i = b.op("mm", Phase.FORWARD, ins, 64, 64)
        b.tensors[i] = replace(b.tensors[i], dtype="bfloat16")
        return i

    def turned(i):
        return b.op("t", Phase.FORWARD, (i,), 64, 64, root=i, view=True)

    product(x, w)
    assert half_products(b.program()) == 1
    product(x, w)
    assert half_products(b.program()) == 1
    product(x, back := turned(w))
    assert half_products(b.program()) == 2
    product(x, turned(back))
    assert half_products(b.program()) == 2


def test_only_a_cpu_keeps_kernels():
    assert named("cpu").kernel > 0
    assert named("8x8-h100").kernel == 0
