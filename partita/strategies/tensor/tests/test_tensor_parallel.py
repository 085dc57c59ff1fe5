"""Laws of tensor parallelism as said: published counts, what stays whole, and what is refused with which words."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from partita.errors import Refused
from partita.mesh import Mesh
from partita.program import Phase, Split
from partita.program.fold import fold, stretch, unfold
from partita.runtime.capture import capture
from partita.runtime.programs import program_of
from partita.runtime.subject import Subject
from partita.strategies.tensor.tensor_parallel import TensorParallel
from partita.strategy import compose
from partita.workload import GPT, Llama, ResNet, Workload

SMALL = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 16}
TWO = Mesh.of({"tp": 2})


def said(program, mesh=TWO, **settings):
    after = TensorParallel(**settings).rewrite(program, mesh)
    return after, [(c.phase, c.op, c.nbytes) for c in after.collectives()]


def gpt(**changes):
    return program_of(Workload("gpt", GPT(**{**SMALL, **changes}), batch=4))


def llama(**changes):
    return program_of(Workload("llama", Llama(**{**SMALL, **changes}), batch=4))


def own(make, loss=lambda o, b: o.square().mean(), shape=(4, 5, 24)):
    def built():
        torch.manual_seed(0)
        return make()

    batches = lambda step: {"input": torch.randn(*shape)}
    return capture(Subject(built, batches, loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), shape[0])


# ---------------------------------------------------------------- what is said
@pytest.mark.published
@pytest.mark.parametrize(("layers", "tied"), [(3, False), (3, True), (7, False)])
def test_blocks_move_what_megatron_says(layers, tied):
    """Shoeybi et al. 2019, section 3: two all_reduces of batch x sequence x hidden a block, forward, and two backward;
    one more each way for a parallel embedding and head; the loss moves numbers per token, not per class."""
    _, moves = said(gpt(layers=layers, tie_embeddings=tied))
    x, tokens = 4 * 4 * 16 * 32, 4 * 4 * 16
    assert moves.count((Phase.FORWARD, "all_reduce", x)) == moves.count((Phase.BACKWARD, "all_reduce", x)) == 2 * layers + 1
    rest = [m for m in moves if m[2] != x]
    assert rest == [(Phase.FORWARD, "all_reduce", tokens)] * 2 + [(Phase.FORWARD, "all_reduce", 4)]


@pytest.mark.law
def test_folding_changes_nothing_that_is_said():
    program = stretch(fold(gpt()), 6)
    for settings in ({}, {"modules": ("blocks.*",)}):
        assert said(program, **settings)[1] == said(unfold(program), **settings)[1]


def test_one_rank_says_nothing():
    after, moves = said(gpt(), Mesh.of({"tp": 1}))
    assert moves == []
    assert after.axes == {"tp": 1}


def test_key_heads_and_widths_are_cut():
    after, _ = said(llama(kv_heads=2))
    cut = {t.name: t.layouts["tp"] for t in after.parameters() if "tp" in t.layouts}
    assert cut["blocks.1.attention.k.weight"] == Split(0, 0)
    assert cut["blocks.1.attention.out.weight"] == Split(1, 0)
    assert cut["blocks.1.mlp.down.weight"] == Split(1, 0)
    assert cut["tokens.weight"] == cut["head.weight"] == Split(0, 0)
    assert "norm.weight" not in cut


@pytest.mark.law
def test_half_types_are_summed_in_their_own_width():
    """A norm that widens its input must not double what is moved; statistics of the loss are float32 all the same."""
    program = program_of(Workload("llama", Llama(**SMALL), batch=4, dtype="bfloat16"))
    kinds = {(c.dtype, c.nbytes) for c in TensorParallel().rewrite(program, TWO).collectives()}
    assert kinds == {("bfloat16", 2 * 4 * 16 * 32), ("float32", 4 * 4 * 16), ("bfloat16", 2)}


def test_one_key_head_leaves_its_query_heads_to_split():
    after, _ = said(llama(kv_heads=1))
    cut = {t.name for t in after.parameters() if "tp" in t.layouts}
    assert "blocks.1.attention.q.weight" in cut
    assert "blocks.1.attention.k.weight" not in cut


# ---------------------------------------------------------------- what stays whole
def test_one_head_stays_whole_and_says_so():
    after, _ = said(gpt(heads=1))
    assert "tensor_parallel: attention with one head stays whole" in after.notes
    assert not TensorParallel().check(gpt(heads=1), TWO)


def test_a_residual_network_stays_whole_and_says_so():
    program = program_of(Workload("resnet", ResNet(layers=1, stages=2, hidden=8, size=16), batch=4))
    after, moves = said(program)
    assert moves == []
    assert after.notes[-1] == "tensor_parallel: nothing is split over tp = 2: no dim heads, ffn or vocab can be"


def test_a_vocabulary_that_does_not_divide_stays_whole_and_says_so():
    after, moves = said(gpt(vocab=65))
    assert "tensor_parallel: the vocabulary stays whole: 65 classes do not divide over tp = 2" in after.notes
    assert len(moves) == 12
    assert not TensorParallel().check(gpt(vocab=65), TWO)


@pytest.mark.parametrize("word", ["smoothing", "metric"])
def test_a_loss_that_needs_whole_logits_leaves_the_vocabulary_whole(word):
    def loss(output, batch):
        targets = torch.zeros(output.shape[:2], dtype=torch.long).flatten()
        if word == "smoothing":
            return F.cross_entropy(output.flatten(0, 1), targets, label_smoothing=0.1)
        return F.cross_entropy(output.flatten(0, 1), targets) + 0 * output.argmax(-1).float().mean()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

        def forward(self, input):
            return self.head(self.tokens(input))

    batches = lambda step: {"input": torch.zeros(4, 5, dtype=torch.long)}
    program = capture(Subject(Model, batches, loss, lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), 4)
    after, _ = said(program)
    assert any("vocab of 'head.weight' stays whole" in note for note in after.notes)
    assert "tp" not in next(t for t in after.parameters() if t.name == "head.weight").layouts


def test_only_the_chosen_modules_are_split():
    after, moves = said(gpt(), modules=("blocks.0", "blocks.*.mlp"))
    cut = {t.name for t in after.parameters() if "tp" in t.layouts}
    assert "blocks.0.attention.qkv.weight" in cut
    assert "blocks.1.mlp.up.weight" in cut
    assert "blocks.1.attention.qkv.weight" not in cut
    assert "tokens.weight" not in cut
    assert len(moves) == 2 * 4


# ---------------------------------------------------------------- what is refused
def test_heads_that_do_not_divide_are_refused_with_both_numbers():
    (fault,) = TensorParallel().check(llama(heads=8, kv_heads=2, hidden=64), Mesh.of({"tp": 4}))
    assert fault.code == "P104"
    assert fault.what == "TensorParallel(axis='tp') cannot split dim 'heads'"
    assert fault.have == "heads = 8, kv_heads = 2, tp = 4"
    assert fault.law == "each rank owns whole heads of both kinds, so tp must divide 8 and 2"
    assert fault.cure == "tp = 1 or 2"


def test_every_dim_that_does_not_divide_is_told_at_once():
    faults = TensorParallel().check(gpt(heads=4, ffn=126), Mesh.of({"tp": 8}))
    assert [f.have for f in faults] == ["heads = 4, tp = 8", "ffn = 126, tp = 8"]
    assert faults[1].cure == "tp = 1, 2, 3, 6, 7, 9, 14, 18, 21, 42, 63 or 126"


class Checkpointed(nn.Module):
    """Its feed-forward part is computed again in the backward pass."""

    def __init__(self, *, whole=False):
        super().__init__()
        self.whole, self.up, self.down, self.norm = whole, nn.Linear(24, 48), nn.Linear(48, 24), nn.LayerNorm(24)

    def forward(self, input):
        x = self.norm(input)
        part = (lambda x: torch.tanh(x).sin()) if self.whole else (lambda x: self.down(F.gelu(self.up(x))))
        y = checkpoint(part, x, use_reentrant=False)
        return self.down(F.gelu(self.up(y))) if self.whole else y


def test_checkpointing_inside_a_split_region_is_refused_by_module():
    program = own(lambda: nn.Sequential(Checkpointed()))
    faults = TensorParallel().check(program, TWO)
    assert {f.code for f in faults} == {"P116"}
    assert "'0" in faults[0].what
    assert "checkpointing" in faults[0].have


def test_checkpointing_outside_of_it_is_not():
    assert not TensorParallel().check(own(lambda: nn.Sequential(Checkpointed(whole=True))), TWO)


def test_a_second_tensor_axis_is_refused():
    with pytest.raises(Refused, match="cannot split parameters that axis 'a' has split"):
        compose(gpt(), (TensorParallel(axis="a"), TensorParallel(axis="b")), Mesh.of({"a": 2, "b": 2}))
