"""Flop of one aten op: torch's own formulas, and the CPU attention kernels it has none for.

Matrix products, convolutions and attention count; everything else is memory-bound and counts 0. Attention is counted whole,
causal or not, as the stock formulas do: forward 4 T^2 d per head set, backward 2.5 times that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q.shape, _grouped(q, k), _grouped(q, v))


def _attention_backward(g: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(g.shape, q.shape, _grouped(q, k), _grouped(q, v))


def _grouped(q: Any, k: Any) -> tuple[int, ...]:
    """Keys as if repeated for every query head: grouped attention does that much work."""
    return (k.shape[0], q.shape[1], *k.shape[2:])


def _vector(a: Any, b: Any, **_: Any) -> int:
    return 2 * a.numel()


def _outer(bias: Any, a: Any, b: Any, **_: Any) -> int:
    return 2 * a.numel()


def _recurrent(x: Any, w: Any, u: Any, *_: Any, **__: Any) -> int:
    """Two products per token: of the input and of the state."""
    return 2 * x.shape[0] * x.shape[1] * (w.numel() + u.numel())


FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mv: _vector,
    aten.dot: _vector,
    aten.addmv: _outer,
    aten.vdot: _vector,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: lambda *a, **k: 2 * _recurrent(*a, **k),
}


def flop_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Flop of one call of an aten overload."""
    formula = FORMULAS.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0
