"""Faults that were found in partita, each with its right value: the numbers of one device, or the refusal before step 1."""

import logging
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import Task, alike, plan_of, refused, run, same, split, truth
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import partita as pt
from partita.errors import RunFailed

pytestmark = pytest.mark.gloo


def module(forward, dtype=torch.float64, **parts):
    """A seeded factory of a module with these parts; without any it has two linear layers, a: 6 to 12 and b: 12 to 6."""
    parts = parts or {"a": lambda: nn.Linear(6, 12), "b": lambda: nn.Linear(12, 6)}

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part())

    Small.forward = forward

    def make():
        torch.manual_seed(5)
        return Small().to(dtype)

    return make


def waves(step, *shape):
    shape = shape or (8, 6)
    return {"x": torch.sin(torch.arange(torch.Size(shape).numel()).reshape(shape) * (0.37 + step)).double()}


def square(out, batch):
    return out.square().mean()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def plain(self, x):
    return self.b(self.a(x).tanh())


PLAIN = Task(module(plain), waves, square)


# ---------------------------------------------------------------- counts: what a loss divides by
def tokens(samples, counts):
    """x: 6 tokens a sample of width 6, y: their classes, of which `counts` count per sample; counts may depend on the step."""

    def data(step):
        y = (torch.arange(samples * 6).reshape(samples, 6) * 5 + step) % 6
        for row, n in enumerate(counts(step) if callable(counts) else counts):
            y[row, n:] = -100
        return {**waves(step, samples, 6, 6), "y": y}

    return data


def each(out, batch):
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), reduction="none")


def counted(batch):
    return (batch["y"] != -100).flatten()


def entropy(out, batch):
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten())


