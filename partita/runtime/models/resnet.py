"""A residual network of basic blocks with batch norm.

Source: He et al. 2015, arXiv:1512.03385, section 3.3 and Table 1 (the 18- and 34-layer columns).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from partita import workload


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        same = into == out and stride == 1
        self.shortcut = None if same else nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """Images (samples, channels, size, size) to logits (samples, classes).

    Images of more than 64 pixels start with a 7 x 7 convolution of stride 2 and a pool, smaller ones with 3 x 3.
    """

    def __init__(self, spec: workload.ResNet) -> None:
        super().__init__()
        large = spec.size > 64
        width = (7, 2, 3) if large else (3, 1, 1)
        self.stem, self.norm = nn.Conv2d(spec.channels, spec.hidden, *width, bias=False), nn.BatchNorm2d(spec.hidden)
        self.pool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        blocks, into = [], spec.hidden
        for stage in range(spec.stages):
            for layer in range(spec.layers):
                out = spec.hidden * 2**stage
                blocks.append(Block(into, out, 2 if stage and not layer else 1))
                into = out
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(into, spec.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def hints(spec: workload.ResNet) -> dict[str, str]:
    """Named dims by parameter."""
    return {"stem.weight": "channels colours _ _" if spec.channels > 1 else "channels _ _ _", "head.weight": "classes _"}
