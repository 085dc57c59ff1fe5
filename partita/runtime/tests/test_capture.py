"""Capture: published counts come out, and any module that runs can be captured."""

import collections
import copy
import dataclasses
import resource
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.errors import Refused
from partita.program.events import Compute, Kind, Partial, Phase, Split
from partita.program.split import derive, ranges, rewrite
from partita.program.text import from_json, to_json
from partita.runtime.capture import capture, narrowed
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.workload import GPT, MLP, Llama, ResNet, Workload

pytestmark = pytest.mark.law


def task(spec, batch=8, **more):
    return subject_of(Workload(spec.kind, spec, batch=batch, **more), synthetic=True)


def caught(spec, batch=8, **more):
    return capture(task(spec, batch, **more), batch)


def user(make, batch, loss, opt=torch.optim.AdamW, **more):
    return Subject(make, lambda step: batch, loss, lambda m: opt(m.parameters(), lr=0.1), **more)


def atoms(program, *names):
    return set().union(*(program.classes.get(name, ()) for name in names))


def counts(program, *names, size=2, **how):
    d = derive(program, "x", size, atoms(program, *names), **how)
    return collections.Counter((str(m.phase), m.op, m.nbytes) for m in d.moves)


LAYERS, B, T, D, V = 2, 8, 16, 32, 64
X = 4 * B * T * D
TOKENS = [GPT(LAYERS, D, 4, V, T), Llama(LAYERS, D, 4, 2, V, T, ffn=48)]


# ---- published counts
@pytest.mark.parametrize("spec", TOKENS, ids=lambda s: s.kind)
def test_tensor_split_says_two_all_reduces_a_layer_each_way(spec):
    wanted = {(phase, "all_reduce", X): 2 * LAYERS for phase in ("forward", "backward")}
    assert counts(caught(spec), "heads", "ffn") == wanted


@pytest.mark.parametrize("spec", TOKENS, ids=lambda s: s.kind)
def test_vocabulary_split_says_embedding_head_and_three_for_the_loss(spec):
    assert counts(caught(spec), "heads", "ffn", "vocab") == {
        ("forward", "all_reduce", X): 2 * LAYERS + 1,
        ("backward", "all_reduce", X): 2 * LAYERS + 1,
        ("forward", "all_reduce", 4 * B * T): 2,  # largest logit and sum of exponentials per target
        ("forward", "all_reduce", 4): 1,  # the loss
    }


