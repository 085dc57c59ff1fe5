"""The copy a proof runs: every axis, strategy and kind of module kept, widths as small as the laws allow.

axes      sizes above 2 become 2, or as large as --ranks allows
depth     2 blocks (pipelines: 2 per stage and chunk)
widths    the smallest the strategies can split, with the ratio heads : kv_heads kept
batch     2 samples per rank and microbatch; at most 2 microbatches
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from partita.errors import Fault, Refused
from partita.mesh import Mesh
from partita.workload import GPT, MLP, Llama, Model, ResNet, Workload

HEAD = 8  # width of a head in the copy: even, for rotary positions
SEQUENCE = 8
SAMPLES = 2  # per rank and microbatch


def shrink_mesh(mesh: Mesh, ranks: int | None) -> Mesh:
    """The smallest mesh that keeps every axis, or the largest within `ranks`.

    Raises:
        Refused: P118 if `ranks` is below the smallest such mesh.
    """
    least = Mesh(tuple((name, min(size, 2)) for name, size in mesh.axes))
    if ranks is None:
        return least
    if ranks < least.ranks:
        raise Refused(
            Fault(
                "P118",
                f"--ranks {ranks} is too few to prove this plan",
                have=" x ".join(f"{n}={s}" for n, s in mesh.axes) + f" needs at least {least.ranks} ranks",
                law="a proof keeps every axis, at size 2 or more where the plan has more than 1",
                cure=f"--ranks {least.ranks}",
                at="--ranks",
            )
        )
    choices = [range(small, size + 1) for (_, small), (_, size) in zip(least.axes, mesh.axes, strict=True)]
    fits = (sizes for sizes in product(*choices) if Mesh(tuple(zip(mesh.names, sizes, strict=True))).ranks <= ranks)
    best = max(fits, key=lambda sizes: (Mesh(tuple(zip(mesh.names, sizes, strict=True))).ranks, sizes))
    return Mesh(tuple(zip(mesh.names, best, strict=True)))


def shrink_workload(workload: Workload, mesh: Mesh, data_ranks: int, folder: Path) -> tuple[Workload, list[str]]:
    """A small copy of the workload for `mesh`, and what was shrunk, as lines to print.

    Args:
        workload: The plan's.
        mesh: The mesh of the copy.
        data_ranks: Ranks the batch is divided over.
        folder: Where a shrunken `config.json` may be written.
    """
    accumulate = min(workload.accumulate, 2)
    small = replace(workload, accumulate=accumulate, batch=data_ranks * accumulate * SAMPLES, data=None)
    unit = max((size for _, size in mesh.axes), default=1)
    if workload.model.startswith("hf:"):
        config = json.loads(Path(workload.model[3:]).read_text())
        less = shrink_config(config, unit)
        path = folder / "config.json"
        path.write_text(json.dumps(less))
        lines = [f"{k}: {config[k]} -> {less[k]}" for k in less if config.get(k) != less[k] and isinstance(less[k], int)]
        return replace(small, model=f"hf:{path}", spec=None), [*lines, *_batch_line(workload, small)]
    if workload.spec is None:
        return small, [f"{workload.model} is proved at its own size", *_batch_line(workload, small)]
    spec = shrink_spec(workload.spec, unit)
    return replace(small, spec=spec), [*_changes(workload.spec, spec), *_batch_line(workload, small)]


def shrink_spec(spec: Model, unit: int) -> Model:
    """The smallest spec whose heads, ffn and vocab split over `unit` ranks."""
    if isinstance(spec, GPT):
        heads = max(2, unit)
        sizes = {
            "heads": heads,
            "hidden": heads * HEAD,
            "vocab": 8 * unit,
            "sequence": SEQUENCE,
            "ffn": None if spec.ffn is None else 16 * unit,
        }
        return replace(spec, layers=2, **sizes)
    if isinstance(spec, Llama):
        grouped = spec.key_heads < spec.heads
        heads = max(2, unit) * (2 if grouped else 1)
        return replace(
            spec, layers=2, heads=heads, kv_heads=heads // 2 if grouped else None, hidden=heads * HEAD,
            vocab=8 * unit, sequence=SEQUENCE, ffn=None if spec.ffn is None else 16 * unit,
        )  # fmt: skip
    if isinstance(spec, ResNet):
        return replace(spec, layers=min(spec.layers, 2), hidden=4, size=4 << min(spec.stages, 3), classes=4)
    assert isinstance(spec, MLP), f"no rule to shrink {type(spec).__name__}"
    return replace(spec, layers=min(spec.layers, 4), inputs=4 * unit, hidden=8 * unit, outputs=4 * unit)


# What transformers' configs call each size; a key that is absent is not added.
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_WIDTH = ("hidden_size", "n_embd")
_FFN = ("intermediate_size", "n_inner")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")


def shrink_config(config: Mapping[str, Any], unit: int) -> dict[str, Any]:
    """A transformers config of the same type with the smallest sizes that split over `unit` ranks."""
    whole_heads = next((config[k] for k in _HEADS if k in config), None)
    grouped = config.get("num_key_value_heads") not in (None, whole_heads)
    heads = max(2, unit) * (2 if grouped else 1)
    named = ((_DEPTH, 2), (_HEADS, heads), (_WIDTH, heads * HEAD), (_FFN, 16 * unit), (_POSITIONS, 2 * SEQUENCE))
    sizes = {key: size for keys, size in named for key in keys}
    sizes |= {"num_key_value_heads": heads // 2 if grouped else heads, "head_dim": HEAD, "vocab_size": 8 * unit}
    less = {k: sizes.get(k, v) if v is not None else v for k, v in config.items()}
    return less | {k: 0 for k in ("bos_token_id", "eos_token_id", "pad_token_id") if less.get(k) is not None}


def _changes(old: Model, new: Model) -> list[str]:
    return [f"{k}: {v} -> {getattr(new, k)}" for k, v in vars(old).items() if getattr(new, k) != v]


def _batch_line(old: Workload, new: Workload) -> list[str]:
    pairs = (("batch", old.batch, new.batch), ("accumulate", old.accumulate, new.accumulate))
    return [f"{name}: {a} -> {b}" for name, a, b in pairs if a != b]
