"""Laws of the replay, on real ranks: every loss, gradient and parameter is one device's, and what is heard is what was said."""

import importlib
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from partita import workload
from partita.errors import Refused, RunFailed
from partita.mesh import Mesh
from partita.program.split import rewrite
from partita.runtime.capture import capture
from partita.runtime.installing import install
from partita.runtime.models import build, hints_of
from partita.runtime.random import Stream, draws, rows
from partita.runtime.ranks import run_ranks
from partita.runtime.record import Recorder
from partita.runtime.subject import Subject
from partita.runtime.wide import Wide
from partita.strategies.tensor.tensor_parallel import TensorParallel

SAMPLES, STEPS = 4, 3


# ---------------------------------------------------------------- subjects
class Fused(nn.Module):
    """One fused qkv, hard-coded head counts and sizes everywhere."""

    def __init__(self, d=32, heads=4):
        super().__init__()
        self.d, self.heads, self.ln1, self.ln2 = d, heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj, self.fc, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        s = (q @ k.transpose(-2, -1)) / (d // self.heads) ** 0.5
        assert s.size() == (b, 4, t, t)
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        x = x + self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, self.d))
        return x + self.out(F.gelu(self.fc(self.ln2(x)).view(b, t, 128)))


class Hard(nn.Module):
    """Two fused blocks between a token embedding and its tied head."""

    def __init__(self):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(64, 32), nn.Sequential(Fused(), Fused())
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.tokens(tokens)))


def shaken(module, scale=0.05):
    """No zero bias, no unit scale: every gradient is felt."""
    with torch.no_grad():
        for p in module.parameters():
            p += scale * torch.randn_like(p)
    return module


def tokens(step, vocab=64, length=16, samples=SAMPLES):
    g = torch.Generator().manual_seed(step)
    return {k: torch.randint(vocab, (samples, length), generator=g) for k in ("tokens", "targets")}


def token_loss(output, batch):
    targets = batch["targets"].flatten().clone()
    targets[0] = -100
    return F.cross_entropy(output.flatten(0, 1), targets)


def plain_loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def two_calls(output, batch):
    return F.nll_loss(F.log_softmax(output.flatten(0, 1), -1), batch["targets"].flatten())


def adam(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)


def catalogue(spec, loss=token_loss):
    def make():
        torch.manual_seed(0)
        return shaken(build(spec))

    if isinstance(spec, workload.ResNet):

        def images(step):
            g = torch.Generator().manual_seed(step)
            return {"x": torch.randn(SAMPLES, 3, 16, 16, generator=g), "y": torch.randint(10, (SAMPLES,), generator=g)}

        return Subject(make, images, lambda o, b: F.cross_entropy(o, b["y"]), adam, None, hints_of(spec))
    hints = {k: v for k, v in hints_of(spec).items() if k != "head.weight" or not spec.tie_embeddings}
    return Subject(make, partial(tokens, vocab=spec.vocab), loss, adam, None, hints)


def hard(loss=token_loss):
    def make():
        torch.manual_seed(0)
        return shaken(Hard())

    return Subject(make, tokens, loss, adam)


def hugging_face(family, head, **settings):
    tf = importlib.import_module("transformers")
    config_of, model_of = getattr(tf, family + "Config"), getattr(tf, family + head)
    common = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "use_cache": False,
    }  # fmt: skip

    def make():
        torch.manual_seed(0)
        return shaken(model_of(config_of(**{**common, **settings})).train())

    def batches(step):
        batch = tokens(step)
        return {"input_ids": batch["tokens"], "targets": batch["targets"]}

    return Subject(make, batches, lambda o, b: token_loss(o.logits, b), adam, ("input_ids",))


# ---- parts that go between an embedding and a head
class Feed(nn.Module):
    """norm, up, gelu, down; `act` is what stands between."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def act(self, x):
        return F.gelu(x)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Scaled(Feed):
    """Its branch is multiplied by one learned number."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + super().forward(x) * self.scale


class Gated(Feed):
    """Part of it runs without gradients."""

    def forward(self, x):
        with torch.no_grad():
            gate = torch.sigmoid(self.up(self.norm(x)))
        return x + self.down(self.act(self.up(self.norm(x))) * gate)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class Custom(Feed):
    """A custom function, the same on every part."""

    def act(self, x):
        return Square.apply(x)


class Custom2(Feed):
    """A custom function of a summand."""

    def forward(self, x):
        return x + Square.apply(self.down(self.up(x)))


class Centred(Feed):
    """A mean along the split dim."""

    def act(self, x):
        return x - x.mean(-1, keepdim=True)


