"""Modules of users on a grid: proved as they are, or refused before anything runs."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partita.mesh import Mesh
from partita.proof.prove import prove_subject
from partita.runtime.subject import Subject
from partita.runtime.training import Training
from partita.strategies.tensor.grid import Grid
from partita.strategies.tensor.summa import Summa

HIDDEN, HEADS, WIDTH, VOCAB = 16, 4, 32, 24


class Own(nn.Module):
    """Products written three ways, a norm that torch takes apart, sizes read off weights, a mean over features, a tied head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN, padding_idx=0)
        self.first, self.second = nn.RMSNorm(HIDDEN), nn.LayerNorm(HIDDEN, bias=False)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)  # a bias of keys has no gradient but rounding, which Adam blows up
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 4)  # stored (in, out)
        self.up_bias = nn.Parameter(torch.randn(WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 4)

    def forward(self, tokens):
        x = self.table(tokens)
        x = x - x.mean(-1, keepdim=True)
        b, t, width = x.shape
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        y = self.second(x)
        y = torch.addmm(self.up_bias, y.reshape(-1, y.shape[-1]), self.up)
        y = F.gelu(y) @ self.down
        x = x + y.view(b, t, -1)
        return x @ self.table.weight.t()


def subject(make):
    def built():
        torch.manual_seed(0)
        return make()

    def batches(step):
        g = torch.Generator().manual_seed(step)
        return {"tokens": torch.randint(1, VOCAB, (4, 6), generator=g), "targets": torch.randint(0, VOCAB, (4, 6), generator=g)}

    def loss(out, batch):
        return F.cross_entropy(out.flatten(0, 1), batch["targets"].flatten())

    return Subject(built, batches, loss, functools.partial(_adam), forward=("tokens",))


def _adam(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("strategy", "axes"),
    [
        pytest.param(Summa(), {"tp_row": 2, "tp_col": 2}, id="summa"),
        pytest.param(Grid(), {"tp_x": 2, "tp_y": 2}, id="grid", marks=pytest.mark.slow),
        pytest.param(Summa(), {"tp_row": 1, "tp_col": 2}, id="one-row", marks=pytest.mark.slow),
        pytest.param(Summa(), {"tp_row": 2, "tp_col": 1}, id="one-column", marks=pytest.mark.slow),
    ],
)
def test_a_module_of_a_user_is_one_device(strategy, axes):
    proof = prove_subject(subject(Own), (strategy,), Mesh.of(axes), Training(3, seed=1))
    assert proof.proved, proof.reasons
    assert proof.notes == ()
