"""Laws of the random streams: the layout does not show in a mask."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from partita.runtime.random import Part, Row, Stream, key

SHAPE = (6, 3, 4)


def drawn(stream, step, first, samples, call, shape=SHAPE, calls=2):
    with stream.step(step, first, samples):
        return [call(torch.ones(samples, *shape[1:])) for _ in range(calls)]


DROPS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature": lambda x: F.dropout1d(x, 0.5),
    "feature_alpha": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    "module": nn.Dropout(0.5),
    "in_place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "attention": lambda x: F.scaled_dot_product_attention(
        x, x, torch.arange(x.numel()).reshape(x.shape).float(), dropout_p=0.5
    ),
}


@pytest.mark.law
@pytest.mark.parametrize("name", [n for n in DROPS if n != "attention"])
def test_masks_do_not_depend_on_how_the_batch_is_cut(name):
    whole = drawn(Stream(0), 3, 0, 6, DROPS[name])
    for cut in (1, 2, 3):
        parts = [drawn(Stream(0), 3, first, cut, DROPS[name]) for first in range(0, 6, cut)]
        for n, all_ in enumerate(whole):
            assert torch.equal(all_, torch.cat([p[n] for p in parts]))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0], drawn(Stream(0), 4, 0, 6, DROPS[name])[0])
    assert not torch.equal(whole[0], drawn(Stream(1), 3, 0, 6, DROPS[name])[0])


@pytest.mark.law
@pytest.mark.parametrize(("dim", "spans"), [(1, ((0, 2),)), (1, ((2, 2),)), (2, ((0, 1), (4, 1)))])
def test_a_shard_keeps_its_part_of_the_whole_mask(dim, spans):
    whole = torch.ones(4, 4, 8)
    stream = Stream(7)
    with stream.step(0, 0, 4):
        expected = F.dropout(whole, 0.5)
    part = Part(dim, whole.shape[dim], spans)
    with stream.step(0, 0, 4), stream.split(part):
        mine = F.dropout(part.of(whole, dim), 0.5)
    assert torch.equal(mine, part.of(expected, dim))


def test_samples_are_found_where_the_capture_saw_them():
    x = torch.ones(5, 6, 2)  # sequence first
    stream = Stream(0, [Row(1), Row(0, 5), Row(None)])
    with stream.step(0, 0, 6):
        first, flat, none = F.dropout(x), F.dropout(x.reshape(30, 2)), F.dropout(x)
    halves = []
    for start in (0, 3):
        with stream.step(0, start, 3):
            part = x[:, start : start + 3]
            halves.append((F.dropout(part), F.dropout(part.reshape(15, 2)).reshape(5, 3, 2), F.dropout(x)))
    assert torch.equal(first, torch.cat([h[0] for h in halves], 1))
    assert torch.equal(flat.reshape(5, 6, 2), torch.cat([h[1] for h in halves], 1))
    assert torch.equal(none, halves[0][2])
    assert torch.equal(none, halves[1][2])


@pytest.mark.law
def test_masks_do_not_depend_on_the_dtype():
    masks = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        with Stream(1).step(0, 0, 4):
            masks.append(F.dropout(torch.ones(4, 9, dtype=dtype), 0.3) != 0)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_nothing_is_drawn_outside_training():
    x = torch.randn(2, 8)
    with Stream(0).step(0, 0, 2) as stream:
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert stream._calls == 0


@pytest.mark.law
def test_attention_with_dropout_is_attention():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(5, 5) > 0.3
    mask[:, 0] = True
    for settings in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.float()}, {"scale": 0.3}):
        plain = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **settings)
        with Stream(0).step(0, 0, 2):
            dropped = [F.scaled_dot_product_attention(q, k, v, dropout_p=p, enable_gqa=True, **settings) for p in (1e-9, 0.5)]
        torch.testing.assert_close(dropped[0], plain)
        assert not torch.allclose(dropped[1], plain)


def test_multi_head_attention_draws_inside():
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), torch.randn(4, 3, 8)
    for weights in (True, False):
        with Stream(0).step(0, 0, 4):
            whole = layer(x, x, x, need_weights=weights)[0]
        parts = []
        for start in (0, 2):
            with Stream(0).step(0, start, 2):
                part = x[start : start + 2]
                parts.append(layer(part, part, part, need_weights=weights)[0])
        torch.testing.assert_close(whole, torch.cat(parts))


def test_alpha_dropout_keeps_mean_and_variance():
    torch.manual_seed(0)
    x = torch.randn(64, 4096)
    with Stream(0).step(0, 0, 64):
        y = F.alpha_dropout(x, 0.2, training=True)
    assert abs(y.mean()) < 0.02
    assert abs(y.var() - 1) < 0.02


def test_keys_are_well_mixed():
    assert len({key(0, s, c, n) for s in range(8) for c in range(8) for n in range(-1, 63)}) == 64 * 64


NOISE = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "rand": lambda x: torch.rand(x.shape[0], *x.shape[1:]),
    "randn": lambda x: torch.randn(tuple(x.shape), dtype=x.dtype),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "bernoulli_": lambda x: x.new_empty(x.shape[0], 1, 1).bernoulli_(0.5),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
}


@pytest.mark.law
@pytest.mark.parametrize("name", NOISE)
def test_noise_does_not_depend_on_how_the_batch_is_cut(name):
    whole = drawn(Stream(0), 3, 0, 6, NOISE[name])
    parts = [drawn(Stream(0), 3, first, 2, NOISE[name]) for first in range(0, 6, 2)]
    assert all(torch.equal(all_, torch.cat([p[n] for p in parts])) for n, all_ in enumerate(whole))
    assert len(whole[0].unique()) > 1


def test_noise_is_what_it_says():
    with Stream(0).step(0, 0, 4):
        x = torch.empty(4, 20000)
        for value, mean, std in ((x.normal_(1, 2), 1, 2), (torch.randn(4, 20000), 0, 1), (torch.rand(4, 20000), 0.5, 12**-0.5)):
            assert abs(value.mean() - mean) < 0.03
            assert abs(value.std() - std) < 0.03
        assert abs(x.bernoulli_(0.3).mean() - 0.3) < 0.01


def test_a_generator_of_the_users_own_is_left_alone():
    own, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    with Stream(0).step(0, 0, 2) as stream:
        assert torch.equal(torch.rand(2, 3, generator=own), torch.rand(2, 3, generator=other))
        assert stream._calls == 2