class Frozen(Feed):
    """Nothing in it is trained."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(requires_grad=False)


class Adapted(nn.Module):
    """Attention whose frozen projection carries a trained low-rank one; keys and values are the queries."""

    def __init__(self):
        super().__init__()
        self.q, self.o = (
            nn.Linear(32, 32).requires_grad_(requires_grad=False),
            nn.Linear(32, 32).requires_grad_(requires_grad=False),
        )
        self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = (self.q(x) + self.up(self.down(x))).view(b, t, 4, 8).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(b, t, 32))


class OneKey(nn.Module):
    """Four query heads and one key head."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 32)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 4, 8).transpose(1, 2)
        k, v = (part.view(b, t, 1, 8).transpose(1, 2).expand(b, 4, t, 8) for part in self.kv(x).split(8, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, 32))


class Encoder(nn.Module):
    """torch's own, with dropout everywhere."""

    def __init__(self, *, first):
        super().__init__()
        self.first = first
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=first)

    def forward(self, x):
        return self.layer(x) if self.first else self.layer(x.transpose(0, 1)).transpose(0, 1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


class Body(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.tokens, self.parts, self.norm, self.head = (
            nn.Embedding(64, 32),
            nn.Sequential(*parts),
            nn.LayerNorm(32),
            nn.Linear(32, 64),
        )

    def forward(self, tokens):
        return self.head(self.norm(self.parts(self.tokens(tokens))))


def momentum(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def body(*parts, loss=token_loss):
    def make():
        torch.manual_seed(0)
        return shaken(Body(*(part() for part in parts)))

    return Subject(make, tokens, loss, momentum)


def masked(output, batch):
    losses = F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    mask = (batch["tokens"].flatten() > 10).to(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def two_losses(output, batch):
    return plain_loss(output, batch) + 0.5 * F.cross_entropy(output[:, 1:].flatten(0, 1), batch["targets"][:, :-1].flatten())


def smoothed(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten(), label_smoothing=0.1)


GPT = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 16}
DROPS = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
SUBJECTS = {
    "gpt": lambda: catalogue(workload.GPT(**GPT)),
    "gpt-tied-dropout": lambda: catalogue(workload.GPT(**GPT, tie_embeddings=True, dropout=0.1)),
    "llama": lambda: catalogue(workload.Llama(**{**GPT, "heads": 8}, kv_heads=4)),
    "llama-one-key-head": lambda: catalogue(workload.Llama(**GPT, kv_heads=1)),
    "resnet": lambda: catalogue(workload.ResNet(layers=1, stages=2, hidden=8)),
    "hard": hard,
    "hard-two-calls": lambda: hard(two_calls),
    "hf-llama": lambda: hugging_face("Llama", "ForCausalLM", num_key_value_heads=2, head_dim=8),
    "hf-llama-eager": lambda: hugging_face(
        "Llama", "ForCausalLM", num_key_value_heads=2, head_dim=8, attn_implementation="eager"
    ),
    "hf-gpt2": lambda: hugging_face("GPT2", "LMHeadModel", tie_word_embeddings=True),
    "hf-gpt2-dropout": lambda: hugging_face("GPT2", "LMHeadModel", **DROPS),
    "hf-gpt2-eager-dropout": lambda: hugging_face("GPT2", "LMHeadModel", attn_implementation="eager", **DROPS),
    "hf-bert": lambda: hugging_face("Bert", "ForMaskedLM"),
    "hf-bert-tied-dropout": lambda: hugging_face("Bert", "ForMaskedLM", tie_word_embeddings=True, **DROPS),
    "hf-bert-eager": lambda: hugging_face("Bert", "ForMaskedLM", attn_implementation="eager"),
    "hf-qwen3": lambda: hugging_face("Qwen3", "ForCausalLM", num_key_value_heads=2, head_dim=8),
}
TWO_AXES = {
    "gpt-tied-dropout": lambda: catalogue(workload.GPT(**GPT, tie_embeddings=True, dropout=0.1), plain_loss),
    "llama": lambda: catalogue(workload.Llama(**GPT, kv_heads=2), plain_loss),
}
PARTS = {  # subject, parameters that are cut
    "learned-scale": (lambda: body(Scaled), 6),
    "no-grad-inside": (lambda: body(Gated), 6),
    "custom-pointwise": (lambda: body(Custom), 6),
    "mean-along-it": (lambda: body(Centred), 6),
    "frozen-block": (lambda: body(Feed, Frozen, Feed), 12),
    "low-rank-adapter": (lambda: body(Adapted, Adapted), 9),
    "one-key-head": (lambda: body(OneKey, OneKey), 9),
    "encoder": (lambda: body(partial(Encoder, first=True)), 9),
    "encoder-sequence-first": (lambda: body(partial(Encoder, first=False)), 9),
    "recurrent": (lambda: body(Recurrent), 3),
    "masked-loss": (lambda: body(Feed, loss=masked), 6),
    "two-losses": (lambda: body(Feed, loss=two_losses), 6),
    "label-smoothing": (lambda: body(Feed, loss=smoothed), 4),
}
FOUR = ("gpt", "gpt-tied-dropout", "llama", "resnet")


# ---------------------------------------------------------------- one rank
def trained(subject, stream=None, replay=None, module=None, first=0, samples=SAMPLES, after=lambda module: None):
    """Losses and the gradients and parameters of the last step."""
    module = subject.make() if module is None else module
    optimizer, losses = subject.optimizer(module), []
    for step in range(STEPS):
        batch = {k: v[first : first + samples] for k, v in subject.batches(step).items()}
        optimizer.zero_grad()
        with ExitStack() as modes:
            modes.enter_context(Wide())
            modes.enter_context(stream.step(step, first, samples) if stream else nullcontext())
            modes.enter_context(replay or nullcontext())
            loss = subject.evaluate(module, batch)
        loss.backward()
        after(module)
        losses.append(loss.item())
        if step < STEPS - 1:
            optimizer.step()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return losses, gradients, dict(module.named_parameters())


def error(mine, whole, placements):
    """The error of CONTRACT section 2, over the parts this rank holds."""
    top, worst = max(w.abs().max() for w in whole.values()), 0.0
    assert mine.keys() == whole.keys()
    for name, w in whole.items():
        if name in placements:
            ((_, dim, spans),) = placements[name]
            w = torch.cat([w.narrow(dim, *span) for span in spans], dim)
        worst = max(worst, ((mine[name] - w).abs().max() / w.abs().max().clamp_min(0.01 * top)).item())
    return worst


def rank_work(net, make_subject, strategy=None):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    subject, strategy = make_subject(), strategy or TensorParallel()
    size = net.mesh.size("tp")
    with Wide():
        program = capture(subject, SAMPLES)
        derivation, notes = strategy._derive(program, size)
        split = rewrite(program, derivation)
    stream = Stream(1, rows(program)) if draws(program) else None
    whole = trained(subject, stream)
    module = subject.make()
    with Wide():
        installed = install(module, subject, SAMPLES, program, [derivation], net, stream)
    replay, placements = installed.replay, installed.placements
    samples = SAMPLES // net.mesh.size("dp")
    first = samples * net.coordinate.get("dp", 0)

    def after(module):
        for name in installed.late.get("tp", ()):
            net.all_reduce(module.get_parameter(name).grad, "tp")
        with net.quiet():
            for p in module.parameters():
                if p.grad is not None:
                    net.all_reduce(p.grad, "dp")
                    p.grad /= net.mesh.size("dp")

    with Recorder(net.axes, module) as recorder:
        losses, gradients, parameters = trained(subject, stream, replay, module, first, samples, after)
    said = [
        [c.op, c.nbytes // (net.mesh.size("dp") if c.nbytes > 8 else 1), c.dtype, str(c.phase)] for c in split.collectives()
    ] * STEPS
    heard = [[h.op, h.nbytes, h.dtype, str(h.phase)] for h in recorder.heard if h.axis == "tp"]
    return {
        "said": [s[:3] for s in said], "heard": [h[:3] for h in heard], "notes": notes, "losses": [losses, whole[0]],
        "gradients": error(gradients, whole[1], placements),
        "parameters": error(parameters, whole[2], placements), "cut": sorted(placements),
    }  # fmt: skip


def run(name, mesh, **settings):
    results = run_ranks(
        Mesh.of(mesh), partial(rank_work, make_subject=SUBJECTS[name] if isinstance(name, str) else name, **settings)
    )
    for got in results:
        assert got["heard"] == got["said"]
        assert got["gradients"] < 1e-10, got
        assert got["parameters"] < 1e-10, got
    groups = {}
    for got in results:
        groups.setdefault(tuple(got["losses"][0]), got)
    mine = [sum(g["losses"][0][s] for g in groups.values()) / len(groups) for s in range(STEPS)]
    for a, b in zip(mine, results[0]["losses"][1], strict=True):
        assert abs(a - b) < 1e-10 * abs(b)
    return results[0]


SLOW = [
    n for n in SUBJECTS if n not in FOUR and n not in ("hard-two-calls", "hf-llama", "hf-gpt2-dropout", "hf-bert-tied-dropout")
]


@pytest.mark.gloo
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in SUBJECTS])
def test_two_ranks_are_one_device(name):
    got = run(SUBJECTS[name], {"tp": 2})
    assert bool(got["cut"]) == (name != "resnet")
    if name == "resnet":
        assert any("nothing is split" in note for note in got["notes"])


@pytest.mark.gloo
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_are_one_device(name):
    run(SUBJECTS[name], {"tp": 4})


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}], ids="-".join)
@pytest.mark.parametrize("name", TWO_AXES)
def test_two_axes_are_one_device(name, mesh):
    run(TWO_AXES[name], mesh)


