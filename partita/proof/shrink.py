"""The copy a proof runs: every axis, strategy and kind of module kept, widths as small as the laws allow.

axes      sizes above 2 become 2, or as large as --ranks allows
depth     2 blocks (pipelines: 2 per stage and chunk)
widths    the smallest the strategies can split; one key head stays one, grouped ones stay grouped, what stays whole stays whole
batch     2 samples per rank and microbatch; at most 2 microbatches

A user's own code cannot be shrunk: it is proved at its own size, on an axis size that divides the plan's.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from partita.errors import Fault, Refused
from partita.mesh import Mesh
from partita.strategy import Place, Strategy
from partita.workload import GPT, MLP, Llama, Model, ResNet, Workload

BLOCKS = 2
HEAD = 8  # width of a head in the copy: even, for rotary positions
SEQUENCE = 8
SAMPLES = 2  # per rank and microbatch


# ---------------------------------------------------------------- the mesh
def shrink_mesh(mesh: Mesh, ranks: int | None, *, whole: bool = False, fixed: Collection[str] = ()) -> Mesh:
    """The smallest mesh that keeps every axis, or the largest within `ranks`.

    Args:
        mesh: The plan's.
        ranks: Ranks the copy may use; None means the fewest.
        whole: The model keeps its size, so sizes must divide the plan's.
        fixed: Axes that keep their size.

    Raises:
        Refused: P118 if `ranks` is below the smallest such mesh.
    """
    legal = [
        [size] if axis in fixed else [n for n in range(min(size, 2), size + 1) if not (whole and size % n)]
        for axis, size in mesh.axes
    ]
    least = Mesh(tuple((name, sizes[0]) for name, sizes in zip(mesh.names, legal, strict=True)))
    if ranks is None:
        return least
    if ranks < least.ranks:
        raise Refused(_too_few(mesh, least, ranks))
    choices = product(*([n for n in sizes if n <= ranks] for sizes in legal))
    best = max((c for c in choices if math.prod(c) <= ranks), key=lambda sizes: (math.prod(sizes), sizes))
    return Mesh(tuple(zip(mesh.names, best, strict=True)))


def _too_few(mesh: Mesh, least: Mesh, ranks: int) -> Fault:
    return Fault(
        "P118",
        f"--ranks {ranks} is too few to prove this plan",
        have=" x ".join(f"{n}={s}" for n, s in mesh.axes) + f" needs at least {least.ranks} ranks",
        law="a proof keeps every axis, at size 2 or more where the plan has more than 1",
        cure=f"--ranks {least.ranks}",
        at="--ranks",
    )


def ways(strategies: Sequence[Strategy], mesh: Mesh) -> int:
    """Parts the model's own dims are cut into."""
    return math.prod(mesh.size(a) for s in strategies if s.place in (Place.TENSOR, Place.SEQUENCE) for a in s.axes)