LATE = (6, 6, 6, 6, 6, 1, 2, 1)  # all count in the first samples, where a rule is looked for
SOME = (5, 3, 0, 0)
LOSSES = {
    "selected": lambda o, b: each(o, b)[counted(b)].mean(),
    "selected squares": lambda o, b: F.mse_loss(o.flatten(0, 1)[counted(b)], torch.ones_like(o.flatten(0, 1)[counted(b)])),
    "kept from zero": lambda o, b: (each(o, b) * counted(b)).sum() / counted(b).sum().clamp(min=1),
    "kept from zero by max": lambda o, b: (each(o, b) * counted(b)).sum() / max(counted(b).sum(), 1),
    "a little more than the count": lambda o, b: (each(o, b) * counted(b)).sum() / (counted(b).double().sum() + 0.5),
    "stacked": lambda o, b: torch.stack([entropy(o, b), entropy(2 * o, b)]).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_counts_that_differ_only_in_later_samples(name):
    task = PLAIN.but(data=tokens(8, LATE), loss=LOSSES[name])
    for layout in ("dp=2", "accumulate=2"):
        same(task, layout)


@pytest.mark.parametrize("name", ["kept from zero", "kept from zero by max", "a little more than the count"])
def test_a_part_without_targets_adds_nothing_to_a_guarded_count(name):
    for layout in ("dp=4", "accumulate=4"):
        same(PLAIN.but(data=tokens(4, SOME), loss=LOSSES[name]), layout)


def test_two_counts_that_part_in_later_samples_are_refused():
    task = PLAIN.but(data=tokens(8, LATE), loss=lambda o, b: entropy(o, b) + o.square().mean())
    for layout in ("dp=2", "accumulate=2"):
        refused(task, layout, "P114", "proportion", "(sum, weight)")


def test_two_counts_that_part_in_a_later_step_end_the_run():
    task = PLAIN.but(data=tokens(4, lambda step: (6,) * 4 if step == 0 else (6, 1, 6, 6)))
    with pytest.raises(RunFailed, match=r"in step 2 of this run:\n.*proportion"):
        run(task.but(loss=lambda o, b: entropy(o, b) + o.square().mean()), "dp=2")


def test_two_counts_in_proportion_may_have_changing_factors():
    task = PLAIN.but(data=lambda step: {**tokens(4, ())(step), "beta": 0.1 * (step + 1)})
    same(task.but(loss=lambda o, b: entropy(o, b) + b["beta"] * o.square().mean()), "dp=2")


def test_a_sum_over_a_count_that_the_batch_gives():
    task = PLAIN.but(data=lambda step: {**waves(step), "n": 8 + step}, loss=lambda o, b: o.square().sum() / b["n"])
    for layout in ("dp=2", "accumulate=2"):
        same(task, layout)


def test_no_target_among_the_first_samples():
    first = tokens(8, (0, 0, 0, 0, 5, 3, 6, 2))
    same(PLAIN.but(data=first, loss=LOSSES["kept from zero"]), "dp=2")
    refused(PLAIN.but(data=first, loss=lambda o, b: entropy(o, b) + o.square().mean()), "dp=2", "P114")


def test_no_target_at_all_leaves_zero_gradients():
    task = PLAIN.but(data=tokens(4, (0, 0, 0, 0)), loss=entropy)
    for layout in ("dp=2", "accumulate=2", "tp=2"):
        same(task, layout)


def test_a_step_without_targets_talks_along_the_tensor_axis_all_the_same():
    make = module(lambda s, x: s.b(F.gelu(s.a(x)) + 1), a=lambda: nn.Linear(6, 12), b=lambda: nn.Linear(12, 6))
    proof = pt.prove(plan_of("tp=2 accumulate=2"), model=make, batches=tokens(4, SOME), loss=entropy, optimizer=sgd, steps=2)
    assert proof.proved, proof.json()


def test_half_precision_losses_do_not_overflow_with_their_count():
    """The mean of squares is about 20: times 8192 samples it is no number in float16."""

    def many(step):
        return {"x": torch.sin(torch.arange(8192 * 6).reshape(-1, 6) * 0.37 + step).half()}

    task = Task(module(lambda s, x: 8 * s.a(x), torch.float16, a=lambda: nn.Linear(6, 6)), many, square, sgd, steps=1)
    for layout in ("dp=2", "accumulate=2"):
        same(task, layout)


# ---------------------------------------------------------------- the form of a loss
@pytest.mark.parametrize("layout", ["one", "dp=2", "accumulate=2"])
def test_one_number_in_a_dim_is_a_number(layout):
    same(PLAIN.but(loss=lambda o, b: o.square().mean().reshape(1)), layout)
    same(PLAIN.but(loss=lambda o, b: (o.square().sum().reshape(1), len(o))), layout)
    alike(
        split(PLAIN.but(loss=lambda o, b: [o.square().sum(), len(o)]), layout),
        truth(PLAIN.but(loss=lambda o, b: (o.square().sum(), len(o)))),
    )


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda o, b: (o.sum(), o.sum(), 3), "tuple"),
        (lambda o, b: None, "NoneType"),
        (lambda o, b: {"loss": o.sum()}, "dict"),
        (lambda o, b: o.sum().detach(), "no parameter"),
        (lambda o, b: o.sum() * 1j, "complex128"),
    ],
)
def test_a_loss_of_no_form_is_refused_on_one_rank_too(loss, said):
    refused(PLAIN.but(loss=loss), "one", "P114", said)


# ---------------------------------------------------------------- samples that only seem to mix
def chunked(self, x):
    return torch.cat([plain(self, part) for part in x.chunk(2)])


def selected(self, x):
    y = torch.zeros_like(x)
    positive = x[:, 0] > 0
    y[positive], y[~positive] = plain(self, x[positive]), -plain(self, x[~positive])
    return y


