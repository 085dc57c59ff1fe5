"""The proof matrix: strategies x workloads x meshes, each proved on real ranks at the small size given here.

    rows = prove_matrix(small_workloads(), MESHES)      print(text.matrix(rows))

Meshes name the axes of the house's strategies: `dp` is ddp's, `tp` is tensor_parallel's. On a mesh of both, either axis is
outermost once: an order that only works one way is no order.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.errors import PartitaError, Refused
from partita.mesh import Mesh
from partita.plans import Plan
from partita.proof.prove import data_ranks, prove_plan
from partita.proof.shrink import SAMPLES
from partita.strategies import DDP, TensorParallel
from partita.strategy import Strategy
from partita.workload import GPT, MLP, Llama, ResNet, Workload

Row = dict[str, Any]

MESHES: tuple[dict[str, int], ...] = (
    {"dp": 2},
    {"dp": 4},
    {"tp": 2},
    {"tp": 4},
    {"dp": 2, "tp": 2},
    {"tp": 2, "dp": 2},
)
HF: dict[str, dict[str, Any]] = {  # transformers configs that split over 4 ranks
    "hf-llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 64,
        "max_position_embeddings": 16, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
    },
    "hf-gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 16,
        "vocab_size": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    },
    "hf-bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 2, "hidden_size": 32,
        "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "pad_token_id": 0,
    },
}  # fmt: skip


def small_workloads() -> dict[str, Workload]:
    """One workload of every kind the catalogue has, as small as four ranks can split it."""
    gpt = GPT(layers=2, hidden=32, heads=4, vocab=64, sequence=8, tie_embeddings=True, dropout=0.1)
    llama = Llama(layers=2, hidden=64, heads=8, kv_heads=4, vocab=64, sequence=8, ffn=96)
    return {
        "gpt": Workload("gpt", gpt, seed=1),
        "llama": Workload("llama", llama, seed=1),
        "resnet": Workload("resnet", ResNet(layers=1, stages=2, hidden=4, classes=4, size=8), seed=1),
        "mlp": Workload("mlp", MLP(layers=3, inputs=8, hidden=16, outputs=8), seed=1),
    }


def hf_workloads(folder: Path) -> dict[str, Workload]:
    """Small Llama, GPT-2 and BERT of transformers, whose configs are written to a folder."""
    found = {}
    for name, config in HF.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        found[name] = Workload(f"hf:{path}", seed=1)
    return found


def plan_on(workload: Workload, mesh: Mapping[str, int], memory: Sequence[Strategy] = ()) -> Plan:
    """A workload on a mesh, with SAMPLES samples a rank and microbatch; `memory`: strategies that use no axis."""
    strategies: tuple[Strategy, ...] = (*[TensorParallel()] * ("tp" in mesh), *memory, *[DDP()] * ("dp" in mesh))
    sized = Mesh.of(mesh)
    batch = data_ranks(strategies, sized) * workload.accumulate * SAMPLES
    return Plan(replace(workload, batch=batch), "here", sized.ranks, sized, strategies)


def prove_matrix(
    workloads: Mapping[str, Workload],
    meshes: Iterable[Mapping[str, int]] = MESHES,
    *,
    memory: Sequence[Strategy] = (),
    told: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Prove every workload on every mesh.

    Args:
        workloads: By name.
        meshes: Axis -> size, outermost first.
        memory: Strategies that use no axis, added to every plan.
        told: Told of each row as it is done.

    Returns:
        Rows {strategies, workload, mesh, seconds, proof, error}; a plan that is refused or fails has no proof and its reason.
    """
    rows = []
    for mesh in meshes:
        for name, workload in workloads.items():
            rows.append(_row(name, workload, mesh, memory))
            if told is not None:
                told(rows[-1])
    return rows


def _row(name: str, workload: Workload, mesh: Mapping[str, int], memory: Sequence[Strategy]) -> Row:
    began, proof, error, used = time.perf_counter(), None, "", ""
    try:
        plan = plan_on(workload, mesh, memory)
        used = " + ".join(s.name for s in plan.strategies)
        proof = prove_plan(plan, shrink=False).json()
    except Refused as refused:
        error = "; ".join(f"{f.code} {f.what}" for f in refused.faults)
    except PartitaError as failed:
        error = str(failed).partition("\n")[0]
    shown = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
    seconds = time.perf_counter() - began
    return {"strategies": used, "workload": name, "mesh": shown, "seconds": seconds, "proof": proof, "error": error}
