"""A training loop of one's own on two local ranks; the same `story` runs under torchrun with `pt.session(plan)`."""

import torch
from torch import nn

import partita as pt
from partita.strategies import DDP


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def loader() -> list[dict[str, torch.Tensor]]:
    """Five global batches of 16 samples."""
    generator = torch.Generator().manual_seed(1)
    points = [torch.randn(16, 8, generator=generator) for _ in range(5)]
    return [{"input": x, "target": x.sum(1, keepdim=True)} for x in points]


def squared(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch["target"])


def story(session: pt.session) -> list[float]:
    """What every rank does; `session` cuts the batches and owns forward and backward."""
    model, steps = session.wrap(make(), optimizer)
    losses = []
    for batch in session.shard(loader()):
        losses.append(float(session.step(model, batch, squared)))
        session.clip(model, max_norm=1.0)
        steps.step()
        steps.zero_grad()
    return losses


if __name__ == "__main__":
    plan = pt.Plan(mesh={"dp": 2}, strategies=[DDP()])
    for rank, losses in enumerate(pt.spawn(plan, story)):
        print(f"rank {rank}", [round(value, 4) for value in losses])