SEEM = {
    "joined after a loop": module(lambda s, x: torch.cat([plain(s, r) for r in x.split(1)])),
    "cut in two": module(chunked),
    "selected by a mask": module(selected),
    "a learned slope": module(
        lambda s, x: s.b(s.p(s.a(x))), a=lambda: nn.Linear(6, 12), p=nn.PReLU, b=lambda: nn.Linear(12, 6)
    ),
    "orthogonal weights": module(lambda s, x: s.a(x), a=lambda: parametrizations.orthogonal(nn.Linear(6, 6))),
    "spectral norm": module(lambda s, x: s.a(x), a=lambda: parametrizations.spectral_norm(nn.Linear(6, 8))),
    "vmap": module(lambda s, x: torch.vmap(lambda r: F.linear(r, s.a.weight).tanh())(x), a=lambda: nn.Linear(6, 6)),
}


@pytest.mark.parametrize("kind", SEEM)
def test_samples_that_are_lost_from_sight_do_not_mix(kind):
    same(Task(SEEM[kind], waves, square), "dp=2")


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, b: F.binary_cross_entropy_with_logits(o, (b["x"] > 0).double(), pos_weight=3 * torch.ones(6).double()),
        lambda o, b: F.huber_loss(o, b["x"]),
        lambda o, b: F.triplet_margin_loss(o, b["x"], -b["x"]),
    ],
    ids=["bce", "huber", "triplet"],
)
def test_losses_whose_ops_have_no_rule(loss):
    same(PLAIN.but(loss=loss), "dp=2")


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, b: F.gaussian_nll_loss(o[:, :3], b["x"][:, :3], o[:, 3:].exp()),
        lambda o, b: -torch.distributions.Normal(o[:, :3], o[:, 3:].exp()).log_prob(b["x"][:, :3]).mean(),
    ],
    ids=["gaussian", "a distribution"],
)
def test_arguments_that_torch_checks_do_not_mix_samples(loss):
    for layout in ("dp=2", "accumulate=2"):
        same(PLAIN.but(loss=loss), layout)


def by_mask(self, x):
    best, y = self.gate(x).argmax(-1), torch.zeros_like(x)
    for k, expert in enumerate(self.experts):
        if (best == k).any():
            y[best == k] = expert(x[best == k])
    return y


def by_counted_mask(self, x):
    best, y = self.gate(x).argmax(-1), torch.zeros_like(x)
    for k, expert in enumerate(self.experts):
        if (best == k).sum() == 0:
            continue
        y[best == k] = expert(x[best == k])
    return y


def by_number(self, x):
    (weight, best), y = self.gate(x).softmax(-1).max(-1), torch.zeros_like(x)
    for k, expert in enumerate(self.experts):
        own = (best == k).nonzero().squeeze(1)
        if own.numel():
            y = y.index_add(0, own, weight[own, None] * expert(x[own]))
    return y


def by_place(self, x):
    (weight, best), y = self.gate(x).softmax(-1).topk(1, -1), torch.zeros_like(x)
    for k, expert in enumerate(self.experts):
        own, place = torch.where(best == k)
        y[own] += weight[own, place, None] * expert(x[own])
    return y


def by_order(self, x):
    weight, best = self.gate(x).softmax(-1).max(-1)
    order, counts = best.argsort(stable=True), torch.bincount(best, minlength=2).tolist()
    made = torch.cat([expert(part) for expert, part in zip(self.experts, x[order].split(counts), strict=True)])
    return torch.empty_like(made).index_copy(0, order, made) * weight[:, None]


@pytest.mark.parametrize("route", [by_mask, by_counted_mask, by_number, by_place, by_order])
def test_samples_that_are_routed_to_experts_do_not_mix(route):
    experts = lambda: nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    make = module(route, gate=lambda: nn.Linear(6, 2), experts=experts)
    for layout in ("dp=2", "accumulate=2"):
        same(PLAIN.but(make=make), layout)


@pytest.mark.parametrize("pick", [lambda n: torch.arange(n).roll(1), lambda n: torch.zeros(1, dtype=torch.long)])
def test_samples_that_are_picked_from_all_of_them_are_refused(pick):
    make = module(lambda s, x: plain(s, 0.7 * x + 0.3 * x[pick(len(x))]))
    for layout in ("dp=2", "accumulate=2"):
        refused(PLAIN.but(make=make), layout, "P114")