# ---------------------------------------------------------------- the workload
def shrink_workload(
    workload: Workload, cuts: tuple[int, int], data_ranks: int, folder: Path, *, rounds: int = 1, blocks: int = BLOCKS
) -> tuple[Workload, list[str]]:
    """A small copy of the workload, and what was shrunk, as lines to print.

    Args:
        workload: The plan's.
        cuts: Parts the model's dims are cut into: of the plan, of the copy.
        data_ranks: Ranks the batch is divided over in the copy.
        folder: Where a shrunken `config.json` may be written.
        rounds: Microbatches of each round of accumulation: those of a pipeline.
        blocks: Of the copy: 2 per stage.
    """
    accumulate = min(workload.accumulate, 2)
    small = replace(workload, accumulate=accumulate, batch=data_ranks * accumulate * rounds * SAMPLES, data=None)
    if workload.spec is not None:
        small = replace(small, spec=deep(shrink_spec(workload.spec, *cuts), workload.spec, blocks))
    if workload.model.startswith("hf:"):
        config = json.loads(Path(workload.model[3:]).read_text()) | _plain(workload.extra)
        less = shrink_config(config, *cuts, blocks)
        path = folder / "config.json"
        path.write_text(json.dumps(less))
        lines = [f"{k}: {_short(config[k])} -> {_short(less[k])}" for k in less if k in config and config[k] != less[k]]
        small = replace(small, model=f"hf:{path}", extra={"sequence": SEQUENCE})
        return small, [*(_changes(workload, small) or lines), *_batch_line(workload, small)]
    if workload.spec is None:
        return replace(workload, data=None), [f"{workload.model} is proved at its own size"]
    return small, [*_changes(workload, small), *_batch_line(workload, small)]


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan overrides in a config."""
    return {k: v for k, v in extra.items() if k != "sequence"}


def _short(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, list) else str(value)


def _changes(old: Workload, new: Workload) -> list[str]:
    if old.spec is None:
        return []
    return [f"{k}: {v} -> {getattr(new.spec, k)}" for k, v in vars(old.spec).items() if getattr(new.spec, k) != v]


def _batch_line(old: Workload, new: Workload) -> list[str]:
    pairs = (("batch", old.batch, new.batch), ("accumulate", old.accumulate, new.accumulate))
    return [f"{name}: {a} -> {b}" for name, a, b in pairs if a != b]


def deep(small: Model, own: Model, blocks: int) -> Model:
    """The copy with blocks enough for its stages, if the plan has them."""
    if isinstance(own, ResNet):  # `layers` of each of its stages
        return small if blocks == BLOCKS else replace(small, layers=own.layers, stages=own.stages)
    deeper = min(own.layers, blocks) if blocks > BLOCKS else small.layers
    return replace(small, layers=max(small.layers, deeper))


# ---------------------------------------------------------------- widths
def least(own: int, small: int, cut: int, new: int) -> int:
    """The smaller of a plan's own width and one of the copy that `new` ranks can split; odd where the plan's stays whole.

    Args:
        own: Width in the plan.
        small: Width in the copy, a multiple of `new`.
        cut, new: Parts in the plan, in the copy.
    """
    if cut > 1 and own % cut:
        return small + 1
    return own if own <= small and own % new == 0 else small


def shrink_spec(spec: Model, cut: int, new: int) -> Model:
    """The smallest spec whose heads, ffn and vocab split over `new` ranks as the plan's do over `cut`."""
    if isinstance(spec, GPT | Llama):
        heads, keys = _heads(spec.heads, spec.key_heads if isinstance(spec, Llama) else spec.heads, new)
        width = min(HEAD, spec.hidden // spec.heads)
        sizes: dict[str, Any] = {
            "layers": BLOCKS,
            "heads": heads,
            "hidden": heads * width,
            "vocab": least(spec.vocab, 8 * new, cut, new),
            "sequence": min(spec.sequence, SEQUENCE),
            "ffn": None if spec.ffn is None else least(spec.ffn, 16 * new, cut, new),
        }
        if isinstance(spec, Llama):
            sizes["kv_heads"] = None if keys == heads else keys
        return replace(spec, **sizes)
    if isinstance(spec, ResNet):
        size = min(spec.size, 4 << min(spec.stages, 3))
        return replace(
            spec, layers=min(spec.layers, BLOCKS), hidden=min(spec.hidden, 4), size=size, classes=min(spec.classes, 4)
        )
    assert isinstance(spec, MLP), f"no rule to shrink {type(spec).__name__}"
    widths = {name: least(getattr(spec, name), small * new, cut, new) for name, small in _MLP.items()}
    return replace(spec, layers=min(spec.layers, 4), **widths)


_MLP = {"inputs": 4, "hidden": 8, "outputs": 4}


def _heads(heads: int, keys: int, new: int) -> tuple[int, int]:
    """(heads, key heads) of the copy: one key head stays one, grouped ones stay grouped."""
    if keys == 1 and heads > 1:
        return 2 * new, 1
    if keys < heads:
        few = least(keys, max(2, new), 1, new)
        return 2 * few, few
    few = least(heads, max(2, new), 1, new)
    return few, few


# What transformers' configs call each size; a key that is absent is not added.
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_WIDTH = ("hidden_size", "n_embd")
_FFN = ("intermediate_size", "n_inner")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_KINDS = ("layer_types", "layers_block_type")  # ends of keys whose lists say a kind for each block


def shrink_config(config: Mapping[str, Any], cut: int, new: int, blocks: int = BLOCKS) -> dict[str, Any]:
    """A transformers config of the same type with the smallest sizes that `new` ranks split as `cut` ranks split the plan's."""
    whole_heads = next((config[k] for k in _HEADS if isinstance(config.get(k), int)), 2)
    heads, keys = _heads(whole_heads, config.get("num_key_value_heads") or whole_heads, new)
    depth, kinds = _blocks(config, blocks)
    named = ((_DEPTH, depth), (_HEADS, heads), (_WIDTH, heads * HEAD), (_POSITIONS, 2 * SEQUENCE))
    sizes: dict[str, Any] = {key: size for names, size in named for key in names} | kinds
    sizes |= {"num_key_value_heads": keys, "head_dim": HEAD}
    for key, small in ((_FFN[0], 16), (_FFN[1], 16), ("vocab_size", 8)):
        if isinstance(own := config.get(key), int):
            sizes[key] = least(own, small * new, cut, new)
    less = {k: sizes.get(k, v) if v is not None else v for k, v in config.items()}
    return less | {k: 0 for k in ("bos_token_id", "eos_token_id", "pad_token_id") if less.get(k) is not None}


def _blocks(config: Mapping[str, Any], blocks: int) -> tuple[int, dict[str, list[Any]]]:
    """Blocks of the copy, and the lists that name a kind for each block cut to match: every kind is kept."""
    lists = {k: v for k, v in config.items() if k.endswith(_KINDS) and isinstance(v, list) and v}
    rows = [json.dumps(row) for row in zip(*lists.values(), strict=False)]
    kept = [rows.index(row) for row in dict.fromkeys(rows)] or [0]
    kept += kept[-1:] * (blocks - len(kept))
    return len(kept), {k: [v[i] for i in kept] for k, v in lists.items()}
