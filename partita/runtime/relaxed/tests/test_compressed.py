"""Gradients that go smaller than they are: what they stand for, what is kept for later, and how much goes."""

import math

import pytest
import torch

from partita.program.compressing import LowRank, Quantized, TopK
from partita.runtime.relaxed.compressed import Largest, Rounded, Thin, dequantize, pack, quantize, unpack
from partita.runtime.relaxed.draw import source

PLAIN = lambda p: torch.optim.SGD(p, lr=1.0)
N, RANKS = 146, 4


def largest(ratio, momentum=0.0):
    return lambda net, parameters: Largest(net, "dp", parameters, {}, TopK(ratio, momentum))


def rounded(bits, bucket=16, *, both=False):
    return lambda net, parameters: Rounded(net, "dp", parameters, {}, Quantized(bits, bucket, both), 7)


def thin(rank):
    return lambda net, parameters: Thin(net, "dp", parameters, {}, LowRank(rank), 7)


def gradients(workers, steps):
    """Per step, the mean over ranks."""
    found = []
    for step in range(steps):
        total = torch.zeros(N, dtype=torch.float64)
        for rank in range(RANKS):
            g = torch.Generator().manual_seed(1000 * step + rank)
            parts = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in workers[0].module.parameters()]
            total += torch.cat([x.reshape(-1) for x in parts])
        found.append(total / RANKS)
    return found


@pytest.mark.law
@pytest.mark.parametrize("exchange", [largest(1.0), rounded(32), thin(1 << 40)], ids=["top_k", "quantized", "power_sgd"])
def test_in_the_exact_setting_it_is_the_mean_gradient(together, exchange):
    workers, start = together(exchange, 4, optimizer=PLAIN), together(exchange, 0)[0].flat
    assert torch.allclose(start - workers[0].flat, sum(gradients(workers, 4)), rtol=0, atol=1e-12)


@pytest.mark.law
@pytest.mark.parametrize("exchange", [largest(0.1, 0.5), rounded(2), rounded(4, both=True), thin(1)])
def test_all_ranks_step_alike(together, exchange):
    workers = together(exchange, 4)
    assert all(torch.equal(w.flat, workers[0].flat) for w in workers)


@pytest.mark.law
@pytest.mark.parametrize("exchange", [largest(0.1), thin(1)], ids=["top_k", "power_sgd"])
def test_what_went_and_what_is_left_add_up_to_all_gradients(together, exchange):
    workers, start = together(exchange, 6, optimizer=PLAIN), together(exchange, 0)[0].flat
    left = sum(w.exchange.buffers[0]["rest"] for w in workers) / RANKS
    assert float(left.abs().max()) > 0
    assert torch.allclose(start - workers[0].flat + left, sum(gradients(workers, 6)), rtol=0, atol=1e-11)


@pytest.mark.law
def test_momentum_is_that_of_sgd_where_everything_goes_once(together):
    """Masked at once, the velocity that went starts again from nothing."""
    workers, start = together(largest(1.0, 0.9), 5, optimizer=PLAIN), together(largest(1.0), 0)[0].flat
    assert torch.allclose(start - workers[0].flat, sum(gradients(workers, 5)), rtol=0, atol=1e-12)
    some = together(largest(0.2, 0.9), 5, optimizer=PLAIN)[0].exchange.buffers[0]
    sent = some["rest"] == 0
    assert torch.equal(sent, some["velocity"] == 0)
    assert int(sent.sum()) == round(0.2 * N)


# ---------------------------------------------------------------- few bits
@pytest.mark.law
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("size", [1, 3, 4, 17])
def test_levels_come_out_of_their_bytes_as_they_went_in(bits, size):
    levels = torch.randint(2**bits - 1, (3, size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = pack(levels, bits)
    assert packed.shape == (3, math.ceil(size * bits / 8))
    assert torch.equal(unpack(packed, bits)[:, :size], levels)


@pytest.mark.law
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_is_by_at_most_a_level_and_its_mean_is_the_element(bits):
    codec = Quantized(bits, 16, both=False)
    rows = torch.randn((2, 37), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[0, 32:] = 0  # a bucket without anything
    level = rows.abs().max() / (2 ** (bits - 1) - 1)
    draws, total = 4000, torch.zeros_like(rows)
    for k in range(draws):
        off = dequantize(*quantize(rows, codec, source(bits, k)), codec, 37) - rows
        assert float(off.abs().max()) <= float(level) + 1e-12
        total += off
    own = quantize(rows, codec, source(0))[1].repeat_interleave(16, 1)[:, :37] / (2 ** (bits - 1) - 1)  # each bucket's level
    up = (rows / own.where(own > 0, torch.ones_like(own))) % 1  # how often an element goes up
    spread = own * (up * (1 - up)).sqrt()
    t = 14.0  # Bernstein: a mean is further off than this with probability 2 exp(-t), 1e-4 for all elements together
    assert bool(((total / draws).abs() <= spread * math.sqrt(2 * t / draws) + own * 2 * t / (3 * draws) + 1e-12).all())
    assert float(total[0, 32:].abs().max()) == 0


@pytest.mark.law
def test_the_largest_of_a_bucket_is_sent_as_it_is():
    codec = Quantized(2, 4, both=False)
    rows = torch.tensor([[4.0, 0.0, 0.0, -4.0, 0.5, 0.5, 0.0, -0.5]])
    assert torch.equal(dequantize(*quantize(rows, codec, source(0)), codec, 8), rows)


# ---------------------------------------------------------------- low rank
@pytest.mark.law
def test_a_gradient_of_low_rank_is_found_and_nothing_is_left(together):
    """Rank 1 of every matrix, the same on all ranks: one step of power iteration finds it."""
    codec = LowRank(1)
    (worker,) = together(thin(1), 0, ranks=1)
    (lane,) = worker.exchange.lanes
    assert [codec.thin(p.shape) for p in lane.parameters.values()] == [(13, 7), None, (3, 13), None]
    parts = [torch.outer(torch.arange(1.0, p.shape[0] + 1), torch.ones(p.shape[1])) if p.dim() == 2 else torch.ones(p.shape)
             for p in lane.parameters.values()]  # fmt: skip
    flat = torch.cat([x.reshape(-1).double() for x in parts])

    class Alone:
        def all_reduce(self, t, axis, **_):
            pass

    worker.exchange.net = Alone()
    assert torch.allclose(worker.exchange.agreed(lane, flat), flat, rtol=0, atol=1e-12)
    assert float(worker.exchange.buffers[0]["rest"].abs().max()) < 1e-12


# ---------------------------------------------------------------- bytes
@pytest.mark.law
def test_bytes_are_those_of_the_formulas(together):
    width, k = math.ceil(N / RANKS), round(0.1 * N)
    few, scales = RANKS * math.ceil(width * 4 / 8), RANKS * math.ceil(width / 16)
    expected = {
        largest(0.1): [("all_gather", RANKS * k * 8), ("all_gather", RANKS * k * 4)],
        rounded(4): [("all_to_all", few), ("all_to_all", 8 * scales), ("all_gather", RANKS * width * 8)],
        rounded(4, both=True): [
            ("all_to_all", few),
            ("all_to_all", 8 * scales),
            ("all_gather", few),
            ("all_gather", 8 * scales),
        ],
        thin(1): [("all_reduce", 8 * (13 + 13 + 3 + 3)), ("all_reduce", 8 * (7 + 13))],
    }
    for exchange, calls in expected.items():
        for worker in together(exchange, 1):
            assert [e[:2] for e in worker.net.ledger] == calls