def test_batch_norms_in_evaluation_and_instance_norms_mix_nothing():
    def frozen():
        torch.manual_seed(1)
        made = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        made[1].eval()
        return made

    data = lambda step: {"input": waves(step)["x"]}
    for layout in ("dp=2", "accumulate=2"):
        same(Task(frozen, data, square), layout)
    image = module(lambda s, x: s.n(s.c(x)).square().mean((2, 3)), c=lambda: nn.Conv2d(1, 4, 3), n=lambda: nn.InstanceNorm2d(4))
    same(Task(image, lambda step: waves(step, 8, 1, 7, 7), square), "dp=2")


def test_synchronised_batch_norm_is_batch_norm_on_ranks():
    def make():
        torch.manual_seed(1)
        return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).double()

    for layout in ("one", "dp=2"):
        same(Task(make, lambda step: {"input": waves(step)["x"]}, square, sgd), layout)


def test_python_code_that_looks_at_all_samples_is_refused():
    """The first samples look alike, so that no numbers tell."""

    def forward(self, x):
        return plain(self, x) + self.a(x)[:, :6] if (x > 0).any() else plain(self, x)

    data = lambda step: {"x": torch.cat([waves(step)["x"][:4].abs(), -waves(step)["x"][4:].abs()])}
    for layout in ("dp=2", "accumulate=2"):
        refused(Task(module(forward), data, square), layout, "P116", "mixes samples")


