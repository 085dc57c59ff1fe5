"""Small hand-written Programs."""

from dataclasses import replace

import pytest

from partita.program.events import Collective, Compute, Kind, Phase, Repeat, Tensor
from partita.program.program import Program


class Builder:
    """Writes a Program op by op; dims carry no atoms, so nothing in it can be split."""

    def __init__(self):
        self.tensors, self.events, self.gradients = [], [], {}

    def tensor(self, *shape, kind=Kind.ACTIVATION, name="", root=None, dtype="float32"):
        i = len(self.tensors)
        self.tensors.append(Tensor(i, shape, dtype, tuple(() for _ in shape), kind, name, i if root is None else root))
        return i

    def op(self, name, phase, ins, *shape, flop=0, module="m", root=None, view=False):
        out = self.tensor(*shape, root=root)
        self.events.append(Compute(name, module, phase, tuple(ins), (out,), flop, None, view))
        return out

    def call(self, op, axis, tensors, nbytes, phase=Phase.BACKWARD, **more):
        self.events.append(Collective(op, axis, tuple(tensors), nbytes, "float32", phase, "m", **more))

    def program(self, **more):
        step = tuple(e for e in self.events if e.phase != Phase.OPTIMIZER)
        update = tuple(e for e in self.events if e.phase == Phase.OPTIMIZER)
        segments = tuple(Repeat(1, events) for events in (step, update) if events)
        return Program({}, tuple(self.tensors), segments, self.gradients, **more)


def linear_chain(layers=2, tokens=64, width=128, bucket=None):
    """x -> (mm -> gelu) x layers, backward, sgd; with `bucket`, one overlapped all_reduce of each weight's gradient over dp."""
    b = Builder()
    weights = [b.tensor(width, width, kind=Kind.PARAMETER, name=f"w{i}") for i in range(layers)]
    x, saved, flop = b.tensor(tokens, width, kind=Kind.INPUT), [], 2 * tokens * width * width
    for w in weights:
        h = b.op("mm", Phase.FORWARD, (x, w), tokens, width, flop=flop, module=f"l{w}")
        saved.append((x, h))
        x = b.op("gelu", Phase.FORWARD, (h,), tokens, width, module=f"l{w}")
    g = b.op("ones_like", Phase.BACKWARD, (x,), tokens, width)
    for w, (x, h) in reversed(list(zip(weights, saved, strict=True))):
        g = b.op("gelu_backward", Phase.BACKWARD, (g, h), tokens, width, module=f"l{w}")
        b.gradients[w] = b.op("mm", Phase.BACKWARD, (x, g), width, width, flop=flop, module=f"l{w}")
        if bucket:
            b.call("all_reduce", "dp", (b.gradients[w],), 4 * width * width, overlapped=True, once=True)
        g = b.op("mm", Phase.BACKWARD, (g, w), tokens, width, flop=flop, module=f"l{w}")
    for w in weights:
        b.op("add_", Phase.OPTIMIZER, (w, b.gradients[w]), width, width, root=w)
    return b.program()


@pytest.fixture
def builder():
    return Builder


@pytest.fixture
def chain():
    return linear_chain


@pytest.fixture
def with_axes():
    return lambda program, **axes: replace(program, axes=axes)
