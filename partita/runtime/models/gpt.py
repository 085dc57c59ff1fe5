"""A pre-norm decoder: learned positions, fused qkv, GELU, layer norm."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita import workload


class Attention(nn.Module):
    """Causal attention over heads; the rows of `qkv` are (three heads e)."""

    def __init__(self, spec: workload.GPT) -> None:
        super().__init__()
        self.heads, self.dropout = spec.heads, spec.dropout
        self.qkv = nn.Linear(spec.hidden, 3 * spec.hidden)
        self.out = nn.Linear(spec.hidden, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, hidden = x.shape
        q, k, v = (part.view(samples, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(hidden, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = dropped(y.transpose(1, 2).reshape(samples, tokens, hidden), self)
        return self.out(y)


class MLP(nn.Module):
    """hidden -> ffn -> hidden."""

    def __init__(self, spec: workload.GPT) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(spec.hidden, spec.width), nn.Linear(spec.width, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Two residual branches."""

    def __init__(self, spec: workload.GPT) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.norm1, self.attention = nn.LayerNorm(spec.hidden), Attention(spec)
        self.norm2, self.mlp = nn.LayerNorm(spec.hidden), MLP(spec)

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropped(self.attention(self.norm1(x)), self)
        return x + dropped(self.mlp(self.norm2(x)), self)


class GPT(nn.Module):
    """Tokens (samples, sequence) to logits (samples, sequence, vocab)."""

    def __init__(self, spec: workload.GPT) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.tokens, self.positions = nn.Embedding(spec.vocab, spec.hidden), nn.Embedding(spec.sequence, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm, self.head = nn.LayerNorm(spec.hidden), nn.Linear(spec.hidden, spec.vocab, bias=False)
        initialise(self, spec.layers)
        if spec.tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = dropped(self.tokens(tokens) + self.positions(positions), self)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def dropped(x: Tensor, owner: nn.Module) -> Tensor:
    """Dropout at the owner's rate, while it trains."""
    rate = owner.dropout
    assert isinstance(rate, float)
    return F.dropout(x, rate) if rate and owner.training else x


def initialise(module: nn.Module, layers: int) -> None:
    """Weights normal(0.02), those that end a branch smaller by sqrt(2 layers), biases 0.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            ends = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends else 0.02)


def hints(spec: workload.GPT) -> dict[str, str]:
    """Named dims by parameter; a dim of size 1 has no name."""
    heads = "heads " if spec.heads > 1 else ""
    return {
        "tokens.weight": "vocab hidden",
        "positions.weight": "sequence hidden" if spec.sequence > 1 else "_ hidden",
        **({} if spec.tie_embeddings else {"head.weight": "vocab hidden"}),
        "blocks.*.attention.qkv.weight": f"(three {heads}...) hidden",
        "blocks.*.mlp.up.weight": "ffn hidden",
    }
