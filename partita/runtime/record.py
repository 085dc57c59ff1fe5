"""The recorder: hears every collective of a running step, whoever calls it.

A dispatch mode below torch.distributed: it sees `c10d` ops (eager calls, torch's own DDP and FSDP) and the functional ones of
DTensor. Only a whitelist counts: `wait_tensor` and autograd wrappers look like collectives and move nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita.program.events import Phase
from partita.runtime.tape import DTYPES, Where

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "partita")
KINDS = (  # fragment of an op's name -> what it is; the first that fits
    ("switch_reduce", "switch_reduce"),
    ("block_reduce", "block_reduce"),
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("send", "send"),
    ("recv", "receive"),
    ("reduce_", "reduce"),
    ("gather_", "gather"),
    ("scatter_", "scatter"),
)
SILENT = ("wait", "wrap", "barrier")


@dataclass(frozen=True, slots=True)
class Heard:
    """One collective call as it went by.

    Args:
        axis: Mesh axis of its group; "?" for a group the recorder was not told of.
        nbytes: The large side: the largest of its tensors and results.
        module: The module it was called in, as far as the recorder knows modules.
    """

    op: str
    axis: str
    nbytes: int
    dtype: str
    phase: Phase
    module: str = ""


class Recorder(TorchDispatchMode):
    """Writes down what goes by while it is entered.

    Args:
        groups: Name of a process group -> the mesh axis it serves.
        module: The module that runs, for paths; None leaves them empty.
    """

    def __init__(self, groups: Mapping[str, str], module: nn.Module | None = None) -> None:
        super().__init__()
        self.groups = dict(groups)
        self.where = Where(module if module is not None else nn.Module())
        self.heard: list[Heard] = []
        self.optimizing = False

    def __enter__(self) -> "Recorder":
        self.where.__enter__()
        before = register_optimizer_step_pre_hook(lambda *_: self._optimizer(True))  # noqa: FBT003
        after = register_optimizer_step_post_hook(lambda *_: self._optimizer(False))  # noqa: FBT003
        self.hooks = [before, after]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for hook in self.hooks:
            hook.remove()
        self.where.__exit__(*exc)

    def _optimizer(self, running: bool) -> None:  # noqa: FBT001
        self.optimizing = running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(t.__name__ in ("DTensor", "LocalTensor") for t in types):
            return NotImplemented  # let the subclass take itself apart; its local ops are heard then
        module = self.where.here()
        out = func(*args, **kwargs)
        kind = kind_of(func) if func.namespace in NAMESPACES else None
        if kind:
            self._hear(kind, module, args, kwargs, out)
        return out

    def _hear(self, kind: str, module: str, args: Any, kwargs: Any, out: Any) -> None:
        sides = [*args, *kwargs.values(), out]
        large = max(sides, key=_nbytes)
        tensors = [t for t in tree_leaves(large) if isinstance(t, Tensor)]
        dtype = DTYPES.get(tensors[0].dtype, str(tensors[0].dtype)) if tensors else "uint8"
        phase = Phase.OPTIMIZER if self.optimizing else self.where.phase()
        self.heard.append(
            Heard(kind, self.groups.get(_group([*args, *kwargs.values()]), "?"), _nbytes(large), dtype, phase, module)
        )


def kind_of(func: Any) -> str | None:
    """Which collective an op of a communication namespace is; None for one that moves nothing."""
    name = func._schema.name.split("::")[1]
    if any(word in name for word in SILENT):
        return None
    return next((kind for fragment, kind in KINDS if fragment in name), None)


def _nbytes(tree: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, Tensor))


def _group(args: list[Any]) -> str:
    """Name of the process group among the arguments."""
    for a in reversed(args):
        if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()):
            return str(dist.ProcessGroup.unbox(a).group_name)
        if isinstance(a, str) and a in dist.distributed_c10d._world.pg_names.values():
            return a
    return "?"