@pytest.mark.gloo
@pytest.mark.parametrize("name", PARTS)
def test_odd_parts_are_one_device(name):
    make_subject, cuts = PARTS[name]
    assert len(run(make_subject, {"tp": 2})["cut"]) == cuts


# ---------------------------------------------------------------- other batches, evaluation, accumulation
def other_work(net, make_subject):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    subject = make_subject()
    program = capture(subject, SAMPLES)
    derivation, _ = TensorParallel()._derive(program, 2)
    stream = Stream(1, rows(program))
    whole, mine = subject.make(), subject.make()
    installed = install(mine, subject, SAMPLES, program, [derivation], net, stream)

    def apart(batch, first=0, *, backward=False):
        values = []
        for module, replay in ((whole, nullcontext()), (mine, installed.replay)):
            samples = len(next(iter(batch.values())))
            with Wide(), stream.step(0, first, samples) if module.training else nullcontext(), replay:
                values.append(subject.evaluate(module, batch))
            if backward:
                values[-1].backward()
        return abs((values[0] - values[1]) / values[0]).item()

    def part(step, first, samples, length):
        return {k: v[first : first + samples, :length] for k, v in subject.batches(step).items()}

    found = {f"{n}x{length}": apart(part(3, 0, n, length)) for n, length in ((2, 16), (3, 7), (1, 5))}
    for m in range(2):
        found[f"microbatch {m}"] = apart(part(0, 2 * m, 2, 16), 2 * m, backward=True)
    gradients = [{name: p.grad for name, p in module.named_parameters()} for module in (mine, whole)]
    found["accumulated"] = error(*gradients, installed.placements)
    whole.eval(), mine.eval()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            found[mode.__name__] = apart(part(5, 0, 3, 16))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["gpt-tied-dropout", "hf-gpt2-dropout"])