# ---------------------------------------------------------------- what a module keeps from pass to pass
class Keeping(nn.Module):
    """Counts its forward passes in a plain attribute, which nobody can keep alike on microbatches."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(6, 12), nn.Linear(12, 6), 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x).relu() * self.calls)


def kept(kind):
    def make():
        torch.manual_seed(2)
        return kind().double()

    return Task(make, waves, square)


def test_a_count_in_an_attribute_runs_once_a_step():
    for layout in ("dp=2", "tp=2", "dp=2 tp=2"):
        same(kept(Keeping), layout)
    refused(kept(Keeping), "accumulate=2", "P115", "'calls'", "accumulate = 1")


def test_a_count_that_leads_to_other_parameters_is_refused():
    class Turning(Keeping):
        def forward(self, x):
            self.calls += 1
            return self.b(self.a(x).relu()) if self.calls % 2 else self.a(x)[:, :6]

    refused(kept(Turning), "dp=2", "P115", "in some steps only", "'calls'")
    refused(kept(Turning), "tp=2", "P116", "another path")


def test_a_hidden_state_is_refused():
    class Remembering(Keeping):
        state = None

        def forward(self, x):
            y = self.b(self.a(x).relu())
            y = y if self.state is None else y + self.state.mean(0)
            self.state = y.detach()
            return y

    same(kept(Remembering), "one")
    refused(kept(Remembering), "dp=2", "P115", "one forward pass to the next")
    refused(kept(Remembering), "tp=2", "P116", "another path")


def test_buffers_that_steps_change_keep_their_names_and_values():
    class Cooling(Keeping):
        def __init__(self):
            super().__init__()
            self.register_buffer("heat", torch.ones(()))
            self.register_buffer("passes", torch.zeros((), dtype=torch.long), persistent=False)

        def forward(self, x):
            self.heat.mul_(0.9)
            self.passes = self.passes + 1  # another tensor under the name
            return self.b(self.a(x).relu()) * self.heat * self.passes

    for layout in ("dp=2", "accumulate=2", "tp=2"):
        same(kept(Cooling), layout)


def test_a_parameter_that_forward_writes_to_is_refused():
    make = module(lambda s, x: s.e(x), e=lambda: nn.Embedding(12, 6, max_norm=1.0))
    task = Task(make, lambda step: {"x": torch.arange(16).reshape(8, 2) % 12}, square, sgd)
    same(task, "one")
    for layout in ("dp=2", "accumulate=2"):
        refused(task, layout, "P115", "'e.weight' is written to")


def test_a_module_that_does_something_else_in_evaluation():
    forward = lambda s, x: (s.b(s.a(x)), s.a(x)) if s.training else s.a(x)
    for layout in ("dp=2", "accumulate=2"):
        same(Task(module(forward), waves, lambda o, b: o[0].square().mean() + o[1].square().mean()), layout)


def test_draws_of_python_and_numpy_are_the_runs_own():
    for draw in (random.random, np.random.rand):
        task = Task(module(lambda s, x, draw=draw: plain(s, x) * (1 + draw())), waves, square)
        alike(split(task, "dp=2"), split(task, "one"))
        refused(task, "accumulate=2", "P115", "random numbers")


def test_what_is_counted_outside_of_the_module_is_refused_whatever_the_layout():
    """Capture and looks have counted on before step 1: even one rank would start from another number."""
    calls = []

    def annealed(o, b):
        calls.append(1)
        return o.square().mean() * min(1.0, len(calls) / 100)

    def forward(self, x):
        calls.append(1)
        return plain(self, x) * len(calls)

    for layout in ("one", "dp=2", "tp=2", "accumulate=2"):
        refused(PLAIN.but(loss=annealed), layout, "P115", "another one each time", "batches(step) knows the step")
        refused(PLAIN.but(make=module(forward)), layout, "P115", "another one each time")


# ---------------------------------------------------------------- paths
def test_a_branch_that_the_first_batch_does_not_show():
    def forward(self, x):
        y = self.a(x).tanh()
        return self.b(y) if float(x.sum()) > 0 else self.c(y)

    make = module(forward, a=lambda: nn.Linear(6, 12), b=lambda: nn.Linear(12, 6), c=lambda: nn.Linear(12, 6))
    task = Task(
        make, lambda step: {"x": waves(0)["x"].abs() * (-1) ** step}, square, lambda m: torch.optim.AdamW(m.parameters(), 0.1)
    )
    for layout in ("dp=2", "dp=2 accumulate=2"):
        same(task, layout)
    refused(task, "tp=2", "P116", "'b.weight'", "another path")


def test_a_path_that_no_look_shows_ends_the_run_before_a_wrong_number():
    def forward(self, x):
        y = self.a(x).tanh()
        return self.b(y) if float(x[0, 0]) < 3 else self.c(y)

    make = module(forward, a=lambda: nn.Linear(6, 12), b=lambda: nn.Linear(12, 6), c=lambda: nn.Linear(12, 6))
    with pytest.raises(RunFailed, match=r"another parameter than 'b\.weight'"):
        run(Task(make, lambda step: {"x": waves(step)["x"] + 9 * (step == 1)}, square), "tp=2")


# ---------------------------------------------------------------- gradients and optimizers
@pytest.mark.parametrize("layout", ["one", "dp=2", "accumulate=2", "dp=2 tp=2"])
def test_gradients_that_no_optimizer_clears_add_up(layout):
    same(PLAIN.but(opt=lambda m: torch.optim.AdamW(m.b.parameters(), lr=0.1)), layout)


class Scaled(torch.optim.SGD):
    """Divides each gradient by its norm, read as a number."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad /= float(p.grad.norm())
        return super().step(closure)


@pytest.mark.parametrize("kind", [Scaled, torch.optim.Adafactor], ids=["of one's own", "adafactor"])
def test_an_optimizer_that_looks_across_a_split_parameter_is_refused(kind):
    task = PLAIN.but(opt=lambda m: kind(m.parameters(), lr=0.1))
    same(task, "dp=2")
    refused(task, "tp=2", "P116", kind.__name__, "SGD, Adam, AdamW")


