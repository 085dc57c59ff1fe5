"""A pre-norm decoder: rotary positions, grouped-query attention, SwiGLU, RMS norm, no biases."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita import workload
from partita.runtime.models.gpt import dropped, initialise


class RMSNorm(nn.Module):
    """x / rms(x) x weight, in float32 or wider."""

    def __init__(self, hidden: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(hidden)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return y.to(x.dtype) * self.weight


def rotary(tokens: int, size: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and sin (tokens, size) of the rotary angles.  Source: Su et al. 2021, arXiv:2104.09864, Eq. 34."""
    powers = torch.arange(0, size, 2, device=like.device, dtype=torch.float64) / size
    angles = torch.outer(torch.arange(tokens, device=like.device, dtype=torch.float64), theta**-powers)
    both = torch.cat((angles, angles), -1)
    return both.cos().to(like.dtype), both.sin().to(like.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + e / 2) of the last dim."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal attention; each key head serves `heads / kv_heads` query heads."""

    def __init__(self, spec: workload.Llama) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dropout = spec.heads, spec.key_heads, spec.dropout
        size = spec.hidden // spec.heads
        self.q = nn.Linear(spec.hidden, spec.heads * size, bias=False)
        self.k = nn.Linear(spec.hidden, spec.key_heads * size, bias=False)
        self.v = nn.Linear(spec.hidden, spec.key_heads * size, bias=False)
        self.out = nn.Linear(spec.heads * size, spec.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        samples, tokens, hidden = x.shape
        q = self.q(x).view(samples, tokens, self.heads, -1).transpose(1, 2)
        k, v = (part(x).view(samples, tokens, self.key_heads, -1).transpose(1, 2) for part in (self.k, self.v))
        grouped = self.heads != self.key_heads
        y = F.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True, enable_gqa=grouped)
        return self.out(dropped(y.transpose(1, 2).reshape(samples, tokens, hidden), self))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, spec: workload.Llama) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.hidden, spec.width, bias=False)
        self.up = nn.Linear(spec.hidden, spec.width, bias=False)
        self.down = nn.Linear(spec.width, spec.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Two residual branches."""

    def __init__(self, spec: workload.Llama) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.norm1, self.attention = RMSNorm(spec.hidden), Attention(spec)
        self.norm2, self.mlp = RMSNorm(spec.hidden), MLP(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + dropped(self.attention(self.norm1(x), cos, sin), self)
        return x + dropped(self.mlp(self.norm2(x)), self)


class Llama(nn.Module):
    """Tokens (samples, sequence) to logits (samples, sequence, vocab)."""

    def __init__(self, spec: workload.Llama) -> None:
        super().__init__()
        self.dropout, self.theta, self.size = spec.dropout, spec.rope_theta, spec.hidden // spec.heads
        self.tokens = nn.Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm, self.head = RMSNorm(spec.hidden), nn.Linear(spec.hidden, spec.vocab, bias=False)
        initialise(self, spec.layers)
        if spec.tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = dropped(self.tokens(tokens), self)
        cos, sin = rotary(tokens.shape[1], self.size, self.theta, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def hints(spec: workload.Llama) -> dict[str, str]:
    """Named dims by parameter; a dim of size 1 has no name."""
    group = "group " if spec.heads > spec.key_heads else ""
    heads = "heads " if spec.key_heads > 1 else ""
    return {
        "tokens.weight": "vocab hidden",
        **({} if spec.tie_embeddings else {"head.weight": "vocab hidden"}),
        "blocks.*.attention.q.weight": f"({heads}{group}...) hidden",
        "blocks.*.attention.k.weight": f"({heads}...) hidden",
        "blocks.*.mlp.up.weight": "ffn hidden",
    }
