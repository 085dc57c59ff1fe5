"""Batch norm whose statistics are of the global batch, as on one device.

    forward     every rank: Σ (x - k) and Σ (x - k)² per channel, one all_reduce of 2c;  k is the running mean, for stability
    backward    every rank: Σ dy and Σ dy · x̂ per channel, one all_reduce of 2c

Nothing is replaced: a torch-function mode outside all others answers `torch.batch_norm` in training, so modules keep their
class, names, buffers, momentum (None included) and batch counter, and evaluation is torch's own.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from partita.errors import Fault
from partita.runtime.net import Net
from partita.runtime.through import Anywhere, Place, Resumable, Through

VERIFY = "_verify_batch_size"  # of torch.nn.functional: refuses a batch of one value


class GlobalStatistics(Through, Resumable):
    """The mode; entered around forward, loss and backward (recomputation runs forward again).

    Args:
        net: The network.
        axes: The data axes; statistics are summed over each.
        module: Whose batch norms lend their paths to the ledger.
    """

    def __init__(self, net: Net, axes: Sequence[str], module: nn.Module | None = None) -> None:
        super().__init__()
        self.net, self.axes = net, tuple(axes)
        self.parts = 1
        for axis in axes:
            self.parts *= net.size(axis)
        self._paths = paths(module) if module is not None else {}

    def __enter__(self) -> Self:
        self._verify = getattr(F, VERIFY)
        setattr(F, VERIFY, _accept)  # one sample here may be one of many
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        setattr(F, VERIFY, self._verify)
        super().__exit__(*exc)

    def place(self) -> Place:
        return Anywhere(self)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.batch_norm:
            return self.batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def batch_norm(  # noqa: PLR0913
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,  # noqa: FBT001  torch's own signature
        momentum: float,
        eps: float,
        cudnn_enabled: bool = True,  # noqa: FBT001, FBT002
    ) -> Tensor:
        """`torch.batch_norm` over all data ranks."""
        count = input.numel() // input.shape[1] * self.parts
        if training and count == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
        if not training or self.parts == 1:
            return torch.batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
        label = next((self._paths[id(t)] for t in (weight, bias, running_mean) if id(t) in self._paths), "batch_norm")
        out, mean, var = _Normalise.apply(input, weight, bias, running_mean, eps, _Sum(self.net, self.axes, label, count))
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        return out


class FixedStatistics(Through):
    """Batch norms normalise by their running statistics, or not at all, and leave them as they are: samples do not mix."""

    def __enter__(self) -> Self:
        self._verify = getattr(F, VERIFY)
        setattr(F, VERIFY, _accept)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        setattr(F, VERIFY, self._verify)
        super().__exit__(*exc)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not torch.batch_norm:
            return func(*args, **(kwargs or {}))
        x, weight, bias, mean, var, _, *rest = args
        mean = x.new_zeros(x.shape[1]) if mean is None else mean
        var = x.new_ones(x.shape[1]) if var is None else var
        return func(x, weight, bias, mean, var, False, *rest, **(kwargs or {}))  # noqa: FBT003  torch's own signature


def _accept(size: Sequence[int]) -> None:
    """In the place of torch's check of the local batch."""


class _Sum:
    """Sums over the data axes, for one layer.

    Args:
        count: Values per channel on all ranks.
    """

    def __init__(self, net: Net, axes: Sequence[str], label: str, count: int) -> None:
        self.net, self.axes, self.label, self.count = net, axes, label, count

    def mean(self, *values: Tensor) -> list[Tensor]:
        """Each value's mean over all samples, places and ranks; one all_reduce per axis."""
        both = torch.stack(values)
        for axis in self.axes:
            self.net.all_reduce(both, axis, label=self.label)
        return list(both.div_(self.count).unbind(0))


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) · weight + bias, with the mean and variance of all ranks; half types are widened inside."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, shift: Tensor | None, eps: float, ranks: _Sum
    ) -> Any:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        dims, shape = [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)
        k = torch.zeros(x.shape[1], dtype=wide, device=x.device) if shift is None else shift.to(wide)
        apart = x.to(wide) - k.view(shape)
        moved, square = ranks.mean(apart.sum(dims), apart.square().sum(dims))
        var = (square - moved.square()).clamp_min_(0)
        scale = (var + eps).rsqrt_()
        out = apart.sub_(moved.view(shape)).mul_((scale if weight is None else scale * weight).view(shape))
        if bias is not None:
            out = out.add_(bias.view(shape))
        mean = k.add(moved)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.ranks, ctx.dims, ctx.shape, ctx.bias = ranks, dims, shape, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var)
        return out.to(x.dtype), mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, scale = ctx.saved_tensors
        g = grads[0].to(scale.dtype)
        normal = (x.to(scale.dtype) - mean.view(ctx.shape)).mul_(scale.view(ctx.shape))
        sums = g.sum(ctx.dims), (g * normal).sum(ctx.dims)  # of this rank: the gradients of bias and weight
        plain, along = ctx.ranks.mean(*sums)
        out = (g - plain.view(ctx.shape)).sub_(normal.mul_(along.view(ctx.shape)))
        out = out.mul_((scale if weight is None else scale * weight).view(ctx.shape)).to(x.dtype)
        return (
            out,
            None if weight is None else sums[1].to(weight.dtype),
            None if ctx.bias is None else sums[0].to(ctx.bias),
            None,
            None,
            None,
        )


# ---------------------------------------------------------------- which they are
def norms(module: nn.Module) -> list[str]:
    """Paths of the batch norms that use the statistics of their batch."""
    kind = nn.modules.batchnorm._BatchNorm
    return [name for name, m in module.named_modules() if isinstance(m, kind) and m.training]


def paths(module: nn.Module) -> dict[int, str]:
    """Id of each tensor of a batch norm -> the norm's path."""
    found = {}
    for name in norms(module):
        m = module.get_submodule(name)
        found |= {id(t): name for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    return found


def own_no_ranks(module: nn.Module) -> None:
    """A SyncBatchNorm would talk by itself, to all ranks: here it is a batch norm like any other."""
    for m in module.modules():
        if isinstance(m, nn.SyncBatchNorm):
            m.forward = MethodType(nn.modules.batchnorm._BatchNorm.forward, m)


def microbatch_faults(module: nn.Module, microbatches: int, allowed: str | None) -> list[Fault]:
    """Batch norm under accumulation normalises each microbatch by itself, which one device does not do."""
    found = norms(module)
    if microbatches == 1 or not found or allowed == "microbatch":
        return []
    return [
        Fault(
            "P115",
            f"batch norm {found[0]!r} under accumulate = {microbatches}",
            have=f"{len(found)} batch norms in training mode",
            law="its statistics are of the whole batch on one device, and of one microbatch under accumulation",
            cure='accumulate = 1, or batch_norm="microbatch" to accept the statistics of microbatches',
            at="workload.accumulate",
        )
    ]