def test_an_optimizer_of_ones_own_that_does_not_is_welcome():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"]):
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.sub_(p.grad.sign() * 0.1 / self.state[p]["count"])

    for layout in ("dp=2", "tp=2"):
        same(PLAIN.but(opt=lambda m: Own(m.parameters())), layout)


def test_a_parameter_that_is_not_the_modules_is_refused():
    stranger = nn.Parameter(torch.ones(6).double())
    task = PLAIN.but(
        loss=lambda o, b: (o - stranger).square().mean(), opt=lambda m: torch.optim.SGD([*m.parameters(), stranger], lr=0.1)
    )
    for layout in ("dp=2", "tp=2", "accumulate=2"):
        refused(task, layout, "P115", "none of the module's", "shape (6,)")


def test_hooks_on_gradients_are_refused_where_gradients_are_in_parts():
    def make():
        made = module(plain)()
        made.a.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return made

    same(PLAIN.but(make=make), "one")
    for layout in ("dp=2", "tp=2", "accumulate=2"):
        refused(PLAIN.but(make=make), layout, "P115", "'a.weight' has a hook")


def test_sparse_and_complex_gradients_have_a_norm():
    words = lambda step: {"x": (torch.arange(16).reshape(8, 2) + step) % 12}
    sparse = Task(module(lambda s, x: s.e(x), e=lambda: nn.Embedding(12, 6, sparse=True)), words, square, sgd)
    same(sparse, "one")
    refused(sparse, "dp=2", "P115", "'e.weight' has sparse gradients", "sparse=False")
    turns = module(
        lambda s, x: (torch.fft.rfft(x) * s.z).abs(), dtype=None, z=lambda: nn.Parameter(torch.ones(4, dtype=torch.cfloat))
    )
    for layout in ("dp=2", "tp=2"):
        same(Task(turns, waves, square, sgd), layout)


@pytest.mark.parametrize(("made", "said"), [(lambda m: [sgd(m)], "list"), (lambda m: None, "NoneType")])
def test_what_is_no_optimizer_is_refused(made, said):
    refused(PLAIN.but(opt=made), "one", "P102", f"returned a {said}")


def test_an_optimizer_in_the_place_of_its_factory_is_refused():
    refused(PLAIN.but(opt=sgd(module(plain)())), "one", "P102", "optimizer=")


# ---------------------------------------------------------------- batches
def test_batches_that_are_known_to_end_are_refused_before_they_do():
    refused(PLAIN.but(data=[waves(0), waves(1)]), "dp=2", "P110", "end after 2 steps", "steps = 2")
    refused(PLAIN.but(data=[waves(0), waves(1, 4, 6), waves(2)]), "dp=2", "P112", "step 2 has 4 samples")
    rows = [{"x": r} for r in waves(0, 20, 6)["x"]]
    refused(PLAIN.but(data=DataLoader(rows, batch_size=8)), "dp=2", "P112", "step 3 has 4 samples", "drop_last=True")
    refused(PLAIN.but(data=DataLoader(rows, batch_size=8, drop_last=True)), "one", "P110", "end after 2 steps")
    refused(PLAIN.but(data=DataLoader(rows, batch_size=4, num_workers=2)), "one", "P115", "num_workers = 2")


def test_a_loader_that_shuffles_is_read_once():
    def loader():
        rows = [{"x": r} for r in waves(0, 24, 6)["x"]]
        return DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))

    whole = truth(PLAIN.but(data=loader()))
    for layout in ("one", "dp=2"):
        alike(split(PLAIN.but(data=loader()), layout), whole)


