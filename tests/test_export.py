"""A run's model leaves as one file that transformers or plain torch loads, and training starts from such a file."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import partita as pt
from partita.cli.main import main
from partita.errors import Refused

pytestmark = pytest.mark.gloo
PLAN = '[workload]\nmodel = "MODEL"\nbatch = 8\nsequence = 16\n[mesh]\ndp = 2\n[[strategy]]\nname = "ddp"\n'
CONFIGS = {
    "gpt2": {
        "vocab_size": 257, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
    },
    "llama": {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    },
    "bert": {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "architectures": ["BertForMaskedLM"],
    },
}  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(home, model):
    (home / "plan.toml").write_text("partita = 1\n" + PLAN.replace("MODEL", model))


SLOW = [pytest.param(*p, marks=pytest.mark.slow) for p in (("llama", True), ("llama", False), ("bert", True))]


@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), *SLOW])
def test_transformers_loads_what_was_exported(kind, tied, home, capsys):
    (home / "config.json").write_text(json.dumps({"model_type": kind, "tie_word_embeddings": tied, **CONFIGS[kind]}))
    planned(home, "hf:config.json")
    (home / "out").mkdir()
    assert main(["train", "plan.toml", "--steps", "2", "-o", "run"]) == 0
    assert main(["show", "run", "--export", "out/model.safetensors"]) == 0
    assert "wrote out/config.json" in capsys.readouterr().out
    auto = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    model, told = auto.from_pretrained("out", output_loading_info=True)
    assert not any(told.values()), told
    model.save_pretrained("again")
    ours, theirs = load_file("out/model.safetensors"), load_file("again/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], t) for name, t in theirs.items())
    assert main(["train", "plan.toml", "--steps", "1", "--from", "again", "-o", "more"]) == 0
    assert main(["train", "plan.toml", "--steps", "1", "-o", "fresh"]) == 0
    capsys.readouterr()
    started, fresh = (json.loads((home / run / "summary.json").read_text())["losses"][0] for run in ("more", "fresh"))
    assert started < fresh  # the same batch, after two steps of training


def refused(capsys, *argv):
    capsys.readouterr()
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_what_cannot_be_started_from_or_exported_is_refused_and_leaves_nothing(home, capsys):
    planned(home, "gpt-tiny")
    save_file({"tokens.weight": torch.ones(2, 2)}, "other.safetensors")
    torch.save({"a": torch.ones(1)}, "model.bin")
    err = refused(capsys, "train", "plan.toml", "--from", "other.safetensors", "-o", "run")
    assert "'tokens.weight' [2, 2], in the model [256, " in err
    assert "it has no tensor" in err
    assert "a pickle is never executed" in refused(capsys, "train", "plan.toml", "--from", "model.bin", "-o", "run")
    assert "P108" in refused(capsys, "train", "plan.toml", "--from", "gone", "-o", "run")
    assert "P119" in refused(capsys, "show", "gpt", "--export", "m.safetensors")
    assert "P119" in refused(capsys, "train", "plan.toml", "--shrink")
    (home / "empty").mkdir()
    assert "P108" in refused(capsys, "show", "empty", "--export", "m.safetensors")
    assert sorted(p.name for p in home.iterdir()) == ["empty", "model.bin", "other.safetensors", "plan.toml"]


def test_python_exports_and_starts_too(home):
    def make():
        torch.manual_seed(0)
        return torch.nn.Linear(4, 2).double()

    def batches(step):
        return {"input": torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).double()}

    def train(**more):
        return pt.train(pt.Plan(), model=make, batches=batches, loss=lambda output, _: output.square().mean(), steps=2, **more)

    first = train()
    file = first.export("model.safetensors")
    made = make()
    made.load_state_dict(load_file(file))
    assert torch.equal(made.weight, first.state_dict()["weight"])
    assert train(start=file).losses[0] < first.losses[0]
    with pytest.raises(Refused, match="P112"):
        train(start=file, resume=home)
