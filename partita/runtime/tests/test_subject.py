"""Subjects of catalogue models and of a user's factory."""

import sys
import textwrap

import pytest
import torch
from torch import nn

from partita.errors import Refused
from partita.runtime.capture import capture
from partita.runtime.programs import program_of
from partita.runtime.subject import Subject
from partita.runtime.task import subject_of
from partita.workload import GPT, MLP, Llama, ResNet, Workload

pytestmark = pytest.mark.law

SPECS = [GPT(2, 32, 4, 64, 16, dropout=0.1), Llama(2, 32, 4, 2, 64, 16, ffn=48, tie_embeddings=True), ResNet(1, 2, 8), MLP()]


@pytest.fixture(autouse=True)
def one_thread():
    """The ops are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_catalogue_models_train(spec, dtype):
    subject = subject_of(Workload(spec.kind, spec, batch=4, dtype=dtype, learning_rate=0.003), synthetic=True)
    module = subject.make()
    assert {p.dtype for p in module.parameters()} == {getattr(torch, dtype)}
    optimizer, losses = subject.optimizer(module), []
    for _ in range(4):
        loss = subject.evaluate(module, subject.batches(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.kind)
def test_values_depend_on_the_seed_alone(spec):
    def values(seed):
        subject = subject_of(Workload(spec.kind, spec, batch=4, seed=seed), synthetic=True)
        return [*subject.make().parameters(), *subject.batches(1).values()]

    torch.manual_seed(99)
    first = values(0)
    assert all(torch.equal(a, b) for a, b in zip(first, values(0), strict=True))
    assert not torch.equal(first[0], values(1)[0])


def test_module_paths_are_those_of_the_contract():
    def paths(spec):
        return {name for name, _ in subject_of(Workload(spec.kind, spec), synthetic=True).make().named_parameters()}

    ends = ("weight", "bias")
    gpt = {"tokens.weight", "positions.weight", "head.weight"} | {f"norm.{e}" for e in ends}
    gpt |= {
        f"blocks.0.{m}.{e}" for m in ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down") for e in ends
    }
    assert paths(GPT(1)) == gpt
    names = ("norm1", "attention.q", "attention.k", "attention.v", "attention.out", "norm2", "mlp.gate", "mlp.up", "mlp.down")
    assert paths(Llama(1)) == {"tokens.weight", "norm.weight", "head.weight"} | {f"blocks.0.{m}.weight" for m in names}


def test_forward_gets_the_keys_it_accepts():
    class Some(nn.Module):
        def forward(self, x, scale=1):
            return x

    class All(nn.Module):
        def forward(self, **batch):
            return batch

    batch = {"x": 1, "y": 2, "scale": 3}
    subject = Subject(Some, lambda _: batch, lambda out, b: out, lambda m: torch.optim.SGD(m.parameters()))
    assert subject.keys(Some(), batch) == ("x", "scale")
    assert subject.call(All(), batch) == batch
    named = Subject(Some, lambda _: batch, lambda out, b: out, lambda m: torch.optim.SGD(m.parameters()), forward=("x",))
    assert named.keys(Some(), batch) == ("x",)


def test_real_text_is_read_unless_synthetic():
    w = Workload("gpt", GPT(1, 32, 4, 256, 16), batch=4)
    real = subject_of(w).batches(0)
    assert real["tokens"].shape == real["targets"].shape == (4, 16)
    assert torch.equal(real["tokens"][:, 1:], real["targets"][:, :-1])


# ---- python: factories
BESIDE = """
    import torch
    from torch import nn

    def batches(step):
        return {"x": torch.ones(4, 3) * step, "y": torch.zeros(4, dtype=torch.long)}

    def loss(out, batch):
        return nn.functional.cross_entropy(out, batch["y"])

    def small(width=5):
        return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))

    def small_task(width=5):
        return {"model": lambda: small(width), "batches": batches, "loss": loss, "forward": ["x"],
                "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.5)}

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small(4)

        def forward(self, x):
            return self.inner(x)
"""


@pytest.fixture
def beside(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(textwrap.dedent(BESIDE))
    (tmp_path / "bare_models.py").write_text("import torch\ndef bare():\n    return torch.nn.Linear(2, 2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("users_models", None)
    sys.modules.pop("bare_models", None)


def of(name, **extra):
    return subject_of(Workload(f"python:{name}", extra=extra))


def test_a_factory_is_trained_with_what_stands_beside_it(beside):
    p = capture(of("users_models:Named"), 4)
    assert len(p.gradients) == 4
    assert of("users_models:Named").batches(2)["x"][0, 0] == 2


def test_a_program_of_a_factory_is_as_large_as_its_batch_and_never_kept(beside, tmp_path):
    p = program_of(Workload("python:users_models:Named", batch=8, accumulate=2), tmp_path / "cache")
    assert {p.atoms[a] for a in p.classes["batch"]} == {4}
    assert p.microbatches == 2
    assert not (tmp_path / "cache").exists()


def test_a_factory_may_return_its_whole_task(beside):
    subject = of("users_models:small_task", width=7)
    module = subject.make()
    assert module[0].weight.shape == (7, 3)
    assert torch.equal(module[0].weight, subject.make()[0].weight)
    assert isinstance(subject.optimizer(module), torch.optim.SGD)
    assert subject.forward == ("x",)


@pytest.mark.parametrize(
    ("name", "extra", "code", "word"),
    [
        ("no_such_module:x", {}, "P108", "no_such_module"),
        ("users_models:absent", {}, "P107", "small"),
        ("users_models:small", {"depth": 2}, "P112", "depth"),
        ("bare_models:bare", {}, "P115", "batches, loss"),
    ],
)
def test_what_cannot_be_a_task_is_refused(beside, name, extra, code, word):
    with pytest.raises(Refused) as refused:
        of(name, **extra)
    assert code in str(refused.value)
    assert word in str(refused.value)
