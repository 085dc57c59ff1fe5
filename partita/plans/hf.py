"""Maps a Hugging Face config.json of type llama or gpt2 to the catalogue's models, without importing transformers.

What those models cannot say (another activation, biases, scaled rotary frequencies, three different dropouts) is not
approximated: the answer is None, and the module is built by transformers itself.

Source: the defaults are those of LlamaConfig and GPT2Config, transformers 5.24 (2026).
"""

from collections.abc import Mapping
from typing import Any

from partita.workload import GPT, Llama, Model


def spec_of_hf_config(config: Mapping[str, Any]) -> Model | None:
    """The catalogue's model for a parsed config.json; None if the catalogue has no such model."""
    kind = config.get("model_type")
    if kind == "llama":
        return _llama(config)
    if kind == "gpt2":
        return _gpt2(config)
    return None


def _llama(config: Mapping[str, Any]) -> Llama | None:
    hidden, heads = config.get("hidden_size", 4096), config.get("num_attention_heads", 32)
    keys = config.get("num_key_value_heads")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = (
        config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias")
        and not config.get("mlp_bias")
        and not config.get("attention_dropout")
        and (rope.get("rope_type") or rope.get("type") or "default") == "default"
        and (config.get("head_dim") or hidden // heads) * heads == hidden
    )
    if not plain:
        return None
    return Llama(
        layers=config.get("num_hidden_layers", 32),
        hidden=hidden,
        heads=heads,
        kv_heads=keys if keys != heads else None,
        vocab=config.get("vocab_size", 32000),
        sequence=config.get("max_position_embeddings", 2048),
        ffn=config.get("intermediate_size", 11008),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
    )


def _gpt2(config: Mapping[str, Any]) -> GPT | None:
    drops = {float(config.get(key, 0.1)) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    plain = (
        config.get("activation_function", "gelu_new") in ("gelu", "gelu_new", "gelu_pytorch_tanh")
        and len(drops) == 1
        and config.get("scale_attn_weights", True)
        and not config.get("add_cross_attention")
    )
    if not plain:
        return None
    return GPT(
        layers=config.get("n_layer", 12),
        hidden=config.get("n_embd", 768),
        heads=config.get("n_head", 12),
        vocab=config.get("vocab_size", 50257),
        sequence=config.get("n_positions", 1024),
        ffn=config.get("n_inner"),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        dropout=drops.pop(),
    )
