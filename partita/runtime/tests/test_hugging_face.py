"""Hugging Face modules built from a config: captured whole, named, and said with the published counts."""

import collections
import json

import pytest
import torch

from partita.errors import Refused
from partita.plans.hf import spec_of_hf_config
from partita.program.split import derive
from partita.runtime.capture import capture, narrowed
from partita.runtime.programs import program_of
from partita.runtime.task import subject_of
from partita.workload import Workload

pytestmark = [pytest.mark.law, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

B, T, D, L = 4, 16, 32, 4
X = 4 * B * T * D
SIZES = {"vocab_size": 64, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": L, "num_attention_heads": 4}
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": T},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 64, "n_embd": D, "n_layer": L, "n_head": 4, "n_positions": T,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "bert": {
        "model_type": "bert", **SIZES, "max_position_embeddings": T,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    },
}  # fmt: skip
FOLDED = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "bert": "bert.encoder.layer.1"}


def described(folder, kind, **more):
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIGS[kind], **more}))
    config = json.loads(path.read_text())
    return Workload(f"hf:{path}", spec_of_hf_config(config), batch=B)


def counts(program, *names):
    atoms = set().union(*(program.classes[n] for n in names))
    return collections.Counter((str(m.phase), m.op, m.nbytes) for m in derive(program, "x", 2, atoms).moves)


@pytest.mark.parametrize("kind", CONFIGS)
def test_capture_names_all_and_says_the_published_counts(tmp_path, kind):
    w = described(tmp_path, kind)
    p = capture(subject_of(w, synthetic=True), B)
    assert p.opaque_share() == 0
    assert not p.dynamic, p.notes
    assert len(p.gradients) == len(p.parameters())
    assert counts(p, "heads", "ffn") == {(phase, "all_reduce", X): 2 * L for phase in ("forward", "backward")}
    vocabulary = counts(p, "heads", "ffn", "vocab")
    assert vocabulary == {
        ("forward", "all_reduce", X): 2 * L + 1,
        ("backward", "all_reduce", X): 2 * L + 1,
        ("forward", "all_reduce", 4 * B * T): 2,
        ("forward", "all_reduce", 4): 1,
    }
    assert not derive(p, "dp", 2, p.classes["batch"], gradients=False, scalars=False).moves


@pytest.mark.parametrize("kind", CONFIGS)
def test_program_is_folded_scaled_and_kept(tmp_path, kind):
    w = described(tmp_path, kind)
    p = program_of(w, tmp_path, exact=True)
    assert {(s.count, s.block) for s in p.segments if s.block} == {(L - 2, FOLDED[kind])}
    assert p.flop() == capture(subject_of(w, synthetic=True), B).flop()
    assert program_of(w, tmp_path, exact=True) == p
    assert len(list((tmp_path / "programs").iterdir())) == 1


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_catalogue_says_the_same_as_the_real_module(tmp_path, kind):
    w = described(tmp_path, kind)
    assert w.spec is not None
    real, own = program_of(w, exact=True), program_of(w)
    assert own.flop() == real.flop()
    for names in (("heads", "ffn"), ("heads", "ffn", "vocab")):
        assert counts(own, *names) == counts(real, *names)
    sizes = [sum(t.nbytes * p.copies().get(t.id, 1) for t in p.parameters()) for p in (own, real)]
    assert sizes[0] == sizes[1]


def test_overrides_of_the_plan_reach_the_config(tmp_path):
    w = described(tmp_path, "llama", pad_token_id=40)
    smaller = Workload(w.model, type(w.spec)(1, 16, 2, 1, 32, 8, ffn=24), batch=2, dtype="float64")
    module = subject_of(smaller, synthetic=True).make()
    assert module.config.num_hidden_layers == 1
    assert module.config.pad_token_id is None
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert module.get_input_embeddings().weight.shape == (32, 16)


def test_make_gives_the_same_values_and_the_batch_depends_on_the_step_alone(tmp_path):
    subject = subject_of(described(tmp_path, "bert"), synthetic=True)
    first, second = subject.make(), subject.make()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(subject.batches(3)["input_ids"], subject.batches(3)["input_ids"])
    batch = subject.batches(0)
    hidden = batch["targets"] != -100
    assert hidden.any(1).all(), "every sample has a target"
    assert (batch["input_ids"] != 63)[~hidden].float().mean() > 0.9
    assert torch.isfinite(subject.evaluate(first, narrowed(batch, 2)))


def test_a_type_that_is_no_language_model_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(Refused, match="P115"):
        subject_of(Workload(f"hf:{path}"), synthetic=True)
