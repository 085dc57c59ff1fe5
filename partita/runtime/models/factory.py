"""`python:` models: a user's factory and what stands beside it.  Loaded by name, only when such a model is needed.

# package/module.py
def factory(**settings) -> nn.Module     or a mapping {model, batches, loss, optimizer?, forward?}, or a Subject
def batches(step) -> dict                the global batch of a step
def loss(output, batch) -> Tensor
def optimizer(module) -> Optimizer       optional
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from partita.errors import Fault, Refused
from partita.runtime.subject import Subject, optimizer_of
from partita.workload import Workload

PARTS = ("batches", "loss", "optimizer", "forward", "hints")


def subject(workload: Workload) -> Subject:
    """The task a factory describes.

    Raises:
        Refused: P107 for a name that is not there, P112 for arguments it does not take, P115 for a task without its parts.
    """
    module, factory = _factory(workload)
    made = _called(factory, workload)
    if isinstance(made, Subject):
        return made
    if isinstance(made, Mapping):
        parts = dict(made)
        model = parts.pop("model", None)
        make: Callable[[], Any] | None = model if callable(model) and not isinstance(model, nn.Module) else None
    else:
        parts = {name: getattr(module, name) for name in PARTS if name in vars(module)}
        make = (lambda: _called(factory, workload)) if isinstance(made, nn.Module) else None
    missing = [name for name, part in (("model", make), *((n, parts.get(n)) for n in ("batches", "loss"))) if part is None]
    if missing or make is None:
        raise Refused(_incomplete(workload, missing))

    def seeded() -> nn.Module:
        torch.manual_seed(workload.seed)
        return make()

    forward = parts.get("forward")
    return Subject(
        seeded,
        parts["batches"],
        parts["loss"],
        parts.get("optimizer") or optimizer_of(workload),
        tuple(forward) if forward else None,
        parts.get("hints") or {},
    )


def _factory(workload: Workload) -> tuple[ModuleType, Callable[..., Any]]:
    path, _, name = workload.model.removeprefix("python:").partition(":")
    law = "python: names an importable module and a callable in it"
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        cure = "install the package, or run where it can be imported"
        raise Refused(Fault("P108", f"module {path!r} cannot be imported", str(error), law, cure, "workload.model")) from None
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) or inspect.isclass(v)]
        have = f"{path} has {', '.join(names[:8]) or 'no function'}"
        raise Refused(Fault("P107", f"{path!r} has no factory {name!r}", have, law, "name one of these", "workload.model"))
    return module, found


def _called(factory: Callable[..., Any], workload: Workload) -> Any:
    try:
        inspect.signature(factory).bind(**workload.extra)
    except TypeError as error:
        have = f"settings {', '.join(workload.extra) or 'none'}; the factory takes {inspect.signature(factory)}"
        law = "keys of [workload] that are not partita's own are arguments of the factory"
        raise Refused(Fault("P112", f"{workload.model!r}: {error}", have, law, "change the keys", "workload")) from None
    torch.manual_seed(workload.seed)
    return factory(**workload.extra)


def _incomplete(workload: Workload, missing: list[str]) -> Fault:
    return Fault(
        "P115",
        f"{workload.model!r} does not say how it is trained",
        f"missing: {', '.join(missing) or 'model'}",
        "a task is a model, its batches and its loss",
        "put batches(step) and loss(output, batch) beside the factory, or return {'model': ..., 'batches': ..., 'loss': ...}",
        "workload.model",
    )
