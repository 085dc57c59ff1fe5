"""A model file: to start from under any split, to take elsewhere, and refused with all that differs."""

import json
import os
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from partita.errors import Refused, RunFailed
from partita.mesh import Mesh
from partita.runtime.capture import capture
from partita.runtime.net import Net
from partita.runtime.outcome import run
from partita.runtime.site import keys_of
from partita.runtime.task import subject_of
from partita.runtime.training import Training
from partita.runtime.weights import export, fill, open_weights
from partita.runtime.whole import train_whole
from partita.strategies import OneFOneB
from partita.workload import GPT, Workload


class Tied(nn.Module):
    """Two names of one parameter, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("mask", torch.ones(2), persistent=False)


def filled(file, module=None):
    module = module or Tied()
    named = {n: (t.detach(), ()) for n, t in (*module.named_parameters(), *module.named_buffers()) if n != "mask"}
    fill(
        file,
        named,
        {n: tuple(t.shape) for n, (t, _) in named.items()},
        {k: n for k, n in keys_of(module).items() if k != n},
        Net(Mesh(), 0),
    )
    return module


STATE = {"tokens.weight": torch.randn(6, 4), "mean": torch.tensor([3.0, 2.0, 1.0])}


@pytest.mark.parametrize("names", [["tokens.weight"], ["head.weight"], ["tokens.weight", "head.weight"]], ids=str)
def test_a_tied_tensor_comes_under_any_of_its_names(names, tmp_path):
    save_file({**{n: STATE["tokens.weight"].clone() for n in names}, "mean": STATE["mean"]}, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        got = filled(path)
        assert torch.equal(got.head.weight, STATE["tokens.weight"])
        assert torch.equal(got.mean, STATE["mean"])


def test_shards_of_an_index_are_read(tmp_path):
    for n, t in STATE.items():
        save_file({n: t}, tmp_path / f"{n}.safetensors")
    table = {"weight_map": {n: f"{n}.safetensors" for n in STATE}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    assert torch.equal(filled(tmp_path).tokens.weight, STATE["tokens.weight"])
    for name, words in (("../mean.safetensors", "not in its folder"), ("gone.safetensors", "No such file")):
        table["weight_map"]["mean"] = name
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
        with pytest.raises(Refused, match=words):
            open_weights(tmp_path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("executed",)


WRONG = {
    "missing": (lambda s: s.pop("mean"), "it has no tensor 'mean'"),
    "foreign": (lambda s: s.update(more=torch.ones(1)), "tensor 'more' is not in the model"),
    "shape": (lambda s: s.update(mean=torch.ones(4)), r"another shape\n  have   'mean' \[4\], in the model \[3\]"),
    "dtype": (lambda s: s.update(mean=torch.ones(3).half()), "'mean' float16, in the model float32"),
    "ties": (lambda s: s.update({"head.weight": torch.ones(6, 4)}), "'head.weight' and 'tokens.weight'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_differs_is_named_and_nothing_is_filled(wrong, tmp_path):
    state = {n: t.clone() for n, t in STATE.items()}
    change, words = WRONG[wrong]
    change(state)
    save_file(state, tmp_path / "m.safetensors")
    module = Tied()
    before = module.tokens.weight.clone()
    with pytest.raises(Refused, match=words):
        filled(tmp_path / "m.safetensors", module)
    assert torch.equal(module.tokens.weight, before)


def test_all_kinds_of_difference_are_told_at_once(tmp_path):
    save_file({"a": torch.ones(1), "mean": torch.ones(4).half()}, tmp_path / "m.safetensors")
    with pytest.raises(Refused) as caught:
        filled(tmp_path / "m.safetensors")
    assert len(caught.value.faults) == 4


DAMAGED = {
    "pickle": lambda f: f.write_bytes(pickle.dumps(Bomb())),
    "torch.save": lambda f: torch.save({"a": Bomb()}, f),
    "truncated": lambda f: os.truncate(f, f.stat().st_size - 1),
    "header": lambda f: f.write_bytes(f.read_bytes()[:20]),
    "empty": lambda f: f.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_by_name_and_a_pickle_is_never_executed(damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "m.safetensors"
    save_file(STATE, file)
    DAMAGED[damage](file)
    with pytest.raises(Refused, match=r"P117.*'m.safetensors' is no safetensors file"):
        filled(file)
    assert not (tmp_path / "executed").exists()


def test_no_file_is_said(tmp_path):
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(Refused, match="P108"):
            open_weights(path)


@pytest.fixture
def tied_gpt():
    spec = GPT(layers=2, hidden=32, heads=4, vocab=64, sequence=16, tie_embeddings=True)
    return subject_of(Workload("gpt", spec, batch=8, dtype="float64"), synthetic=True)


@pytest.mark.gloo
def test_a_run_is_exported_and_another_split_starts_from_it(split, tied_gpt, tmp_path):
    first = split(tied_gpt, {"dp": 2, "tp": 2}, 2, folder=tmp_path / "run")
    file = export(tmp_path / "run", tmp_path / "model.safetensors")
    module = tied_gpt.make()
    module.load_state_dict(load_file(file))
    assert all(torch.equal(t, first.whole["state"][n]) for n, t in module.state_dict().items())
    made = replace(tied_gpt, make=lambda: _loaded(tied_gpt.make(), file))
    whole = split(made, {"tp": 2}, 2)
    got = split(tied_gpt, {"tp": 2}, 2, start=file)
    assert got.losses == whole.losses
    assert all(torch.equal(t, whole.whole["state"][n]) for n, t in got.whole["state"].items())
    with pytest.raises(Refused, match="P113"):
        export(tmp_path / "run", file)
    with pytest.raises(RunFailed, match="cannot write"):
        export(tmp_path / "run", tmp_path / "gone" / "m.safetensors")
    assert "head.weight" not in load_file(export(tmp_path / "run", tmp_path / "once", once=True))
    os.truncate(tmp_path / "run/checkpoints/step-2/rank-1.safetensors", 100)
    with pytest.raises(Refused, match=r"'rank-1.safetensors' is truncated"):
        export(tmp_path / "run", tmp_path / "more")
    assert not list(tmp_path.glob("*.partial"))


def _loaded(module, file):
    module.load_state_dict(load_file(file))
    return module


@pytest.mark.gloo
def test_stages_export_and_start_too(tied_gpt, tmp_path):
    """A tied embedding lives on the first and the last stage."""

    def trained(steps, **settings):
        program = replace(capture(tied_gpt, 4), microbatches=2)
        return run(Mesh.of({"pp": 2}), tied_gpt, [OneFOneB(microbatches=2)], program, Training(steps, 2, **settings))

    first = trained(1, folder=tmp_path / "run")
    file = export(tmp_path / "run", tmp_path / "model.safetensors")
    module = _loaded(tied_gpt.make(), file)
    assert all(torch.equal(t, first.tensors["state"][n]) for n, t in module.state_dict().items())
    made = replace(tied_gpt, make=lambda: _loaded(tied_gpt.make(), file))
    whole = train_whole(made, 1)
    assert trained(1, start=file).losses == pytest.approx(whole.losses, rel=1e-12)
