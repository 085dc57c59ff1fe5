"""A task whose model looks across samples, which no data axis can split."""

import torch
from torch import nn


class Mixing(nn.Module):
    """Takes the mean over the batch away, as a batch norm without a layer would."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return self.head(y - y.mean(0, keepdim=True))


def make() -> Mixing:
    return Mixing()


def batches(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(step)), "y": torch.zeros(8, 1)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch["y"])
