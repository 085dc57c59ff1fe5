"""Which optimizers ranks can step with: none that looks across a split parameter, or learns what ranks do not know.

An optimizer steps on whatever a rank holds. That is right if it treats every element of a parameter alone, as torch's SGD and
Adam do; one that takes the norm of a parameter, or a mean of its rows, sees only this rank's part. What it is, is found by
stepping: on the whole module and on this rank's part of it, with the same gradients.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn, optim

from partita.errors import Fault
from partita.runtime.cuts import Cut, Spans, spans_of
from partita.runtime.look import copied
from partita.runtime.master import Mastered
from partita.runtime.state import part
from partita.runtime.subject import Subject

# Torch's own optimizers that treat elements alone; exact types, for a subclass may do anything.
ALONE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta, optim.RMSprop,
    optim.Rprop, optim.ASGD,
}  # fmt: skip
STEPS = 2  # compared: the first one makes state
CLOSE = 1e-5  # relative difference of elements stepped alike


def foreign_faults(optimizer: optim.Optimizer, module: nn.Module) -> list[Fault]:
    """Parameters that learn but are not the module's: nobody adds up their gradients."""
    own = {id(p) for p in module.parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own and p.requires_grad]
    if not strangers:
        return []
    have = f"{len(strangers)} such, the first of shape {tuple(strangers[0].shape)}"
    law = "ranks add up the gradients of the module's parameters, found by their names"
    cure = "register it: nn.Parameter or nn.ModuleList in the module, a loss with parameters as a submodule; or one rank"
    return [Fault("P115", "the optimizer holds a parameter that is none of the module's", have, law, cure, "optimizer")]


def hook_faults(module: nn.Module) -> list[Fault]:
    """Hooks on the gradients of parameters: on a rank they would see the gradient of a part."""
    for name, p in module.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            law = "a rank's backward pass makes the gradient of its part; that of the whole is known when it is over"
            cure = "change gradients in the optimizer's step, or clip=; or one rank with accumulate = 1"
            return [Fault("P115", f"parameter {name!r} has a hook on its gradient", "", law, cure, f"model.{name}")]
    return []


def treats_elements_alone(optimizer: optim.Optimizer) -> bool:
    """Whether that is known by its type."""
    inner = optimizer.inner if isinstance(optimizer, Mastered) else optimizer
    hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
    return type(inner) in ALONE and not hooks


def element_faults(subject: Subject, whole: nn.Module, placements: Mapping[str, Sequence[Cut]], axis: str) -> list[Fault]:
    """P116 if an optimizer's step on a rank is not the rank's part of its step on the whole.

    Args:
        subject: Whose optimizer it is.
        whole: The module before it was cut; it is changed.
        placements: How each parameter is cut.
        axis: That cuts them.
    """
    shapes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    spans = {name: spans_of(shape, placements.get(name, ())) for name, shape in shapes.items()}
    mine = _parts(copied(whole), spans)
    with torch.random.fork_rng(devices=[]):
        for module, cut in ((whole, False), (mine, True)):
            torch.manual_seed(0)
            optimizer = subject.optimizer(module)
            for _ in range(STEPS):
                for name, p in module.named_parameters():
                    if p.requires_grad:
                        noise = torch.randn(shapes[name], device=p.device).to(p.dtype)
                        p.grad = part(noise, spans[name]).clone() if cut else noise
                optimizer.step()
    held = dict(mine.named_parameters())
    for name, p in whole.named_parameters():
        if not _close(part(p.detach(), spans[name]), held[name].detach()):
            return [_across(type(optimizer).__name__, name, axis)]
    return []


def server_fault(name: str, axis: str) -> Fault:
    """P116 for an optimizer at a server that is not known to treat every element alone."""
    return Fault(
        "P116",
        f"{name} cannot step at the servers of axis {axis!r}",
        "a server holds a range of the flat buffer: of a parameter perhaps some elements, in one dimension",
        "an optimizer steps on what a rank holds, so it must treat every element of a parameter alone",
        'one of torch\'s own that does (SGD, Adam, AdamW, ...), or optimizer_at = "worker"',
        "optimizer",
    )


def _parts(module: nn.Module, spans: Mapping[str, Spans]) -> nn.Module:
    """The module with a rank's parts in place of its parameters, ties kept."""
    named = dict(module.named_parameters())
    made = {id(p): nn.Parameter(part(p.detach(), spans[n]).clone(), p.requires_grad) for n, p in named.items()}
    for owner in module.modules():
        for name, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            owner.register_parameter(name, made[id(p)])
    return module


def _close(a: Tensor, b: Tensor) -> bool:
    scale = float(a.abs().max()) if a.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=CLOSE, atol=CLOSE * scale * 1e-3))


def _across(name: str, parameter: str, axis: str) -> Fault:
    return Fault(
        "P116",
        f"{name} cannot step on the parts of parameters along axis {axis!r}",
        f"{parameter!r} after {STEPS} steps on this rank's part is not the part of what it is on the whole",
        "an optimizer steps on what a rank holds, so it must treat every element of a parameter alone",
        f"SGD, Adam, AdamW, ...; clip= for the norm of all gradients; or set the size of axis {axis!r} to 1",
        "optimizer",
    )
