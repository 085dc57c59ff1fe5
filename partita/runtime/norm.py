"""The norm of all gradients together, on any mesh, each block counted once.

    ‖g‖_p = (Σ over parameters, over blocks, of |g|^p)^(1/p)

A parameter cut along some axes has one block per coordinate on them and a copy per coordinate on the others. A rank counts its
block only where its coordinate is 0 on every reduced axis that does not cut the parameter; then one number per reduced axis is
summed. Tied parameters are one parameter.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from partita.errors import Fault
from partita.runtime.net import Net

EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clip_faults(clip: tuple[float, float] | None) -> list[Fault]:
    """What is wrong with (max norm, norm type)."""
    if clip is None or (clip[0] > 0 and clip[1] > 0):
        return []
    return [
        Fault(
            "P112",
            f"clip = {clip!r}",
            law="the largest norm and the norm's type p are both above 0 (p may be infinite)",
            cure="clip = (1.0, 2.0)",
            at="clip",
        )
    ]


def global_norm(
    net: Net,
    parameters: Mapping[str, Tensor],
    placements: Mapping[str, Sequence[tuple[str, int, object]]],
    p: float = 2.0,
    *,
    apart: Sequence[str] = (),
) -> Tensor:
    """The p-norm of the gradients of the whole model: a float64 scalar.

    Args:
        net: The network; one all_reduce of 8 bytes per axis that cuts a parameter.
        parameters: What this rank steps on, by name; those without a gradient count nothing.
        placements: How each is cut.
        p: Above 0; may be infinite.
        apart: Axes along which ranks hold other parameters, each counted where it is given.
    """
    cutting = {axis for name in parameters for axis, _, _ in placements.get(name, ())}
    axes = [axis for axis in net.mesh.names if axis in cutting and net.size(axis) > 1]
    counted = []
    for name, parameter in parameters.items():
        cuts = {axis for axis, _, _ in placements.get(name, ())}
        if parameter.grad is not None and all(net.coordinate[a] == 0 for a in axes if a not in cuts):
            counted.append(parameter.grad)
    total = _powers(counted, p, net.device)
    for axis in axes:
        net.all_reduce(total, axis, op="max" if math.isinf(p) else "sum", label="norm")
    for axis in apart:
        net.all_reduce(total, axis, op="max" if math.isinf(p) else "sum", label="norm")
    return total if math.isinf(p) else total.pow(1.0 / p)


def _powers(grads: list[Tensor], p: float, device: torch.device) -> Tensor:
    """Σ |g|^p, or the largest |g|, in float64."""
    grads = [_plain(g) for g in grads if g.numel()]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for dtype in dict.fromkeys(g.dtype for g in grads):
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        some = torch._foreach_norm([g for g in grads if g.dtype == dtype], p, dtype=wide)
        each = torch.stack(list(some)).to(torch.float64)
        total = torch.maximum(total, each.max()) if math.isinf(p) else total + each.pow(p).sum()
    return total


def _plain(grad: Tensor) -> Tensor:
    """The numbers of a gradient: of a sparse one those it holds, of a complex one its lengths."""
    grad = grad.coalesce().values() if grad.is_sparse else grad
    return grad.abs() if grad.is_complex() else grad


def clip(parameters: Iterable[Tensor], norm: Tensor, largest: float) -> None:
    """Scale the gradients so that their norm is at most `largest`, as torch does it."""
    grads = [p.grad for p in parameters if p.grad is not None]
    factor = (largest / (norm + EPS)).clamp(max=1.0)
    for dtype in dict.fromkeys(g.dtype for g in grads):
        same = [g for g in grads if g.dtype == dtype]
        torch._foreach_mul_(same, factor.to(dtype) if dtype.is_floating_point and dtype.itemsize >= 4 else float(factor))