def test_another_batch_evaluation_and_accumulation_need_no_other_plan(name):
    subject = SUBJECTS[name]()
    for found in run_ranks(Mesh.of({"tp": 2}), partial(other_work, make_subject=lambda: subject)):
        assert max(found.values()) < 1e-10, found


# ---------------------------------------------------------------- refused, each before the first step and by module
class Alone:
    """A network of one process that is told it is one of two."""

    coordinate: ClassVar[dict[str, int]] = {"tp": 1}


def refusal(subject):
    program = capture(subject, SAMPLES)
    derivation, _ = TensorParallel()._derive(program, 2)
    with pytest.raises(Refused) as caught:
        install(subject.make(), subject, SAMPLES, program, [derivation], Alone(), None)
    return str(caught.value)


class Checkpointed(Feed):
    def forward(self, x):
        return x + checkpoint(super().forward, x, use_reentrant=False)


class Literal(Feed):
    """A size that no rule scales."""

    def act(self, x):
        return torch.as_strided(x, x.shape, x.stride())


class Written(Feed):
    def act(self, x):
        y = x * 1
        y[:, 1:3] = 0
        return y


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (Checkpointed, ("'parts.0", "checkpointing")),
        (Custom2, ("'parts.0'", "inside a custom autograd function")),
        (Literal, ("'parts.0", "needs a part of a whole value")),
        (Written, ("'parts.0'", "__setitem__")),
    ],
)
def test_what_cannot_run_on_shards_is_refused_by_module(part, words):
    text = refusal(body(part))
    assert "P116" in text
    assert all(word in text for word in words), text


def test_dropout_without_a_stream_is_refused():
    assert "no stream" in refusal(SUBJECTS["gpt-tied-dropout"]())


class Fickle(Feed):
    """Takes another path once a few calls have been made: after every look before step 1."""

    calls = 0

    def act(self, x):
        self.calls += 1
        return F.gelu(x) if self.calls < 12 else F.relu(x)


def fickle_work(net, make_subject):
    torch.set_num_threads(1)
    subject = make_subject()
    program = capture(subject, SAMPLES)
    derivation, _ = TensorParallel()._derive(program, 2)
    module = subject.make()
    installed = install(module, subject, SAMPLES, program, [derivation], net, None)
    said = ""
    for _ in range(12):
        try:
            with installed.replay:
                subject.evaluate(module, subject.batches(0))
        except RunFailed as error:
            said = str(error)
            break
    return said


@pytest.mark.gloo
def test_another_path_is_told_and_not_followed():
    for said in run_ranks(Mesh.of({"tp": 2}), partial(fickle_work, make_subject=lambda: body(Fickle))):
        assert "was gelu in 'parts.0' when the module was captured and is relu now" in said