def test_statistics_of_half_types_travel_as_float32():
    p = caught(GPT(LAYERS, D, 4, V, T), dtype="bfloat16")
    moves = derive(p, "tp", 2, atoms(p, "vocab")).moves
    assert [(m.nbytes, m.dtype) for m in moves if m.inner] == [(4 * B * T, "float32")] * 2
    assert {m.dtype for m in moves if m.nbytes == X // 2} == {"bfloat16"}


def test_a_log_softmax_the_loss_does_not_pick_from_says_its_backward():
    def loss(out, batch):
        return out.log_softmax(-1).square().mean()

    p = capture(
        user(lambda: nn.Sequential(nn.Linear(6, 8)), {"input": torch.ones(4, 6)}, loss, hints={"0.weight": "vocab _"}), 4
    )
    assert counts(p, "vocab")["backward", "all_reduce", 16] == 1


@pytest.mark.parametrize("spec", [*TOKENS, MLP(), GPT(2, D, 4, V, T, tie_embeddings=True)], ids=str)
def test_batch_split_leaves_one_partial_gradient_per_parameter(spec):
    p = caught(spec)
    d = derive(p, "dp", 2, p.classes["batch"], gradients=False, scalars=False)
    assert not d.moves
    assert len(p.gradients) == len(p.parameters())
    assert all(d.layouts[g] == Partial() for g in p.gradients.values())
    sizes = collections.Counter(("sync", "all_reduce", w.nbytes) for w in p.parameters())
    assert {k: n for k, n in counts(p, "batch").items() if k[0] == "sync"} == sizes


def test_batch_norm_says_two_numbers_a_channel_each_way():
    p = caught(ResNet(1, 2, 8))
    norms = [
        t.shape[0]
        for t in p.parameters()
        if ("norm" in t.name and t.name.endswith("weight")) or t.name.endswith("shortcut.1.weight")
    ]
    wanted = collections.Counter((phase, "all_reduce", 4 * 2 * c) for c in norms for phase in ("forward", "backward"))
    assert counts(p, "batch", gradients=False, scalars=False) == wanted


def test_flop_equals_the_hand_count():
    layers, d, v, t, b = 2, 64, 128, 32, 4
    p = caught(GPT(layers, d, 4, v, t), b)
    flop = collections.Counter()
    for e in p.events():
        flop[e.phase] += e.flop
    product, attention = layers * 24 * b * t * d * d + 2 * b * t * d * v, layers * 4 * b * t * t * d
    assert flop[Phase.FORWARD] == product + attention
    assert flop[Phase.BACKWARD] == 2 * product + 5 * attention // 2


@pytest.mark.parametrize("spec", [*TOKENS, ResNet(1, 2, 8), MLP()], ids=lambda s: s.kind)
def test_nothing_is_opaque_in_the_catalogue(spec):
    p = caught(spec)
    assert p.opaque_share() == 0
    assert all(e.signature is not None for e in p.events() if e.flop)


def test_equal_sizes_do_not_make_equal_names():
    def classes(b, t, d, h, v):
        p, seen = caught(GPT(2, d, h, v, t), b), {}
        return [tuple(seen.setdefault(a, len(seen)) for a in dim) for w in p.parameters() for dim in w.dims]

    assert classes(4, 24, 48, 6, 160) == classes(16, 16, 16, 4, 16) == classes(4, 4, 16, 4, 16) == classes(64, 64, 64, 8, 64)


def test_every_op_has_a_module_and_backward_its_own():
    p = caught(GPT(2, D, 4, V, T))
    paths = {e.module for e in p.events() if e.flop and e.phase == Phase.BACKWARD}
    assert paths == {"head"} | {
        f"blocks.{n}.{m}" for n in (0, 1) for m in ("attention", "attention.qkv", "attention.out", "mlp.up", "mlp.down")
    }


# ---- what a rank holds
def test_fused_qkv_is_cut_by_heads_within_each_of_the_three():
    p = caught(GPT(2, D, 4, V, T))
    p = rewrite(p, derive(p, "tp", 2, atoms(p, "heads")))
    w = next(t.id for t in p.parameters() if t.name == "blocks.0.attention.qkv.weight")
    assert ranges(p, w, "tp", 1) == (0, ((16, 16), (48, 16), (80, 16)))


def test_unequal_fused_qkv_is_cut_per_summand():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 16 + 8 + 8, bias=False), nn.Linear(16, 16, bias=False)

        def forward(self, x):
            q, k, v = self.qkv(x).split([16, 8, 8], -1)
            q, k, v = (z.unflatten(-1, (-1, 4)).transpose(1, 2) for z in (q, k, v))
            return self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))

    p = capture(user(Grouped, {"x": torch.randn(3, 5, 16)}, lambda out, b: out.square().mean()), 3)
    assert p.classes["kv"] == p.classes["heads"]
    p = rewrite(p, derive(p, "tp", 2, atoms(p, "heads")))
    w = next(t.id for t in p.parameters() if t.name == "qkv.weight")
    assert ranges(p, w, "tp", 1) == (0, ((8, 8), (20, 4), (28, 4)))
    assert len(p.collectives()) == 1, "the input needs no gradient"


# ---- the optimizer
@pytest.mark.parametrize(("name", "states"), [("adamw", {"step", "exp_avg", "exp_avg_sq"}), ("sgd", set())])
def test_the_optimizer_is_captured_with_its_state(name, states):
    p = caught(MLP(), optimizer=name)
    optimizer = [t for t in p.tensors if t.kind == Kind.OPTIMIZER]
    assert {t.name.rpartition(".")[2] for t in optimizer} == states
    assert [e.phase == Phase.OPTIMIZER for s in p.segments for e in s.events[:1]] == [False, True]
    d = derive(p, "tp", 2, atoms(p, "ffn"))
    cut = {t.name for t in p.parameters() if isinstance(d.layouts.get(t.id), Split)}
    assert {t.name for t in optimizer if isinstance(d.layouts.get(t.id), Split)} == {
        f"{w}.{s}" for w in cut for s in states - {"step"}
    }
    assert not [m for m in d.moves if m.phase == Phase.OPTIMIZER]


def test_an_optimizer_of_lists_splits_like_its_parameters():
    subject = dataclasses.replace(task(MLP()), optimizer=lambda m: torch.optim.AdamW(m.parameters(), foreach=True))
    p = capture(subject, 8)
    d = derive(p, "tp", 2, atoms(p, "ffn"))
    assert not [m for m in d.moves if m.phase == Phase.OPTIMIZER]


