"""Workers that meet, and averages that arrive late: the laws of their models, in float64."""

import pytest
import torch

from partita.runtime.relaxed.averaging import Averaging, Late, Meeting, Outer

PLAIN = lambda p: torch.optim.SGD(p, lr=0.05)


def meeting(period, rate=1.0, momentum=0.0, *, nesterov=True):
    outer = Outer(period, rate, momentum, nesterov)
    return lambda net, parameters: Meeting(net, "dp", parameters, {}, outer)


def late(every, delay, keep=0.0):
    return lambda net, parameters: Averaging(net, "dp", parameters, {}, Late(every, delay, keep))


def flats(together, exchange, steps, optimizer=PLAIN):
    """flats[step][rank], and the start as step -1."""
    kept = {-1: {0: together(exchange, 0)[0].flat.clone()}}

    def each(worker, step):
        kept.setdefault(step, {})[worker.net.rank] = worker.flat.clone()

    together(exchange, steps, optimizer=optimizer, each=each)
    return kept


def gradient(worker_shapes, step, rank):
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.cat([torch.randn(s, generator=g, dtype=torch.float64).reshape(-1) for s in worker_shapes])


@pytest.fixture
def shapes(together):
    return [p.shape for p in together(meeting(1), 0)[0].module.parameters()]


def mean(kept):
    return sum(kept.values()) / len(kept)


@pytest.mark.law
@pytest.mark.parametrize("period", [1, 3])
def test_workers_agree_when_they_meet_and_only_then(together, period):
    for step, found in flats(together, meeting(period, 0.7, 0.9), 7).items():
        if step >= 0:
            assert all(torch.equal(found[0], f) for f in found.values()) is ((step + 1) % period == 0)


@pytest.mark.law
@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_step_is_the_one_of_torch_on_the_mean_change(together, nesterov):
    """torch's SGD, handed base - mean as gradient, makes the same model at every meeting."""
    kept = flats(together, meeting(2, 0.7, 0.9, nesterov=nesterov), 8)
    model = kept[-1][0].clone()
    outer = torch.optim.SGD([model], lr=0.7, momentum=0.9, nesterov=nesterov)
    local = flats(together, meeting(1000), 8)  # never meets: what two steps change by plain SGD does not depend on the model
    for step in (1, 3, 5, 7):
        model.grad = -(mean(local[step]) - mean({0: local[-1][0]} if step == 1 else local[step - 2]))
        outer.step()
        assert torch.allclose(kept[step][0], model, rtol=0, atol=1e-12)


@pytest.mark.law
@pytest.mark.parametrize(("every", "delay"), [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (3, 3)])
def test_the_mean_of_the_workers_moves_by_the_mean_gradient_whatever_is_late(together, shapes, every, delay):
    kept = flats(together, late(every, delay), 8)
    wanted = kept[-1][0].clone()
    for step in range(8):
        wanted -= 0.05 * sum(gradient(shapes, step, rank) for rank in range(4)) / 4
        assert torch.allclose(mean(kept[step]), wanted, rtol=0, atol=1e-12)


@pytest.mark.law
def test_an_average_is_of_the_models_before_it_was_begun(together, shapes):
    """every = 3, delay = 2, keep = 0.25: begun with steps 0, 3, 6, taken in after steps 1, 4, 7."""
    kept = flats(together, late(3, 2, 0.25), 8)
    for rank in range(4):
        own = kept[2][rank] - 0.05 * (gradient(shapes, 3, rank) + gradient(shapes, 4, rank))
        wanted = 0.25 * own + 0.75 * (mean(kept[2]) + own - kept[2][rank])
        assert torch.allclose(kept[4][rank], wanted, rtol=0, atol=1e-12)


@pytest.mark.law
def test_nothing_goes_but_one_sum_a_period(together):
    for exchange, calls in ((meeting(4), 2), (late(4, 3), 2), (late(1, 1), 8), (late(4, 0), 2)):
        for worker in together(exchange, 8):
            assert [e[:2] for e in worker.net.ledger] == [("all_reduce", 8 * 146)] * calls
