"""A module of one's own, split over four ranks and proved: nothing in it knows of partita."""

import torch
from torch import nn

import partita as pt
from partita.strategies import DDP, TensorParallel


class Mixer(nn.Module):
    """Two residual MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def make() -> Mixer:
    torch.manual_seed(0)
    return Mixer()


def batches(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step: 16 samples."""
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(16, 16, generator=generator), "y": torch.randint(4, (16,), generator=generator)}


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


if __name__ == "__main__":
    plan = pt.Plan(mesh={"dp": 2, "tp": 2}, strategies=[TensorParallel(), DDP()])
    proof = pt.prove(plan, model=make, batches=batches, loss=loss, optimizer=optimizer, steps=3)
    print("proved" if proof.proved else "not proved")
    run = pt.train(plan, model=make, batches=batches, loss=loss, optimizer=optimizer, steps=5, clip=(1.0, 2.0))
    print("losses", [round(value, 4) for value in run.losses])
    print("whole again", {name: tuple(value.shape) for name, value in run.state_dict().items()})
