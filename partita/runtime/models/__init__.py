"""The catalogue's modules, built from the specs of `workload.py`."""

from collections.abc import Mapping

from torch import nn

from partita.runtime.models import gpt, llama, mlp, resnet
from partita.workload import GPT, MLP, Llama, Model, ResNet

__all__ = ["build", "hints_of"]


def build(spec: Model) -> nn.Module:
    """The module of a spec, initialised from torch's current random state."""
    if isinstance(spec, GPT):
        return gpt.GPT(spec)
    if isinstance(spec, Llama):
        return llama.Llama(spec)
    if isinstance(spec, ResNet):
        return resnet.ResNet(spec)
    return mlp.MLP(spec)


def hints_of(spec: Model) -> Mapping[str, str]:
    """Named dims of the module's parameters, by glob."""
    if isinstance(spec, GPT):
        return gpt.hints(spec)
    if isinstance(spec, Llama):
        return llama.hints(spec)
    if isinstance(spec, ResNet):
        return resnet.hints(spec)
    assert isinstance(spec, MLP)
    return mlp.hints(spec)
