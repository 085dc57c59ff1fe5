"""Laws of the replay, on real ranks: every loss, gradient and parameter is one device's, and what is heard is what was said."""

import importlib.util
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita import workload
from partita.mesh import Mesh
from partita.program.split import rewrite
from partita.runtime.capture import capture
from partita.runtime.launch import run_ranks
from partita.runtime.models import build, hints_of
from partita.runtime.random import Stream, draws, rows
from partita.runtime.record import Recorder
from partita.runtime.replay import install
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
    def make():
        tf = importlib.import_module("transformers")
        torch.manual_seed(0)
        common = {
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "pad_token_id": 0, "tie_word_embeddings": False, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
        }  # fmt: skip
        config = getattr(tf, family + "Config")(**{**common, **settings})
        return shaken(getattr(tf, family + head)(config).train())

    def batches(step):
        batch = tokens(step)
        return {"input_ids": batch["tokens"], "targets": batch["targets"]}

    return Subject(make, batches, lambda o, b: token_loss(o.logits, b), adam, ("input_ids",))


GPT = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 16}
DROPS = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
SUBJECTS = {
    "gpt": lambda: catalogue(workload.GPT(**GPT)),
    "gpt-tied-dropout": lambda: catalogue(workload.GPT(**GPT, tie_embeddings=True, dropout=0.1)),
    "llama": lambda: catalogue(workload.Llama(**{**GPT, "heads": 8}, kv_heads=4)),
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
            dim, spans = placements[name]
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
        installed = install(module, subject, SAMPLES, program, derivation, net, stream)
    replay, placements = installed.replay, installed.placements
    samples = SAMPLES // net.mesh.size("dp")
    first = samples * net.coordinate.get("dp", 0)

    def after(module):
        for name in installed.late:
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


@pytest.mark.gloo
@pytest.mark.parametrize("name", SUBJECTS)
def test_two_ranks_are_one_device(name):
    got = run(name, {"tp": 2})
    assert bool(got["cut"]) == (name != "resnet")
    if name == "resnet":
        assert any("nothing is split" in note for note in got["notes"])


@pytest.mark.gloo
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_are_one_device(name):
    run(name, {"tp": 4})


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}], ids="-".join)
@pytest.mark.parametrize("name", TWO_AXES)
def test_two_axes_are_one_device(name, mesh):
    run(TWO_AXES[name], mesh)
