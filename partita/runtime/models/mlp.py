"""Linear layers with GELU between them."""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn

from partita import workload


class MLP(nn.Module):
    """Vectors (samples, inputs) to logits (samples, outputs)."""

    def __init__(self, spec: workload.MLP) -> None:
        super().__init__()
        widths = [spec.inputs, *[spec.hidden] * (spec.layers - 1), spec.outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for n, layer in enumerate(self.layers):
            x = layer(F.gelu(x) if n else x)
        return x


def hints(spec: workload.MLP) -> dict[str, str]:
    """Every second width is `ffn`, so that a split needs one all_reduce per two layers."""
    last = spec.layers - 1
    if last < 1:
        return {}
    return {f"layers.{n}.weight": "ffn _" for n in range(0, last, 2)} | {
        f"layers.{n}.weight": "hidden _" for n in range(1, last, 2)
    }
