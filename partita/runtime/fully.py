"""Fully sharded parameters on torch's `fully_shard`: whose calls go through our door, and whose gradients end in our pieces.

fully_shard     gathers a unit's parameters around its forward and backward, and scatters its gradients
ours            the calls themselves (ledger, watcher), sums instead of means, adding up over microbatches in float32,
                and marks on what goes through a hook, so that a replay still knows what descends from a parameter
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from partita.runtime.buckets import HALF
from partita.runtime.calls import MARK, mark
from partita.runtime.gradients import missing_gradient
from partita.runtime.net import Net


class _Gather:
    """The all_gather of a unit's parameters."""

    def __init__(self, door: "_Door", label: str) -> None:
        self.door, self.label = door, label

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        self.door.net.all_gather_into(output_tensor, input_tensor, self.door.axis, label=self.label)


class _Scatter(_Gather):
    """The reduce_scatter of a unit's gradients; over a second data axis their sums are summed."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        door = self.door
        if door.silent:
            input_tensor.zero_()
        door.net.reduce_scatter_into(output_tensor, input_tensor, door.axis, label=self.label)
        if door.replicate is not None:
            door.net.all_reduce(output_tensor, door.replicate, label=self.label)


class _Door:
    """What the calls of all units share; `silent`: this rank adds nothing."""

    def __init__(self, net: Net, axis: str, replicate: str | None) -> None:
        self.net, self.axis, self.replicate, self.silent = net, axis, replicate, False


class Fully:
    """A module whose parameters are held by rows.

    Args:
        module: Changed in place.
        net, axis: Over which rows are shared out.
        units: (path, names of its parameters), the root ("") last.
        dtype: Gradients are summed in; None means their own.
        reshard: Blocks let go of whole parameters after forward.
        replicate: A second data axis, on which ranks hold the same rows.
    """

    def __init__(
        self,
        module: nn.Module,
        net: Net,
        axis: str,
        units: Sequence[tuple[str, Sequence[str]]],
        dtype: torch.dtype | None,
        *,
        reshard: bool,
        replicate: str | None,
    ) -> None:
        self.module, self.door = module, _Door(net, axis, replicate)
        mesh = DeviceMesh.from_group(net.group(axis), net.device.type, mesh_dim_names=(axis,))
        policy = MixedPrecisionPolicy(reduce_dtype=dtype, cast_forward_inputs=False)
        named = dict(module.named_parameters())
        for p in named.values():
            p.data = p.data.contiguous()
        for path, names in units:
            if names or not path:
                self._wrap(path, {named[n] for n in names}, mesh, policy, reshard=reshard)
        self.pieces = {n: _local(p) for n, p in module.named_parameters()}

    def _wrap(
        self, path: str, own: set[nn.Parameter], mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, reshard: bool
    ) -> None:
        unit = self.module.get_submodule(path)
        others = {p for p in unit.parameters() if p not in own and not _is_sharded(p)}
        fully_shard(
            unit, mesh=mesh, mp_policy=policy, ignored_params=others or None, reshard_after_forward=reshard if path else None
        )
        assert isinstance(unit, FSDPModule)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        label = path or "(root)"
        unit.set_custom_all_gather(_Gather(self.door, label))  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_Scatter(self.door, label))  # type: ignore[arg-type]
        _guard(unit)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """A backward pass that adds nothing to the sums of others."""
        self.door.silent = True
        try:
            yield
        finally:
            self.door.silent = False

    def rest(self) -> None:
        """Let go of all whole parameters: they are gathered anew, with what the pieces hold then."""
        state = self.module._get_fsdp_state()  # type: ignore[operator]
        if state._is_root:
            state._reset_iter_state()


def _local(p: Tensor) -> Tensor:
    return p.detach()._local_tensor if _is_sharded(p) else p  # type: ignore[attr-defined]


def _is_sharded(p: Tensor) -> bool:
    return type(p.data).__name__ == "DTensor" or type(p).__name__ == "DTensor"


def _guard(unit: nn.Module) -> None:
    """Run a unit's hooks outside any torch-function mode, and keep the marks of what goes through them."""
    state = unit._get_fsdp_state()  # type: ignore[operator]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        marked = [getattr(x, MARK, False) for x in tree_flatten((args, kwargs))[0]]
        with torch._C.DisableTorchFunction():
            leaves, form = tree_flatten(state._pre_forward(module, args, kwargs))
        for x, was in zip(leaves, marked, strict=True):
            if was:
                mark(x)
        for p in module.parameters():
            mark(p)
        return tree_unflatten(leaves, form)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        marked = [getattr(x, MARK, False) for x in tree_flatten(output)[0]]
        with torch._C.DisableTorchFunction(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # views are copied first
            leaves, form = tree_flatten(output)
            leaves = [_own(x) for x in leaves]
            leaves, form = tree_flatten(state._post_forward(module, args, tree_unflatten(leaves, form)))
        for x, was in zip(leaves, marked, strict=True):
            if was:
                mark(x)
        return tree_unflatten(leaves, form)

    state._pre_forward_hook_handle = unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    state._post_forward_hook_handle = unit.register_forward_hook(after)


def _own(x: Any) -> Any:
    """A result that can be written to without losing the hook on it: a view would."""
    view = isinstance(x, Tensor) and x.requires_grad and x._base is not None
    return x.clone() if view else x


class Rowed:
    """The gradients of fully sharded parameters, added up over microbatches.

    Args:
        fully: The module.
        parameters: By name.
        pieces: This rank's rows, by name: what the optimizer steps on.
        names: Of those with a gradient.
        microbatches: Of a step; above 1, half types are added up in float32.
    """

    def __init__(
        self,
        fully: Fully,
        parameters: Mapping[str, nn.Parameter],
        pieces: Mapping[str, Tensor],
        names: Sequence[str],
        microbatches: int,
    ) -> None:
        self.fully, self.pieces = fully, pieces
        self.parameters = {n: parameters[n] for n in names}
        self.sums: dict[str, Tensor] = {}
        self.wide = microbatches > 1

    @property
    def ids(self) -> set[int]:
        """id() of the parameters."""
        return {id(p) for p in self.parameters.values()}

    def begin(self) -> None:
        """Before the first microbatch of a step."""
        self.fully.rest()
        self.sums = {}
        for p in self.parameters.values():
            p.grad = None

    def start(self, stage: int | None = None, *, last: bool, silent: bool = False) -> None:
        """Before each microbatch."""

    def end(self, *, idle: bool = False) -> None:
        """After each microbatch; `idle`: it had nothing to learn from."""
        for name, p in self.parameters.items():
            if p.grad is None:
                if not idle:
                    raise missing_gradient(name, self.fully.door.net.rank)
                continue
            grad, p.grad = _local(p.grad), None
            if name in self.sums:
                self.sums[name].add_(grad)
            else:
                self.sums[name] = grad.float() if self.wide and grad.dtype in HALF else grad

    def finish(self, *, idle: bool = False) -> None:
        """After the last backward."""

    def settle(self) -> None:
        """Hand this rank's rows to the optimizer's tensors."""
        for name, grad in self.sums.items():
            piece = self.pieces[name]
            piece.grad = grad if grad.dtype == piece.dtype else grad.to(piece.dtype)
        self.sums = {}

    def used(self, axis: str) -> None:
        """Who has a gradient is known."""

    def drop(self) -> None:
        """Every parameter here has one."""
