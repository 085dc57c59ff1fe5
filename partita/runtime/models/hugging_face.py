"""`hf:` models: the real transformers module built from a config.json.  Loaded by name, only when such a model is needed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from partita.errors import Fault, Refused
from partita.runtime.subject import Subject, generator_of, held_tokens_of, optimizer_of, tokens_of
from partita.workload import GPT, Llama, Workload

MASKED_SHARE = 0.15  # of the tokens of a masked language model.  Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1
IGNORED = -100  # target of a token that does not count; torch's own default
# Field of a catalogue spec -> key of the config of that type; what a plan overrides is written back.
LLAMA = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size", "sequence": "max_position_embeddings", "ffn": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings", "rope_theta": "rope_theta",
}  # fmt: skip
GPT2 = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab": "vocab_size", "sequence": "n_positions",
    "ffn": "n_inner", "tie_embeddings": "tie_word_embeddings",
}  # fmt: skip


def subject(workload: Workload, synthetic: bool) -> Subject:  # noqa: FBT001
    """The task of training the module on tokens.

    Raises:
        Refused: P115, for a type that is neither a causal nor a masked language model.
    """
    config = config_of(workload)
    kind, masked = _kind(config, workload)

    def make() -> nn.Module:
        torch.manual_seed(workload.seed)
        return kind.from_config(config).train().to(getattr(torch, workload.dtype))

    sequence = _sequence(workload, config)
    tokens = tokens_of(workload, config.vocab_size, sequence, synthetic=synthetic)
    held = held_tokens_of(workload, config.vocab_size, sequence, synthetic=synthetic)
    hidden = config.mask_token_id if isinstance(getattr(config, "mask_token_id", None), int) else config.vocab_size - 1

    def named(batch: Mapping[str, Tensor], step: int) -> dict[str, Any]:
        if not masked:
            return {"input_ids": batch["tokens"], "targets": batch["targets"]}
        seen = torch.rand(batch["tokens"].shape, generator=generator_of(workload.seed + 1, step)) >= MASKED_SHARE
        seen[:, 0] = False  # every sample counts
        inputs = batch["tokens"].where(seen, torch.tensor(hidden))
        return {"input_ids": inputs, "targets": batch["tokens"].masked_fill(seen, IGNORED)}

    return Subject(
        make,
        lambda step: named(tokens(step), step),
        logits_loss,
        optimizer_of(workload),
        ("input_ids",),
        held_out=None if held is None else lambda number: named(held(number), number),
    )


def logits_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross-entropy over the targets that count."""
    return F.cross_entropy(output.logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)


def config_of(workload: Workload) -> Any:
    """The config of the file, with what the plan overrides."""
    table = json.loads(Path(workload.model.removeprefix("hf:")).read_text(encoding="utf-8"))
    kind = table.pop("model_type")
    table |= {k: v for k, v in workload.extra.items() if k != "sequence"}
    table |= _overrides(workload)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):  # a smaller vocabulary may not have them
        at = table.get(key)
        if isinstance(at, int) and at >= table.get("vocab_size", at + 1):
            table[key] = None
    table["use_cache"] = False
    return transformers.AutoConfig.for_model(kind, **table)


def config_text(workload: Workload) -> str:
    """The config.json that stands beside a model file, as transformers writes it."""
    config = config_of(workload)
    kind, _ = _kind(config, workload)
    config.architectures = [kind._model_mapping[type(config)].__name__]
    config.dtype = workload.dtype
    config.use_cache = True
    return config.to_json_string(use_diff=True)


def _overrides(workload: Workload) -> dict[str, Any]:
    """The fields of the catalogue spec, as keys of the config."""
    spec = workload.spec
    if not isinstance(spec, GPT | Llama):
        return {}
    found = {key: getattr(spec, name) for name, key in (LLAMA if isinstance(spec, Llama) else GPT2).items()}
    if isinstance(spec, Llama):
        found["intermediate_size"], found["num_key_value_heads"] = spec.width, spec.key_heads
        found["head_dim"] = spec.hidden // spec.heads
        found["rope_parameters"] = {"rope_theta": found.pop("rope_theta"), "rope_type": "default"}
    else:
        found |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), spec.dropout)
    return found


def _kind(config: Any, workload: Workload) -> tuple[Any, bool]:
    """The auto class that builds the module, and whether it is a masked language model."""
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    named = " ".join(config.architectures or ())
    if masked and ("MaskedLM" in named or not causal or not getattr(config, "is_decoder", False)):
        return transformers.AutoModelForMaskedLM, True
    if causal:
        return transformers.AutoModelForCausalLM, False
    raise Refused(
        Fault(
            "P115",
            f"model = {workload.model!r} is neither a causal nor a masked language model",
            f"model_type = {config.model_type!r}",
            "an hf: model is trained on tokens",
            'write a factory and name it: model = "python:package.module:factory"',
            "workload.model",
        )
    )


def _sequence(workload: Workload, config: Any) -> int:
    """Tokens per sample."""
    own = workload.extra.get("sequence") or workload.sequence
    return int(own or getattr(config, "max_position_embeddings", None) or 512)