def test_a_proof_reads_a_shuffled_loader_once():
    rows = [{"x": r} for r in waves(0, 24, 6)["x"]]
    for layout in ("dp=2", "tp=2"):
        loader = DataLoader(rows, batch_size=8, shuffle=True)
        assert pt.prove(plan_of(layout), model=PLAIN.make, batches=loader, loss=square, optimizer=sgd, steps=3).proved


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "accumulate=2", "dp=2 tp=2"])
def test_a_proof_of_batches_whose_length_changes(layout):
    data = lambda step: waves(step, 4, 3 + step, 6)
    same(PLAIN.but(data=data), layout)
    proof = pt.prove(plan_of(layout), model=PLAIN.make, batches=data, loss=square, optimizer=sgd, steps=3)
    assert proof.proved, proof.json()


def test_a_proof_says_what_is_no_number_on_both_sides():
    data = lambda step: {"x": waves(step)["x"] * (float("nan") if step == 1 else 1)}
    proof = pt.prove(plan_of("dp=2"), model=PLAIN.make, batches=data, loss=square, optimizer=sgd, steps=3)
    assert proof.proved, proof.json()
    assert any("loss of step 2" in note and "no number" in note for note in proof.json()["notes"])


def test_a_name_that_the_batch_has_not_is_refused():
    refused(PLAIN, "one", "P119", "no 'z'", "'x'", forward=("z",))


def test_a_module_that_insists_on_its_batch_says_how_many_samples_it_was_given():
    task = PLAIN.but(make=module(lambda s, x: plain(s, x.view(8, 6))))
    refused(task, "accumulate=2", "P115", "over 4 samples")
    refused(task, "dp=2")


# ---------------------------------------------------------------- modules
def test_lazy_and_scripted_modules_are_refused_by_name():
    refused(
        PLAIN.but(make=lambda: nn.Sequential(nn.LazyLinear(3)), data=lambda step: {"input": waves(step)["x"]}),
        "one",
        "P115",
        "'0.weight'",
    )
    refused(PLAIN.but(make=lambda: None), "one", "P102", "returned a NoneType")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(6, 6).double())
    refused(PLAIN.but(make=lambda: scripted, data=lambda step: {"input": waves(step)["x"]}), "dp=2", "P115", "scripted")


def test_old_weight_norms_can_be_looked_at():
    def make():
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.nn.utils.weight_norm(nn.Linear(6, 6).double())

    for layout in ("dp=2", "accumulate=2"):
        same(PLAIN.but(make=make, data=lambda step: {"input": waves(step)["x"]}), layout)


def test_reentrant_checkpoints_can_be_looked_at():
    make = module(lambda s, x: s.b(checkpoint(lambda y: s.a(y).tanh(), x.requires_grad_(), use_reentrant=True)))
    for layout in ("dp=2", "accumulate=2"):
        same(PLAIN.but(make=make), layout)


def test_a_refusal_is_not_logged_as_well(caplog):
    with caplog.at_level(logging.DEBUG):
        refused(PLAIN.but(make=module(lambda s, x: s.a(x[:, :3]))), "one", "P115", "'a'")
    assert not caplog.records


# ---------------------------------------------------------------- a loop of one's own
def test_a_session_adds_up_gradients_that_are_not_cleared():
    def steps(model, optimizer, loss_of, clip):
        for k in range(4):
            loss_of(k)
            if k % 2:
                clip()
                optimizer.step()
                optimizer.zero_grad()
        return {n: t.tolist() for n, t in model.state_dict().items()}

    def story(session):
        model, optimizer = session.wrap(PLAIN.make(), sgd)
        parts = iter(session.shard([waves(k) for k in range(4)]))
        steps(model, optimizer, lambda k: session.step(model, next(parts), square), lambda: session.clip(model, 0.5))
        return {n: t.tolist() for n, t in session.state_dict().items()}

    model = PLAIN.make()
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    whole = steps(model, sgd(model), lambda k: square(model(**waves(k)), None).backward(), clip)
    whole = {n: torch.tensor(v) for n, v in whole.items()}
    for layout in ("one", "tp=2", "dp=2"):
        got = pt.spawn(plan_of(layout), story)[0]
        assert all(torch.allclose(torch.tensor(got[n]), t, rtol=1e-6) for n, t in whole.items()), layout