# ---- any module that runs
class Everything(nn.Module):
    """Tied weights, a frozen one, an unused one, buffers written in forward, keywords, odd outputs."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight
        self.frozen, self.never = nn.Linear(6, 6).requires_grad_(False), nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(6), persistent=False)

    def forward(self, *, ids, mode="plain", extra=None):
        self.seen += ids.shape[0]
        self.scale.mul_(0.5).add_(0.5)
        h = self.norm((self.frozen(self.table(ids)) * self.scale).transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(h), "rest": (h.detach(), [None, mode])}


def everything(dtype=torch.float32):
    batch = {"ids": torch.arange(20).reshape(4, 5) % 12, "mode": "x", "extra": None, "weights": {"w": torch.ones(4)}}

    def loss(out, b):
        return (
            F.cross_entropy(out["logits"].flatten(0, 1), b["ids"].flatten(), reduction="none").view(4, 5)
            * b["weights"]["w"][:, None]
        ).mean()

    return user(lambda: Everything().to(dtype), batch, loss, forward=("ids", "mode", "extra"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_tied_frozen_unused_buffers_keywords_and_odd_outputs(dtype):
    p = capture(everything(dtype), 4)
    names = {t.name for t in p.parameters()}
    assert names == {"table.weight", "frozen.weight", "frozen.bias", "never", "norm.weight", "norm.bias"}
    assert {p.tensors[w].name for w in p.gradients} == {"table.weight", "norm.weight", "norm.bias"}
    assert {p.tensors[g].dtype for g in p.gradients.values()} == {str(dtype).removeprefix("torch.")}
    assert {t.name for t in p.tensors if t.kind == Kind.INPUT} == {"ids", "weights.w"}
    assert not p.dynamic
    assert from_json(to_json(p)) == p


def test_a_module_given_as_it_is_stays_as_it_was():
    module = Everything()
    state, random = copy.deepcopy(module.state_dict()), torch.random.get_rng_state()
    capture(dataclasses.replace(everything(), make=lambda: module), 4)
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in module.parameters())
    assert torch.equal(random, torch.random.get_rng_state())


def test_an_initialiser_that_reads_values_is_built_really():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            if float(self.a.weight.abs().max()) > 10:
                raise AssertionError

        def forward(self, x):
            return self.a(x)

    p = capture(user(Reads, {"x": torch.ones(4, 4)}, lambda out, b: out.sum()), 4)
    assert not p.dynamic


def test_a_choice_by_inputs_is_followed_and_said():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else self.b(x)

    p = capture(user(Chooses, {"x": -torch.ones(4, 4)}, lambda out, b: out.sum()), 4)
    assert p.dynamic
    assert {p.tensors[w].name for w in p.gradients} == {"a.weight", "a.bias", "b.weight", "b.bias"}  # any may be reached
    assert "control flow depends on data" in p.notes[-1]


class Rows(nn.Module):
    """Each sample chooses its own branch."""

    def __init__(self, join=torch.stack):
        super().__init__()
        self.a, self.pos, self.neg, self.join = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), join

    def forward(self, x):
        y = self.a(x)
        return self.join([torch.tanh((self.pos if float(r.sum()) > 0 else self.neg)(q)) for r, q in zip(x, y, strict=True)])


@pytest.mark.parametrize("join", [torch.stack, lambda rows: torch.cat([r[None] for r in rows])], ids=["stack", "cat"])
def test_a_loop_over_samples_is_split_by_sample(join):
    x = torch.linspace(0.1, 1, 32).view(8, 4) * torch.tensor([1.0, -1.0]).repeat_interleave(4)[:, None]
    p = capture(user(lambda: Rows(join), {"x": x}, lambda out, b: out.square().mean()), 8)
    assert p.dynamic
    d = derive(p, "dp", 2, p.classes["batch"], gradients=False, scalars=False)
    assert not d.moves
    assert [d.layouts[g] for g in p.gradients.values()] == [Partial()] * 6


def test_a_module_that_mixes_samples_says_so():
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.a(x) - self.a(x).mean(0, keepdim=True))

    p = capture(user(Mixes, {"x": torch.randn(8, 4)}, lambda out, b: out.square().mean()), 8)
    assert derive(p, "dp", 2, p.classes["batch"], gradients=False, scalars=False).moves


def test_a_choice_by_activations_is_run_really_and_said():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            return self.b(h[h.sum(-1) > -1e9]) if float(h.abs().sum()) > 0 else h

    p = capture(user(Chooses, {"x": torch.ones(4, 4)}, lambda out, b: out.sum()), 4)
    assert len(p.gradients) == 4
    assert p.dynamic


def test_a_module_that_fails_is_refused_by_name():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(Refused) as refused:
        capture(user(Fails, {"x": torch.ones(4, 4)}, lambda out, b: out.sum()), 4)
    assert "P115" in str(refused.value)
    assert "'inner.1'" in str(refused.value)


def test_one_sample_is_said_although_it_has_no_name():
    p = caught(GPT(2, D, 4, V, T), 1)
    assert {p.atoms[a] for a in p.classes["batch"]} == {1}
    whole = caught(GPT(2, D, 4, V, T), 2)
    assert p.flop() * 2 == whole.flop()
    assert [e.op for e in p.events()] == [e.op for e in whole.events()]


def test_a_pair_of_sum_and_weight_is_a_loss():
    subject = dataclasses.replace(
        task(MLP()), loss=lambda out, b: (F.cross_entropy(out, b["y"], reduction="sum"), torch.tensor(8.0))
    )
    p = capture(subject, 8)
    assert len(p.gradients) == len(p.parameters())
    assert derive(p, "dp", 2, p.classes["batch"], gradients=False, scalars=False).layouts[p.loss] == Partial()


def test_recomputation_is_a_phase_of_its_own():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    flop = collections.Counter()
    p = capture(user(Again, {"x": torch.ones(4, 4)}, lambda out, b: out.square().sum()), 4)
    for e in p.events():
        flop[e.phase] += e.flop
    assert flop[Phase.RECOMPUTE] == flop[Phase.FORWARD] // 2, "the last linear of a block is not needed again"


@pytest.mark.parametrize(("held", "wanted"), [(4, 4), (3, 4), (6, 4)])
def test_a_batch_is_cut_or_repeated_to_the_microbatch(held, wanted):
    batch = {
        "x": torch.arange(held * 2).view(held, 2),
        "scalar": torch.tensor(1.0),
        "name": "n",
        "nested": [torch.arange(held)],
    }
    out = narrowed(batch, wanted)
    assert out["x"].shape == (wanted, 2)
    assert out["nested"][0].tolist() == [i % held for i in range(wanted)]
    assert out["scalar"] is batch["scalar"]
    assert out["name"] == "n"


# ---- storages
def test_storages_live_until_their_last_reader():
    """The peak read off the Program equals what a tracker sees in a real step (but for the scalar the caller holds)."""
    workload = Workload("gpt", GPT(2, 32, 4, 64, 16, dropout=0.1), batch=4)
    said = peak(capture(subject_of(workload, synthetic=True), 4))
    real = tracked(subject_of(workload, synthetic=True))
    assert abs(said - real) <= 8


def peak(program):
    tensors, events = program.tensors, list(program.events())
    static = {Kind.PARAMETER, Kind.OPTIMIZER, Kind.BUFFER, Kind.INPUT, Kind.CONSTANT}
    live = sum(t.nbytes for t in tensors if t.root == t.id and t.kind in static)
    last = {tensors[i].root: n for n, e in enumerate(events) for i in (*e.ins, *e.outs)}
    kept, born, highest = {tensors[g].root for g in program.gradients.values()}, set(), 0
    for n, e in enumerate(events):
        assert isinstance(e, Compute)
        for root in {tensors[i].root for i in e.outs}:
            if root not in born and tensors[root].kind not in static:
                born.add(root)
                live += tensors[root].nbytes
        highest = max(highest, live)
        for root in {tensors[i].root for i in (*e.ins, *e.outs)} & born - kept:
            live -= tensors[root].nbytes if last[root] == n else 0
    return highest


class Tracker(torch.utils._python_dispatch.TorchDispatchMode):
    """Live bytes of every storage an op made or met."""

    def __init__(self):
        super().__init__()
        self.size: dict[int, int] = {}
        self.refs: dict[int, Any] = {}
        self.live = self.peak = 0

    def add(self, t):
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.refs:
            self.size[key] = storage.nbytes()
            self.live += self.size[key]
            self.refs[key] = torch.utils.weak.weakref.ref(storage, lambda _, key=key: self.drop(key))

    def drop(self, key):
        self.refs.pop(key, None)
        self.live -= self.size.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves((args, kwargs, out)):
            if isinstance(t, torch.Tensor):
                self.add(t)
        self.peak = max(self.peak, self.live)
        return out


def tracked(subject):
    module = subject.make()
    optimizer, tracker = subject.optimizer(module), Tracker()
    for p in module.parameters():
        tracker.add(p)
    with tracker:
        for step in range(2):  # the optimizer's state is there in the second
            batch = subject.batches(step)
            for t in batch.values():
                tracker.add(t)
            tracker.peak = 0
            subject.evaluate(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            del batch
    return tracker.peak


@pytest.mark.slow
def test_a_model_of_seven_billion_is_captured_flat_in_seconds():
    start = time.perf_counter()
    p = caught(Llama(32, 4096, 32, 32, 32000, 2048, 11008), 2)
    seconds, resident = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert 6.7e9 < sum(t.nbytes for t in p.parameters()) / 4 < 6.8e9
    assert seconds < 15, "5 s on a quiet machine"
    assert resident < 1.5e9
