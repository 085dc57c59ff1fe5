"""What a rank's forward pass keeps alive: what backward reads, as on one device, and nothing else."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita import workload
from partita.runtime.capture import capture
from partita.runtime.installing import install
from partita.runtime.models import build, hints_of
from partita.runtime.random import Stream, rows
from partita.runtime.subject import Subject
from partita.strategies.tensor.tensor_parallel import TensorParallel

SAMPLES, TOKENS, HIDDEN, FFN, LAYERS = 4, 10, 24, 56, 3


class Lone:
    """The network of rank 1 of two whose neighbour never has anything to add."""

    coordinate: ClassVar[dict[str, int]] = {"tp": 1}

    def all_reduce(self, *args: Any, **kwargs: Any) -> None:
        pass


class Made(TorchDispatchMode):
    """Every storage that ops made and that still lives: bytes and shape, by address."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, read = func(*args, **(kwargs or {})), {_at(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        self.storages += [
            (StorageWeakRef(t.untyped_storage()), _at(t), tuple(t.shape), t.untyped_storage().nbytes())
            for t in tree_leaves(out)
            if isinstance(t, torch.Tensor) and _at(t) not in read
        ]
        return out

    def alive(self):
        return {at: (shape, size) for ref, at, shape, size in self.storages if not ref.expired()}


def _at(t):
    return t.untyped_storage().data_ptr()


def kept(subject, module, *modes):
    """(sizes of what backward will read, sizes of what else is alive) at the loss, while all modes are still on."""
    saved, made = {}, Made()

    def pack(t):
        saved[_at(t)] = t.untyped_storage().nbytes()
        return t

    held = {_at(p) for p in module.parameters()} | {_at(t) for t in subject.batches(0).values()}
    with saved_tensors_hooks(pack, lambda t: t), made:
        for mode in modes:
            mode.__enter__()
        loss = subject.evaluate(module, subject.batches(0))
        alive = made.alive()
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
    rest = sorted(size for at, (_, size) in alive.items() if at not in saved and size > loss.nbytes)
    return sorted(size for at, size in saved.items() if at not in held), rest


class Feed(nn.Module):
    """A column-parallel layer, a row-parallel one, dropout, and the stream it is added to."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN), nn.Dropout(0.25)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x))))


def feeds():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(*(Feed() for _ in range(LAYERS)))

    batch = {"input": torch.randn(SAMPLES, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))}
    return Subject(
        make, lambda _: batch, lambda y, _: y.square().mean(), lambda m: torch.optim.SGD(m.parameters()), ("input",),
        {"*.up.weight": "ffn hidden"},
    )  # fmt: skip


def gpt():
    spec = workload.GPT(layers=LAYERS, hidden=HIDDEN, heads=2, vocab=16, sequence=TOKENS, tie_embeddings=True, dropout=0.25)
    g = torch.Generator().manual_seed(1)
    batch = {k: torch.randint(16, (SAMPLES, TOKENS), generator=g) for k in ("tokens", "targets")}

    def make():
        torch.manual_seed(0)
        return build(spec)

    def loss(y, batch):
        return nn.functional.cross_entropy(y.flatten(0, 1), batch["targets"].flatten())

    return Subject(make, lambda _: batch, loss, lambda m: torch.optim.SGD(m.parameters()), ("tokens",), hints_of(spec))


def both(subject):
    """`kept` of one device and of one of two ranks."""
    program = capture(subject, SAMPLES)
    derivation, _ = TensorParallel()._derive(program, 2)
    stream, whole, module = Stream(1, rows(program)), subject.make(), subject.make()
    installed = install(module, subject, SAMPLES, program, [derivation], Lone(), stream)
    found = []
    for one, modes in ((whole, ()), (module, (installed.replay,))):
        with stream.step(0, 0, SAMPLES):
            found.append(kept(subject, one, *modes))
    return found


def test_a_row_parallel_layer_and_dropout_keep_the_mask_and_no_sum():
    (one, over), (rank, more) = both(feeds())
    assert over == more == []
    stream, part = 4 * SAMPLES * TOKENS * HIDDEN, 4 * SAMPLES * TOKENS * FFN
    assert one.count(stream) == rank.count(stream) == 2 * LAYERS  # masks, and what each layer or the loss reads, but the batch
    assert one.count(part) == rank.count(part // 2) == LAYERS
    assert sum(one) - sum(rank) == LAYERS * part // 2


def test_a_rank_of_a_gpt_with_dropout_keeps_nothing_that_backward_does_not_read():
    (one, over), (rank, more) = both(gpt())
    assert over == more == []
    stream = 4 * SAMPLES * TOKENS * HIDDEN
    assert rank.count(stream) + rank.count(stream // 2) == one.count(stream)
    assert rank.count(stream // 2) == 3 * LAYERS  # of each block what attention gives, its mask, and what is left of it


@pytest.mark.parametrize("make", [feeds, gpt])
def test_every_change_is_let_go_by_the_end(make):
    subject = make()
    program = capture(subject, SAMPLES)
    derivation, _ = TensorParallel()._derive(program, 2)
    replay = install(subject.make(), subject, SAMPLES, program, [derivation], Lone(), Stream(1, rows(program))).replay
    uses = [(e.kind, e.value) for step in replay.steps for e in step.edges]
    last = [(e.kind, e.value) for step in replay.steps for e in step.edges if e.last]
    assert uses
    assert sorted(last) == sorted(set(uses))  # each once
