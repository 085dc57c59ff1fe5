"""Named sizes and Hugging Face configs: published parameter counts, sources, and what is not approximated."""

import pytest

from partita.plans import named, spec_of_hf_config
from partita.workload import GPT, Llama, ResNet


def parameters(spec):
    """Weights by hand: 12 h^2 a block and kin."""
    if isinstance(spec, GPT):
        block = 4 * spec.hidden**2 + 2 * spec.hidden * spec.width
        return spec.layers * block + (1 if spec.tie_embeddings else 2) * spec.vocab * spec.hidden + spec.sequence * spec.hidden
    kv = spec.hidden // spec.heads * spec.key_heads
    block = 2 * spec.hidden**2 + 2 * spec.hidden * kv + 3 * spec.hidden * spec.width
    return spec.layers * block + (1 if spec.tie_embeddings else 2) * spec.vocab * spec.hidden


@pytest.mark.published
@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [  # the size each model is published under; biases and norms are left out of the count
        ("gpt2", 124e6, 0.01),
        ("gpt2-medium", 355e6, 0.01),
        ("gpt2-large", 774e6, 0.01),
        ("gpt2-xl", 1558e6, 0.01),
        ("gpt3-175b", 175e9, 0.01),
        ("llama2-7b", 6.74e9, 0.01),
        ("llama2-13b", 13.0e9, 0.01),
        ("llama2-70b", 69.0e9, 0.01),
        ("llama3-8b", 8.03e9, 0.01),
        ("llama3-70b", 70.6e9, 0.01),
        ("llama3-405b", 405e9, 0.01),
    ],
)
def test_a_named_size_has_the_published_number_of_parameters(name, published, tolerance):
    assert parameters(named()[name].spec()) == pytest.approx(published, rel=tolerance)


def test_every_named_size_has_a_source_and_a_date():
    for entry in named().values():
        assert entry.source
        assert entry.date[:2] == "20"
        spec = entry.spec()
        if not isinstance(spec, ResNet) and entry.kind != "mlp":
            assert spec.hidden % spec.heads == 0


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 300}


def test_llama_and_gpt2_configs_map_field_by_field():
    assert spec_of_hf_config(LLAMA) == Llama(3, 64, 8, 2, 500, 256, 96, tie_embeddings=True, rope_theta=5e5)
    assert spec_of_hf_config(GPT2) == GPT(3, 64, 4, 300, 128, None, tie_embeddings=True, dropout=0.1)
    assert spec_of_hf_config(GPT2 | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "n_inner": 128}).ffn == 128


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_dropout": 0.1},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"head_dim": 32},
        {"model_type": "mistral"},
    ],
)
def test_what_the_catalogue_cannot_say_is_left_to_transformers(change):
    assert spec_of_hf_config(LLAMA | change) is None


@pytest.mark.parametrize("change", [{"activation_function": "relu"}, {"attn_pdrop": 0.2}, {"scale_attn_weights": False}])
def test_what_the_gpt_cannot_say_is_left_to_transformers(change):
    assert spec_of_hf_config(GPT2 | change) is None


def test_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    for kind, cls in (("llama", transformers.LlamaConfig), ("gpt2", transformers.GPT2Config)):
        full = cls().to_dict()
        assert spec_of_hf_config(full) == spec_of_hf_config({"model_type": kind})
